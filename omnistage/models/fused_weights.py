"""Tensors and fused projections taken out of a checkpoint, and how much memory they hold.

Knows names and shapes, no architecture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from omnistage.models.loader import Checkpoint
from omnistage.ops.linear import GatedLinear, Linear


class FusedWeights:
    """Takes from one checkpoint into one dtype.  nbytes: of everything taken, also in its folders."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.nbytes = 0
        self._checkpoint = checkpoint
        self._folder = ""
        self._parent: FusedWeights | None = None

    def within(self, folder: str) -> FusedWeights:
        """The same, for names that begin with `folder`, which the caller then leaves out."""
        child = FusedWeights(self._checkpoint, self.dtype)
        child._folder = self._folder + folder
        child._parent = self
        return child

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Raises WeightsError if it is missing or of another shape."""
        tensor = self._checkpoint.take(self._folder + name, shape, self.dtype)
        self._count(tensor.nbytes)
        return tensor

    def linear(
        self, module: str, outputs: Mapping[str, int], in_features: int, *, bias: bool = False
    ) -> Linear:
        """Projections of one module stacked into one.  outputs: name -> out_features."""
        names = {f"{module}.{name}": size for name, size in outputs.items()}
        biases = [(f"{name}.bias", (size,)) for name, size in names.items()] if bias else []
        return self._fuse([(f"{name}.weight", (size, in_features)) for name, size in names.items()], biases)

    def gated(self, module: str, size: int, in_features: int) -> GatedLinear:
        """gate_proj and up_proj of a gated MLP without biases, `size` outputs each."""
        shape = (size, in_features)
        linear = GatedLinear(
            self._take([(f"{module}.gate_proj.weight", shape), (f"{module}.up_proj.weight", shape)])
        )
        self._count(linear.nbytes)
        return linear

    def stacked(self, weights: Sequence[tuple[str, int]], in_features: int) -> Linear:
        """Weights without biases, each by its full name and out_features, stacked into one."""
        return self._fuse([(name, (size, in_features)) for name, size in weights], [])

    def _fuse(
        self, weights: Sequence[tuple[str, tuple[int, ...]]], biases: Sequence[tuple[str, tuple[int, ...]]]
    ) -> Linear:
        linear = Linear(self._take(weights), self._take(biases) if biases else None)
        self._count(linear.nbytes)
        return linear

    def _take(self, parts: Sequence[tuple[str, tuple[int, ...]]]) -> Tensor:
        named = [(self._folder + name, shape) for name, shape in parts]
        return self._checkpoint.take_fused(named, self.dtype)

    def _count(self, num_bytes: int) -> None:
        self.nbytes += num_bytes
        if self._parent is not None:
            self._parent._count(num_bytes)
