"""HostTensor and torch.Tensor over one memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from omnistage.ops.tensors import to_host, to_torch
from omnistage.types import HostTensor


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool], ids=str
)
@pytest.mark.parametrize("shape", [(3, 4), (1,), (), (0, 5)])
def test_round_trip(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (10 * torch.randn(shape)).to(dtype)
    host = to_host(tensor)
    assert (host.dtype, host.shape) == (str(dtype).removeprefix("torch."), shape)
    assert host.nbytes == tensor.nbytes
    back = to_torch(host)
    assert back.dtype == dtype
    assert torch.equal(back, tensor)


def test_memory_is_shared() -> None:
    tensor = torch.arange(6, dtype=torch.bfloat16).view(2, 3)
    back = to_torch(to_host(tensor))
    assert back.data_ptr() == tensor.data_ptr()
    array = np.arange(5, dtype=np.float32)
    assert to_torch(HostTensor.from_numpy(array)).data_ptr() == array.ctypes.data


def test_strided_tensor_is_copied() -> None:
    tensor = torch.arange(6.0).view(2, 3).t()
    assert torch.equal(to_torch(to_host(tensor)), tensor)


def test_read_only_bytes() -> None:
    assert to_torch(HostTensor("int64", (2,), np.array([1, 2]).tobytes())).tolist() == [1, 2]


def test_wrong_size_and_dtype() -> None:
    with pytest.raises(ValueError, match="do not fill"):
        to_torch(HostTensor("float32", (3,), bytes(8)))
    with pytest.raises(TypeError, match="complex"):
        to_torch(HostTensor("complex64", (1,), bytes(8)))
