"""The rules every request body follows: nothing unknown, nothing ignored, one clear error.

Turns bytes into a pydantic model, and whatever is wrong with them into an InvalidRequest that names
the field the way OpenAI does ("messages[0].content[1].image_url.url").  Knows no endpoint.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from omnistage.errors import InvalidRequest

B = TypeVar("B", bound="Body")
MAX_SHOWN_CHARACTERS = 80
MAX_JSON_VALUES = 500_000
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass(frozen=True)
class Unsupported:
    """A field OpenAI defines and this server refuses.

    remedy: what to do instead.  neutral: values that ask for nothing, which pass (null always does).
    """

    remedy: str
    neutral: tuple[Any, ...] = ()


class Body(BaseModel):
    """Base of all bodies.  unsupported: fields that are known and refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
    unsupported: ClassVar[Mapping[str, Unsupported]] = {}

    @model_validator(mode="before")
    @classmethod
    def _only_known_fields(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        for name, given in value.items():
            if name in cls.unsupported:
                refusal = cls.unsupported[name]
                if given is not None and given not in refusal.neutral:
                    _fail("unsupported_parameter", name, f"is not supported by this server; {refusal.remedy}")
            elif name not in cls.model_fields:
                _fail("unknown_parameter", name, f"is not a known parameter{nearest(name, cls.model_fields)}")
        return {name: given for name, given in value.items() if name not in cls.unsupported}


def nearest(name: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    """A suffix that offers the nearest known name, in any case, or all of them when none is near."""
    folded = {each.casefold(): each for each in known}
    close = difflib.get_close_matches(name[:MAX_SHOWN_CHARACTERS].casefold(), folded, n=1)
    if close:
        return f"; did you mean '{folded[close[0]]}'?"
    return f"; known: {', '.join(sorted(known))}" if 0 < len(known) <= 12 else ""


def shown(value: Any) -> str:
    """A value for an error message, cut to a readable length."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARACTERS else text[: MAX_SHOWN_CHARACTERS - 3] + "..."


def decode_json(raw: bytes) -> Any:
    """Strict JSON.  Raises InvalidRequest (code invalid_json) for anything else, NaN included.

    Also for more values than any real request has: each costs some hundred bytes once decoded, so
    that a large body of nothing but brackets would take gigabytes.
    """
    if len(raw) > MAX_JSON_VALUES:  # media are long strings without these characters
        num_values = raw.count(b",") + raw.count(b"[") + raw.count(b"{")
        if num_values > MAX_JSON_VALUES:
            raise InvalidRequest(
                f"the body has about {num_values} values, the limit is {MAX_JSON_VALUES}; send fewer",
                code="invalid_json",
            )
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"the body is not UTF-8 (byte {error.start} is 0x{raw[error.start]:02x}); send JSON in UTF-8",
            code="invalid_json",
        ) from None
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        if _SURROGATE_ESCAPE.search(text):
            json.dumps(value, ensure_ascii=False).encode()  # fails on half a surrogate pair
        return value
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply to be read", code="invalid_json") from None
    except ValueError as error:
        raise InvalidRequest(f"the body is not JSON: {error}", code="invalid_json") from None


def parse_body(model: type[B], value: Any) -> B:
    """value: decoded JSON or form fields.  Raises InvalidRequest naming the first field at fault."""
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object, got {shown(value)}", code="invalid_type")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _as_invalid_request(error.errors(include_url=False)[0], value) from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply to be read", code="invalid_json") from None


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _fail(code: str, name: str, complaint: str) -> NoReturn:
    raise PydanticCustomError(
        "body_field", "{complaint}", {"code": code, "name": name, "complaint": complaint}
    )


def _as_invalid_request(error: ErrorDetails, body: dict[str, Any]) -> InvalidRequest:
    kind, context = error["type"], error.get("ctx", {})
    path = _path_in(body, error["loc"], is_missing=kind == "missing")
    if kind == "body_field":
        path = [*path, context["name"]]
        param = _param(path)
        return InvalidRequest(f"{_quoted(param)} {context['complaint']}", code=context["code"], param=param)
    param = _param(path)
    if kind == "missing":
        return InvalidRequest(
            f"{_quoted(param)} is required and missing", code="missing_required_parameter", param=param
        )
    if kind == "union_tag_not_found":
        return InvalidRequest(
            f"{_quoted(param)}: a 'type' is required and missing",
            code="missing_required_parameter",
            param=param,
        )
    is_type_error = kind.endswith(("_type", "_parsing", "_unicode"))
    message = error["msg"].removeprefix("Value error, ")
    return InvalidRequest(
        f"{_quoted(param)}: {message}, got {shown(error['input'])}",
        code="invalid_type" if is_type_error else "invalid_value",
        param=param,
    )


def _path_in(body: Any, location: tuple[int | str, ...], *, is_missing: bool) -> list[int | str]:
    """The part of a pydantic location that exists in the body: union tags are left out.

    The tag of a content part is its "type", which may also be the name of one of its fields.
    """
    path: list[int | str] = []
    current = body
    for position, step in enumerate(location):
        is_last = position == len(location) - 1
        if isinstance(current, dict) and isinstance(step, str):
            is_tag = bool(path) and isinstance(path[-1], int) and step == current.get("type")
            if is_tag and location[position - 1] == path[-1]:
                continue
            if step in current or (is_last and is_missing):
                current = current.get(step)
                path.append(step)
        elif isinstance(current, list) and isinstance(step, int) and step < len(current):
            current = current[step]
            path.append(step)
    return path


def _param(path: list[int | str]) -> str:
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}" if text else step
    return text


def _quoted(param: str) -> str:
    return f"'{param}'"
