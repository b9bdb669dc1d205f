"""Bridges between HostTensor and torch without a copy.  Knows no transport: it only shares memory."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from omnistage.types import HostTensor

_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


def to_host(tensor: Tensor) -> HostTensor:
    """Share a CPU tensor's memory (copied only if it is not contiguous or not on the CPU).

    The HostTensor keeps the memory alive; the tensor must not be written to afterwards.
    """
    contiguous = tensor.detach().to("cpu").contiguous()
    data = contiguous.reshape(-1).view(torch.uint8).numpy().data
    return HostTensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), data)


def to_torch(host: HostTensor) -> Tensor:
    """A tensor over the same memory, to be read only.

    Raises TypeError for a dtype torch lacks and ValueError if the bytes do not fill the shape.
    """
    dtype = _DTYPES.get(host.dtype)
    if dtype is None:
        raise TypeError(f"dtype {host.dtype!r} has no torch equivalent; use one of {sorted(_DTYPES)}")
    num_elements = 1
    for size in host.shape:
        num_elements *= size
    if host.nbytes != num_elements * dtype.itemsize:
        raise ValueError(f"{host.nbytes} bytes do not fill {host.dtype} of shape {host.shape}")
    if num_elements == 0:
        return torch.empty(host.shape, dtype=dtype)
    with warnings.catch_warnings():
        # torch has no read-only tensors and warns about every read-only buffer
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(host.data, dtype=dtype).view(host.shape)
