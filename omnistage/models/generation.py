"""Sampling defaults of a checkpoint, and settings laid over one another.  Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from omnistage.errors import InvalidRequest
from omnistage.models.files import read_settings
from omnistage.types import SamplingParams, Scalar


@dataclass(frozen=True)
class Setting:
    """A number that may be set.  low, high: allowed themselves, but for a low with is_above."""

    kind: type[int] | type[float]
    low: float
    high: float = sys.float_info.max
    is_above: bool = False

    @property
    def range(self) -> str:
        low = f"{'above' if self.is_above else 'at least'} {self.low:.15g}"
        return low if self.high == sys.float_info.max else f"{low} and at most {self.high:.15g}"

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high and not (self.is_above and value == self.low)


_MOST = 2**31 - 1
# What a pipeline file and a request may set of one stage.
SETTINGS: dict[str, Setting] = {
    "temperature": Setting(float, 0, 2),
    "top_k": Setting(int, -1, _MOST),
    "top_p": Setting(float, 0, 1, is_above=True),
    "min_p": Setting(float, 0, 1),
    "repetition_penalty": Setting(float, 0, is_above=True),
    "presence_penalty": Setting(float, -2, 2),
    "frequency_penalty": Setting(float, -2, 2),
    "max_tokens": Setting(int, 1, _MOST),
    "min_tokens": Setting(int, 0, _MOST),
    "seed": Setting(int, -(2**63), 2**63 - 1),
}
_IN_CHECKPOINTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def checkpoint_sampling(directory: Path, prefix: str = "") -> dict[str, Scalar]:
    """What generation_config.json says of sampling, by names of SamplingParams' fields.

    prefix: of the keys, for a part that does not read the prompt ("talker_").  A checkpoint that says
    do_sample: false is greedy (temperature 0); one that says nothing of sampling at all gives nothing.
    Raises WeightsError if the file is unreadable.
    """
    values = read_settings(directory / "generation_config.json")
    found: dict[str, Scalar] = {
        name: values[prefix + name]
        for name in _IN_CHECKPOINTS
        if isinstance(values.get(prefix + name), int | float)
    }
    if isinstance(values.get(prefix + "max_new_tokens"), int):
        found["max_tokens"] = values[prefix + "max_new_tokens"]
    if values.get(prefix + "do_sample") is False:
        found["temperature"] = 0.0
    return found


def overlay(params: SamplingParams, settings: Mapping[str, object], *, param: str) -> SamplingParams:
    """`params` with `settings` in their place.

    A top_k of -1 is off, as 0 is; a negative seed is folded into 63 bits.
    param: what to blame, for instance "stage_params.talker".  Raises InvalidRequest for a name that is
    no setting, and a value of the wrong type or out of range.
    """
    changes: dict[str, Scalar] = {}
    for name, value in settings.items():
        setting = SETTINGS.get(name)
        if setting is None:
            raise InvalidRequest(
                f"'{param}.{name}' is no setting; there are {', '.join(SETTINGS)}",
                code="unknown_parameter",
                param=f"{param}.{name}",
            )
        changes[name] = _checked(setting, value, f"{param}.{name}")
    if "top_k" in changes:
        changes["top_k"] = max(0, int(changes["top_k"]))
    if "seed" in changes:
        changes["seed"] = int(changes["seed"]) & (2**63 - 1)
    return msgspec.structs.replace(params, **changes)


def _checked(setting: Setting, value: object, param: str) -> int | float:
    is_whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or (setting.kind is int and not is_whole)
    ):
        wanted = "a whole number" if setting.kind is int else "a number"
        raise InvalidRequest(
            f"'{param}' is {_shown(value)}; it must be {wanted}", code="invalid_type", param=param
        )
    if not setting.holds(value):
        raise InvalidRequest(
            f"'{param}' is {_shown(value)}; it must be {setting.range}", code="invalid_value", param=param
        )
    return setting.kind(value)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
