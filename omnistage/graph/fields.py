"""What a setting of a pipeline is: its type, unit, default, doc, and where it may be set.

The dataclasses in omnistage.graph.spec attach one Setting to each field; the loader, the builder,
validation, the JSON schema and the docs all read that, so a setting is written down once.
Knows no particular setting.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from types import MappingProxyType
from typing import Any

NAME_PATTERN = r"[A-Za-z](?:[A-Za-z0-9_-]{0,62}[A-Za-z0-9_])?"
PIPELINE_NAME_PATTERN = r"[A-Za-z](?:[A-Za-z0-9_.-]{0,62}[A-Za-z0-9_])?"
OPTION_PATTERN = r"[A-Za-z_][A-Za-z0-9_-]{0,63}"
DEVICE_PATTERN = r"cpu|cuda:(?:0|[1-9][0-9]{0,3})"

# Binary units first: format_bytes writes those.
_BYTE_UNITS = {
    "TiB": 1024**4,
    "GiB": 1024**3,
    "MiB": 1024**2,
    "KiB": 1024,
    "TB": 10**12,
    "GB": 10**9,
    "MB": 10**6,
    "KB": 10**3,
    "B": 1,
}
_BYTES_PATTERN = rf"([0-9]+(?:\.[0-9]+)?) ?({'|'.join(_BYTE_UNITS)})"
_MAX_INTEGER = 2**63 - 1


def parse_bytes(value: object) -> int:
    """Bytes from a whole number or from text such as "2GiB" or "1.5 MiB".  Raises ValueError."""
    if isinstance(value, str):
        match = re.fullmatch(_BYTES_PATTERN, value.strip())
        if match is None:
            raise ValueError(f"{value!r} is not a byte size; write a whole number or for instance 512MiB")
        try:
            size = Decimal(match[1]) * _BYTE_UNITS[match[2]]
        except InvalidOperation:
            size = Decimal(_MAX_INTEGER + 1)
        if size != size.to_integral_value():
            raise ValueError(f"{value!r} is not a whole number of bytes; use a smaller unit")
        value = int(size)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{value!r} is not a byte size; write a whole number or for instance 512MiB")
    if not 0 <= value <= _MAX_INTEGER:
        raise ValueError(f"{value} bytes is outside 0 to {_MAX_INTEGER}")
    return value


def format_bytes(size: int) -> int | str:
    """The shortest exact form: "256MiB" for 268435456, and the number itself if no unit divides it."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if size and size % _BYTE_UNITS[unit] == 0:
            return f"{size // _BYTE_UNITS[unit]}{unit}"
    return size


def size_text(size: int) -> str:
    """A size with three digits or so, for reading: "257 MiB"."""
    for unit in ("GiB", "MiB", "KiB"):
        scaled = size / _BYTE_UNITS[unit]
        if scaled >= 1:
            return f"{scaled:.0f} {unit}" if scaled >= 100 else f"{scaled:.1f} {unit}"
    return f"{size} B"


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word most like `word`, or None if none is close."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def hint(word: str, known: Iterable[str]) -> str:
    """The remedy for an unknown word: the nearest known one, or all of them."""
    options = list(known)
    close = nearest(word, options)
    if close is not None:
        return f"did you mean {close!r}?"
    return f"known: {', '.join(options)}" if options else "there are none"


class ValueType:
    """How a value of one type is read from YAML, JSON, a flag or Python, and written back."""

    label = "value"

    def parse(self, value: object) -> Any:
        """The value as the spec stores it (a stored value parses to itself).  Raises ValueError."""
        raise NotImplementedError

    def dump(self, value: Any) -> Any:
        """The stored value as plain YAML or JSON data, in the form a person would write."""
        return value

    def is_raw(self) -> bool:
        """Whether a flag's text is the value itself rather than YAML."""
        return False

    def schema(self) -> dict[str, Any]:
        """JSON schema of what parse accepts."""
        raise NotImplementedError


@dataclass(frozen=True)
class Text(ValueType):
    """Text that matches a pattern; what: how an error names it."""

    pattern: str = r"[^\x00-\x1f\x7f]*"
    what: str = "text in one line"
    label = "text"

    def parse(self, value: object) -> str:
        if not isinstance(value, str):
            raise ValueError(f"must be {self.what}, not {value!r}; put it in quotes")
        if re.fullmatch(self.pattern, value) is None:
            raise ValueError(f"must be {self.what}, not {value!r}")
        return value

    def is_raw(self) -> bool:
        return True

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "pattern": f"^(?:{self.pattern})$"}


@dataclass(frozen=True)
class Count(ValueType):
    """A whole number from `minimum` to `maximum`."""

    minimum: int = 1
    maximum: int = _MAX_INTEGER
    label = "whole number"

    def parse(self, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"must be a whole number of at least {self.minimum}, not {value!r}")
        if not self.minimum <= value <= _MAX_INTEGER:
            raise ValueError(f"must be at least {self.minimum}, not {value}")
        if value > self.maximum:
            raise ValueError(f"must be at most {self.maximum}, not {value}")
        return value

    def schema(self) -> dict[str, Any]:
        bound = {} if self.maximum == _MAX_INTEGER else {"maximum": self.maximum}
        return {"type": "integer", "minimum": self.minimum, **bound}


