"""Weights from safetensors files, by name.  Knows files, names and shapes, no architecture."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from omnistage.errors import WeightsError
from omnistage.graph.checkpoint import INDEX_FILE, SINGLE_FILE

_on_bytes: ContextVar[Callable[[int], None] | None] = ContextVar("on_bytes", default=None)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.  Raises WeightsError if the file is missing or is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise WeightsError(f"{path} does not exist; fetch the model again or correct its path") from error
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} is not readable JSON ({error}); fetch the model again") from error
    if not isinstance(value, dict):
        raise WeightsError(f"{path} holds {type(value).__name__}, not a JSON object")
    return value


def is_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite, at the memory's speed.

    A sum is finite exactly if all values are, short of overflow, hence the second look.  In the tensor's
    own type: with a wider one torch is thirty times slower on bfloat16.
    """
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


@contextmanager
def watching(on_bytes: Callable[[int], None]) -> Iterator[None]:
    """Tell `on_bytes` the size of each tensor that any Checkpoint of this thread takes in this block."""
    token = _on_bytes.set(on_bytes)
    try:
        yield
    finally:
        _on_bytes.reset(token)


class Checkpoint:
    """The safetensors files of a model directory, memory-mapped, one or sharded.

    Every tensor is taken once by name; `finish` then reports what nobody took.  prefix: this part's
    names begin with it and are used without it; names outside it belong to other parts.
    Raises WeightsError naming the file, or the tensor, for anything missing, unexpected, truncated,
    of the wrong shape or not finite.
    """

    def __init__(self, directory: Path, *, prefix: str = "") -> None:
        self.directory = directory
        self.prefix = prefix
        self._files: dict[str, Any] = {}  # full name -> open file
        self._paths: dict[str, Path] = {}  # full name -> where it is
        for path, expected in self._shards():
            self._open(path, expected)
        self._taken: set[str] = set()

    def _shards(self) -> list[tuple[Path, set[str] | None]]:
        """Files and the names the index promises in each (None: whatever is in it)."""
        if not (self.directory / INDEX_FILE).exists():
            return [(self.directory / SINGLE_FILE, None)]
        weight_map = read_json(self.directory / INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict):
            raise WeightsError(f"{self.directory / INDEX_FILE} has no weight_map; fetch the model again")
        shards: dict[str, set[str]] = {}
        for name, file_name in weight_map.items():
            shards.setdefault(str(file_name), set()).add(name)
        return [(self.directory / file_name, names) for file_name, names in sorted(shards.items())]

    def _open(self, path: Path, expected: set[str] | None) -> None:
        if not path.is_file():
            raise WeightsError(f"{path} does not exist; fetch the model again or correct its path")
        try:
            file = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{path} is damaged ({error}); delete it and fetch the model again") from error
        names = set(file.keys())  # type: ignore[no-untyped-call]
        for name in sorted((expected or set()) - names):
            raise WeightsError(f"{path} lacks {name}, which the index promises; fetch the model again")
        self._files.update(dict.fromkeys(names, file))
        self._paths.update(dict.fromkeys(names, path))

    @property
    def names(self) -> set[str]:
        """What this part's tensors are called, without the prefix."""
        return {name.removeprefix(self.prefix) for name in self._files if name.startswith(self.prefix)}

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """One tensor.  Without a change of dtype it is the mapped file itself: never write to it."""
        full_name = self.prefix + name
        file = self._files.get(full_name)
        if file is None:
            raise WeightsError(
                f"{full_name} is missing from {self.directory}; is the config.json of the same model?"
            )
        path = self._paths[full_name]
        stored = tuple(file.get_slice(full_name).get_shape())
        if stored != tuple(shape):
            raise WeightsError(
                f"{full_name} in {path} has shape {list(stored)}, but config.json asks for {list(shape)}; "
                "fetch both files of one model again"
            )
        tensor: Tensor = file.get_tensor(full_name)
        if not tensor.is_floating_point():
            raise WeightsError(
                f"{full_name} in {path} is {tensor.dtype}; quantised checkpoints are not supported, use one "
                "in bfloat16 or float32"
            )
        self._taken.add(full_name)
        if not is_finite(tensor):
            raise WeightsError(f"{full_name} in {path} holds NaN or infinite values; fetch the file again")
        on_bytes = _on_bytes.get()
        if on_bytes is not None:
            on_bytes(tensor.nbytes)
        return tensor.to(dtype)

    def take_fused(self, parts: Iterable[tuple[str, Sequence[int]]], dtype: torch.dtype) -> Tensor:
        """Several (name, shape) stacked along the first axis, as one projection."""
        return torch.cat([self.take(name, shape, dtype) for name, shape in parts])

    def finish(self, *, ignored_suffixes: tuple[str, ...] = ()) -> None:
        """Raises WeightsError if a tensor of this part was never taken."""
        unexpected = sorted(
            name
            for name in self._files
            if name.startswith(self.prefix)
            and name not in self._taken
            and not name.endswith(ignored_suffixes or ("\0",))
        )
        if unexpected:
            shown = ", ".join(unexpected[:5]) + (", ..." if len(unexpected) > 5 else "")
            raise WeightsError(
                f"{self.directory} holds {len(unexpected)} tensors that its config.json does not ask for: "
                f"{shown}"
            )
