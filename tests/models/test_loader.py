"""Checkpoints that are whole load; any fault is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from omnistage.errors import WeightsError
from omnistage.models.loader import Checkpoint, read_json

TENSORS = {
    "part.first.weight": torch.arange(12.0).view(3, 4),
    "part.second.weight": torch.ones(2, 4, dtype=torch.bfloat16),
    "other.weight": torch.zeros(5),
}


@pytest.fixture
def single(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    names = sorted(TENSORS)
    weight_map = {}
    for number, name in enumerate(names):
        file_name = f"model-{number + 1:05d}-of-{len(names):05d}.safetensors"
        save_file({name: TENSORS[name]}, tmp_path / file_name)
        weight_map[name] = file_name
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_take_and_finish(layout: str, request: pytest.FixtureRequest) -> None:
    checkpoint = Checkpoint(request.getfixturevalue(layout), prefix="part.")
    assert checkpoint.names == {"first.weight", "second.weight"}
    first = checkpoint.take("first.weight", (3, 4), torch.float32)
    assert torch.equal(first, TENSORS["part.first.weight"])
    with pytest.raises(WeightsError, match=r"part\.second\.weight"):
        checkpoint.finish()
    checkpoint.finish(ignored_suffixes=("second.weight",))
    assert checkpoint.take("second.weight", (2, 4), torch.float32).dtype == torch.float32
    checkpoint.finish()


def test_fused(single: Path) -> None:
    checkpoint = Checkpoint(single, prefix="part.")
    fused = checkpoint.take_fused([("first.weight", (3, 4)), ("second.weight", (2, 4))], torch.bfloat16)
    assert fused.shape == (5, 4)
    assert torch.equal(fused[:3].float(), TENSORS["part.first.weight"])
    checkpoint.finish()


def test_missing_and_wrong_shape(single: Path) -> None:
    checkpoint = Checkpoint(single)
    with pytest.raises(WeightsError, match=r"part\.third\.weight is missing"):
        checkpoint.take("part.third.weight", (1,), torch.float32)
    with pytest.raises(WeightsError, match=r"part\.first\.weight .*\[3, 4\].*\[4, 3\]"):
        checkpoint.take("part.first.weight", (4, 3), torch.float32)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_not_finite(tmp_path: Path, bad: float, dtype: torch.dtype) -> None:
    tensor = torch.zeros(50, 50, dtype=dtype)
    tensor[49, 3] = bad
    save_file({"x": tensor}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"x in .* NaN or infinite"):
        Checkpoint(tmp_path).take("x", (50, 50), torch.float32)


def test_large_values_are_finite(tmp_path: Path) -> None:
    save_file({"x": torch.full((100,), 3e38)}, tmp_path / "model.safetensors")
    assert Checkpoint(tmp_path).take("x", (100,), torch.float32)[0] > 2e38


def test_quantised(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(4, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match="quantised"):
        Checkpoint(tmp_path).take("x", (4,), torch.float32)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"model\.safetensors does not exist"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("keep", [4, 200])
def test_truncated(single: Path, keep: int) -> None:
    path = single / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(WeightsError, match="damaged"):
        Checkpoint(single)


def test_missing_shard_and_broken_promise(sharded: Path) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(WeightsError, match="00002"):
        Checkpoint(sharded)
    save_file({"unrelated": torch.zeros(1)}, sharded / "model-00002-of-00003.safetensors")
    with pytest.raises(WeightsError, match=r"lacks part\.first\.weight"):
        Checkpoint(sharded)


def test_bad_index(single: Path) -> None:
    (single / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(WeightsError, match="weight_map"):
        Checkpoint(single)


def test_read_json(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    with pytest.raises(WeightsError, match="does not exist"):
        read_json(path)
    path.write_text("{")
    with pytest.raises(WeightsError, match="not readable JSON"):
        read_json(path)
    path.write_text("[1]")
    with pytest.raises(WeightsError, match="list"):
        read_json(path)


def test_unchanged_dtype_is_the_mapped_file(single: Path) -> None:
    """No copy: the tensor's memory lies in a mapping of the file."""
    tensor = Checkpoint(single).take("part.first.weight", (3, 4), torch.float32)
    address = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines() if Path("/proc/self/maps").exists() else ():
        low, high = (int(bound, 16) for bound in line.split()[0].split("-"))
        if low <= address < high:
            assert line.endswith("model.safetensors")
