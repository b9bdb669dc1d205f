"""Small checkpoints that several tests of models load."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def qwen3_omni_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen3-Omni as the hub would have it, in several shards."""
    from tests.models.qwen_checkpoints import build_qwen3_omni

    return build_qwen3_omni(tmp_path_factory.mktemp("qwen3_omni"))


@pytest.fixture(scope="session")
def qwen3_vl_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen3-VL as the hub would have it, in several shards."""
    from tests.models.qwen_checkpoints import build_qwen3_vl

    return build_qwen3_vl(tmp_path_factory.mktemp("qwen3_vl"))