class Bytes(ValueType):
    """A byte size: a whole number, or text with a unit."""

    label = "byte size"

    def parse(self, value: object) -> int:
        return parse_bytes(value)

    def dump(self, value: int) -> int | str:
        return format_bytes(value)

    def schema(self) -> dict[str, Any]:
        return {
            "anyOf": [
                {"type": "integer", "minimum": 0},
                {"type": "string", "pattern": f"^{_BYTES_PATTERN}$", "examples": ["512MiB", "40GiB"]},
            ]
        }


class Flag(ValueType):
    """true or false."""

    label = "true or false"

    def parse(self, value: object) -> bool:
        if not isinstance(value, bool):
            raise ValueError(f"must be true or false, not {value!r}")
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


@dataclass(frozen=True)
class Choice(ValueType):
    """One of a few words, which may be members of a StrEnum."""

    words: tuple[str, ...]

    @property
    def label(self) -> str:  # type: ignore[override]
        return " or ".join(f"`{word}`" for word in self.words)

    def parse(self, value: object) -> str:
        for word in self.words:
            if isinstance(value, str) and word == value:
                return word
        raise ValueError(f"must be one of {', '.join(self.words)}, not {value!r}")

    def dump(self, value: str) -> str:
        return str(value)

    def is_raw(self) -> bool:
        return True

    def schema(self) -> dict[str, Any]:
        return {"enum": [str(word) for word in self.words]}


@dataclass(frozen=True)
class ListOf(ValueType):
    """A list of one or more values of one type; stored as a tuple."""

    item: ValueType
    label = "list"

    def parse(self, value: object) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise ValueError(f"must be a list, not {value!r}; write [{value}]")
        if not value:
            raise ValueError("must not be an empty list")
        return tuple(self.item.parse(item) for item in value)

    def dump(self, value: tuple[Any, ...]) -> list[Any]:
        return [self.item.dump(item) for item in value]

    def schema(self) -> dict[str, Any]:
        return {"type": "array", "items": self.item.schema(), "minItems": 1}


@dataclass(frozen=True)
class MapOf(ValueType):
    """A mapping from words to values of one type; stored read-only."""

    key: Text
    item: ValueType
    label = "mapping"

    def parse(self, value: object) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            raise ValueError(f"must be a mapping, not {value!r}; write {{name: value}}")
        parsed = {}
        for key, item in value.items():
            try:
                parsed[self.key.parse(key)] = self.item.parse(item)
            except ValueError as error:
                raise ValueError(f"{key}: {error}") from None
        return MappingProxyType(parsed)

    def dump(self, value: Mapping[str, Any]) -> dict[str, Any]:
        return {key: self.item.dump(item) for key, item in value.items()}

    def schema(self) -> dict[str, Any]:
        return {
            "type": "object",
            "propertyNames": {"pattern": f"^(?:{self.key.pattern})$"},
            "additionalProperties": self.item.schema(),
        }


class AnyScalar(ValueType):
    """Text, a number, true or false: a setting that only the stage's part understands."""

    label = "text or number"

    def parse(self, value: object) -> int | float | str | bool:
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"must be finite, not {value!r}")
        if isinstance(value, int) and not -_MAX_INTEGER <= value <= _MAX_INTEGER:
            raise ValueError(f"{value} does not fit 64 bits")
        if not isinstance(value, int | float | str):
            raise ValueError(f"must be text, a number, true or false, not {value!r}")
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": ["string", "number", "boolean"]}


@dataclass(frozen=True)
class Setting:
    """One field of a spec.  kinds: the stage kinds or edge modes that take it; empty for every one.

    unit: of the number ("tokens", "frames", "bytes"), or "".  A setting without a default is required;
    one whose default is None may be left open (null), and doc says what that means.
    """

    name: str
    type: ValueType
    unit: str
    doc: str
    kinds: frozenset[str]
    default: Any

    @property
    def is_required(self) -> bool:
        return self.default is dataclasses.MISSING

    def allows(self, kind: str) -> bool:
        return not self.kinds or kind in self.kinds

    def parse(self, value: object) -> Any:
        """The value as stored.  Raises ValueError."""
        if value is None and self.default is None:
            return None
        return self.type.parse(value)

    def dump(self, value: Any) -> Any:
        return None if value is None else self.type.dump(value)

    def schema(self) -> dict[str, Any]:
        """JSON schema with description and default."""
        schema = self.type.schema()
        if self.default is None:
            schema = {"anyOf": [schema, {"type": "null"}]}
        schema["description"] = f"{self.doc} Unit: {self.unit}." if self.unit else self.doc
        if not self.is_required:
            schema["default"] = self.dump(self.default)
        return schema


def described(type: ValueType, doc: str, *, unit: str = "", kinds: Iterable[str] = ()) -> dict[str, Any]:
    """Metadata for dataclasses.field() that turns the field into a Setting."""
    return {"setting": (type, unit, doc, frozenset(kinds))}


def settings_of(cls: type[Any]) -> Mapping[str, Setting]:
    """The table of a spec dataclass, in the order of its fields."""
    table = {}
    for field in dataclasses.fields(cls):
        if "setting" in field.metadata:
            type_, unit, doc, kinds = field.metadata["setting"]
            default = field.default
            if field.default_factory is not dataclasses.MISSING:
                default = field.default_factory()
            table[field.name] = Setting(field.name, type_, unit, doc, kinds, default)
    return MappingProxyType(table)


def normalise(spec: Any, table: Mapping[str, Setting]) -> None:
    """Store each field of a frozen spec in its parsed form; what cannot be parsed stays for validation."""
    for setting in table.values():
        try:
            object.__setattr__(spec, setting.name, setting.parse(getattr(spec, setting.name)))
        except ValueError:
            continue
