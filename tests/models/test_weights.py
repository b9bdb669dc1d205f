"""Weights fill modules by name; what does not fit is named."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from omnistage.errors import WeightsError
from omnistage.models.weights import build_module, count_bytes, dtype_of, read_tensors


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.norm = nn.LayerNorm(2)
        self.table = nn.Embedding(4, 2)


@pytest.fixture
def directory(tmp_path):
    state = {f"part.{name}": tensor for name, tensor in Tiny().state_dict().items()}
    save_file(state | {"other.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    return tmp_path


def test_a_module_is_filled_from_the_tensors_below_a_prefix(directory):
    tensors = read_tensors(directory, prefix="part.")
    module = build_module(Tiny, tensors, device="cpu", dtype=torch.float32)
    assert not module.training
    assert not any(parameter.requires_grad for parameter in module.parameters())
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in module.state_dict().items())
    assert module.linear.weight.data_ptr() == tensors["linear.weight"].data_ptr(), (
        "no copy in the file's dtype"
    )
    assert count_bytes(module) == 4 * (6 + 2 + 4 + 8)
    half = build_module(Tiny, tensors, device="cpu", dtype=torch.bfloat16)
    assert half.linear.weight.dtype == torch.bfloat16


def test_what_does_not_fit_is_named(directory):
    tensors = read_tensors(directory, prefix="part.")
    tensors["extra"] = tensors.pop("norm.bias")
    tensors["linear.weight"] = torch.zeros(2, 4)
    with pytest.raises(WeightsError) as caught:
        build_module(Tiny, tensors, device="cpu", dtype=torch.float32)
    for fault in (
        "3 tensors",
        "norm.bias is missing",
        "extra is unknown",
        "linear.weight has shape (2, 4), not (2, 3)",
    ):
        assert fault in caught.value.message


def test_missing_and_damaged_files_are_named(tmp_path):
    with pytest.raises(WeightsError, match="does not exist"):
        read_tensors(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x20\0\0\0\0\0\0\0{")
    with pytest.raises(WeightsError, match="cannot be read"):
        read_tensors(tmp_path)


@pytest.mark.parametrize("name", ["int8", "nonsense", "nn"])
def test_unknown_dtypes_are_named(name):
    assert dtype_of("bfloat16") is torch.bfloat16
    with pytest.raises(WeightsError, match=name):
        dtype_of(name)
