"""Reads safetensors files and fills modules with them, without copying where memory allows.

Knows names, shapes and dtypes; knows no architecture.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from omnistage.errors import WeightsError
from omnistage.models.loader import is_finite

M = TypeVar("M", bound=nn.Module)


FILLS = (Tensor.uniform_, Tensor.normal_, Tensor.fill_, Tensor.zero_)


class _WithoutInit(TorchFunctionMode):
    """Leaves new parameters unfilled.  Filling them, even on the meta device, costs most of a second."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in FILLS or getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else (kwargs or {})["tensor"]
        return func(*args, **(kwargs or {}))


def read_tensors(
    directory: Path, file_name: str = "model.safetensors", prefix: str = ""
) -> dict[str, Tensor]:
    """The tensors of one file whose names start with `prefix`, which is cut off.

    On the CPU, memory-mapped: treat as read-only.  Raises WeightsError if the file is missing or damaged.
    """
    path = directory / file_name
    if not path.is_file():
        raise WeightsError(f"{path} does not exist; fetch or copy the model's files again")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {
                name.removeprefix(prefix): file.get_tensor(name)
                for name in file.keys()  # noqa: SIM118 - not a mapping
                if name.startswith(prefix)
            }
    except (SafetensorError, OSError) as error:
        raise WeightsError(
            f"{path} cannot be read ({error}); fetch or copy the model's files again"
        ) from error


def build_module(
    create: Callable[[], M], tensors: dict[str, Tensor], *, device: torch.device | str, dtype: torch.dtype
) -> M:
    """`create()` with `tensors` as its weights, in inference mode, on `device` in `dtype`.

    On the CPU and in the file's dtype the weights stay memory-mapped.  Raises WeightsError, naming
    the tensors, if names or shapes do not fit the module or a value is not finite.
    """
    with torch.device("meta"), _WithoutInit():
        module = create()
    expected = module.state_dict()
    faults = [f"{name} is missing" for name in expected.keys() - tensors.keys()]
    faults += [f"{name} is unknown" for name in tensors.keys() - expected.keys()]
    faults += [
        f"{name} has shape {tuple(tensors[name].shape)}, not {tuple(expected[name].shape)}"
        for name in expected.keys() & tensors.keys()
        if tensors[name].shape != expected[name].shape
    ]
    faults += [
        f"{name} holds NaN or infinite values"
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and not is_finite(tensor)
    ]
    if faults:
        shown = "; ".join(sorted(faults)[:5])
        raise WeightsError(
            f"{len(faults)} tensors do not fit {type(module).__name__}: {shown}; check that config.json "
            "and the weights belong together, or fetch the model again"
        )
    converted = {
        name: tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)
        for name, tensor in tensors.items()
    }
    module.load_state_dict(converted, assign=True)
    return module.requires_grad_(False).eval()


def count_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters and buffers."""
    return sum(tensor.nbytes for tensor in [*module.parameters(), *module.buffers()])


def dtype_of(name: str) -> torch.dtype:
    """torch's dtype by its name ("float32").  Raises WeightsError for anything else."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise WeightsError(f"dtype {name!r} is unknown; use 'float32', 'bfloat16' or 'float16'")
    return dtype
