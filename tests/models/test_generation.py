"""Sampling settings: what checkpoints say, and what may be laid over it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from omnistage.errors import InvalidRequest, WeightsError
from omnistage.models.generation import SETTINGS, checkpoint_sampling, overlay
from omnistage.types import SamplingParams


def written(directory: Path, values: Any) -> Path:
    (directory / "generation_config.json").write_text(json.dumps(values))
    return directory


def test_a_checkpoint_s_defaults(tmp_path: Path):
    assert checkpoint_sampling(tmp_path) == {}, "no file, no defaults"
    written(
        tmp_path,
        {
            "do_sample": True,
            "temperature": 0.7,
            "top_k": 20,
            "top_p": None,
            "repetition_penalty": 1.05,
            "max_new_tokens": 99,
            "eos_token_id": 5,
            "talker_do_sample": False,
            "talker_temperature": 0.9,
            "talker_max_new_tokens": 4096,
        },
    )
    assert checkpoint_sampling(tmp_path) == {
        "temperature": 0.7,
        "top_k": 20,
        "repetition_penalty": 1.05,
        "max_tokens": 99,
    }
    assert checkpoint_sampling(tmp_path, "talker_") == {"temperature": 0.0, "max_tokens": 4096}


def test_an_unreadable_file_is_an_error(tmp_path: Path):
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(WeightsError, match="fetch the model again"):
        checkpoint_sampling(tmp_path)


def test_settings_lie_over_params():
    params = SamplingParams(temperature=0.5, top_p=0.5, stop=("x",))
    laid = overlay(params, {"temperature": 1, "top_k": 7.0, "seed": -1, "max_tokens": 3}, param="p")
    assert laid == SamplingParams(
        temperature=1.0, top_p=0.5, stop=("x",), top_k=7, seed=2**63 - 1, max_tokens=3
    )
    assert type(laid.temperature) is float
    assert type(laid.top_k) is int
    assert overlay(params, {}, param="p") == params
    assert overlay(params, {"top_k": -1}, param="p").top_k == 0


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_is_a_field_and_takes_its_default(name: str):
    default = getattr(SamplingParams(), name)
    assert overlay(SamplingParams(), {name: default}, param="p") == SamplingParams()


@pytest.mark.parametrize(
    ("settings", "code", "message"),
    [
        ({"temprature": 1}, "unknown_parameter", "'p.temprature' is no setting; there are temperature, "),
        ({"logprobs": 1}, "unknown_parameter", "no setting"),
        ({"temperature": "hot"}, "invalid_type", "'p.temperature' is 'hot'; it must be a number"),
        ({"temperature": True}, "invalid_type", "is True; it must be a number"),
        ({"temperature": None}, "invalid_type", "is None"),
        ({"temperature": [1]}, "invalid_type", r"is \[1\]"),
        ({"temperature": math.nan}, "invalid_value", "is nan"),
        ({"temperature": math.inf}, "invalid_value", "is inf; it must be at least 0"),
        ({"temperature": 10**400}, "invalid_value", r"is 10+\.\.\.; it must be at least 0"),
        ({"temperature": -0.1}, "invalid_value", "at least 0"),
        ({"top_k": 1.5}, "invalid_type", "whole number"),
        ({"top_k": math.inf}, "invalid_type", "whole number"),
        ({"top_k": -2}, "invalid_value", "at least -1 and at most 2147483647"),
        ({"top_p": 0}, "invalid_value", "above 0 and at most 1"),
        ({"top_p": 1.1}, "invalid_value", "is 1.1"),
        ({"repetition_penalty": 0.0}, "invalid_value", "above 0"),
        ({"max_tokens": 0}, "invalid_value", "at least 1"),
        ({"seed": 2**64}, "invalid_value", "is 18446744073709551616"),
    ],
)
def test_what_is_no_setting(settings: dict[str, Any], code: str, message: str):
    with pytest.raises(InvalidRequest, match=message) as caught:
        overlay(SamplingParams(), settings, param="p")
    assert caught.value.code == code
    assert caught.value.param == f"p.{next(iter(settings))}"
