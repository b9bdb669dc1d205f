"""Encoder blocks over packed rows: many independent segments in one matrix, attention inside each.

Knows tensors, weights by name and how long they take; no media, no request and no architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from omnistage.errors import WeightsError
from omnistage.models.loader import Checkpoint
from omnistage.models.protocols import Sliced
from omnistage.ops.linear import Linear
from omnistage.ops.rotary import rotate_
from omnistage.ops.segments import attention

# Floating-point operations in about 20 ms: of one CPU thread in float32, and of an accelerator.
CPU_SLICE_FLOPS, DEVICE_SLICE_FLOPS = 1.5e9, 2e12
MIN_SLICE_ROWS = 64  # below this a matrix product loses more than the shorter slice is worth
CPU_PACK_ROWS, DEVICE_PACK_ROWS = 1024, 32768  # rows that go through all blocks together
MAX_SCORES = 1 << 22  # attention scores held at once where they are held at all

Activation = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda rows: F.gelu(rows, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


def activation_of(name: str) -> Activation:
    """An activation by its name in config.json.  Raises WeightsError for an unknown one."""
    if name not in ACTIVATIONS:
        raise WeightsError(f"activation {name!r} is not supported; known: {', '.join(sorted(ACTIVATIONS))}")
    return ACTIVATIONS[name]


class Pace:
    """Tells a generator when it has worked for about 20 ms and should yield.

    Counts operations rather than time, so that the slices are the same in every run.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        if device.type == "cpu":
            speed = torch.get_num_threads() * (1 if dtype == torch.float32 else 2)
            self._budget = CPU_SLICE_FLOPS * speed
        else:
            self._budget = DEVICE_SLICE_FLOPS
        self._spent = 0.0

    def is_due(self, flops: float) -> bool:
        """Whether to yield, now that `flops` more have been spent."""
        self._spent += flops
        if self._spent < self._budget:
            return False
        self._spent = 0.0
        return True

    def count(self, flops_each: float) -> int:
        """How many things of `flops_each` fit in a slice, at least one."""
        return max(1, int(self._budget / flops_each))


def in_slices(
    compute: Callable[[slice], Tensor],
    num_rows: int,
    flops_per_row: float,
    pace: Pace,
    min_rows: int | None = None,
) -> Sliced[Tensor]:
    """`compute` over consecutive slices of rows, concatenated; yields as `pace` says.

    compute: rows of the input to the rows of the output they give.
    min_rows: of a slice; None for MIN_SLICE_ROWS.
    """
    step = max(min_rows or MIN_SLICE_ROWS, pace.count(flops_per_row))
    step = -(-num_rows // -(-num_rows // step))  # equal slices, rather than a short last one
    parts = []
    for start in range(0, num_rows, step):
        parts.append(compute(slice(start, min(start + step, num_rows))))
        if pace.is_due(flops_per_row * step):
            yield
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True)
class SegmentGroup:
    """Rows [start, start + count * length) of a pack: `count` segments of `length` rows each."""

    start: int
    count: int
    length: int


def group_segments(lengths: Sequence[int]) -> list[SegmentGroup]:
    """Groups of neighbouring segments of equal length, in order.  lengths: rows of each segment."""
    groups: list[SegmentGroup] = []
    start = 0
    for length in lengths:
        if groups and groups[-1].length == length:
            groups[-1] = SegmentGroup(groups[-1].start, groups[-1].count + 1, length)
        else:
            groups.append(SegmentGroup(start, 1, length))
        start += length
    return groups


@dataclass(frozen=True)
class Rotation:
    """Factors for queries and keys, float32, from angles.  cosine, sine: [num_rows, 1, head_dim]."""

    cosine: Tensor
    sine: Tensor

    @classmethod
    def of(cls, angles: Tensor) -> Rotation:
        """angles: [num_rows, head_dim / 2], radians, float32; one for the two halves of a head."""
        cosine, sine = angles.cos(), angles.sin()
        return cls(torch.cat((cosine, cosine), -1)[:, None], torch.cat((-sine, sine), -1)[:, None])

    def apply_(self, heads: Tensor, rows: slice) -> None:
        """Rotate in place, in float32 whatever the dtype.  heads: [num_rows, num_heads, head_dim]."""
        if heads.dtype == torch.float32:
            rotate_(heads, self.cosine[rows], self.sine[rows])
        else:
            rotated = heads.float()
            rotate_(rotated, self.cosine[rows], self.sine[rows])
            heads.copy_(rotated)


@dataclass(frozen=True)
class LayerNorm:
    """weight, bias: [size]."""

    weight: Tensor
    bias: Tensor
    eps: float

    def __call__(self, rows: Tensor) -> Tensor:
        """rows: [..., size]."""
        return F.layer_norm(rows, self.weight.shape, self.weight, self.bias, self.eps)


@dataclass(frozen=True)
class EncoderBlock:
    """A pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x))."""

    num_heads: int
    attention_norm: LayerNorm
    qkv: Linear
    output: Linear
    mlp_norm: LayerNorm
    up: Linear
    down: Linear
    activation: Activation

    def run(
        self, hidden: Tensor, groups: Sequence[SegmentGroup], rotation: Rotation | None, pace: Pace
    ) -> Sliced[Tensor]:
        """hidden: [num_rows, size], left unchanged; `groups` cover its rows.  Returns the same shape.

        Yields as `pace` says.
        """
        num_rows, size = hidden.shape

        def project(rows: slice) -> Tensor:
            heads = self.qkv(self.attention_norm(hidden[rows]))
            if rotation is not None:
                split = heads.view(heads.shape[0], 3 * self.num_heads, -1)
                rotation.apply_(split[:, : 2 * self.num_heads], rows)  # queries and keys
            return heads

        heads = yield from in_slices(project, num_rows, 6.0 * size * size, pace)
        heads = heads.view(num_rows, 3, self.num_heads, -1)
        attended = yield from packed_attention(heads, groups, pace)

        def finish(rows: slice) -> Tensor:
            mixed = self.output(attended[rows], hidden[rows])
            return self.down(self.activation(self.up(self.mlp_norm(mixed))), mixed)

        flops_per_row = 2.0 * size * size + 4.0 * size * self.up.out_features
        return (yield from in_slices(finish, num_rows, flops_per_row, pace))


def packed_attention(heads: Tensor, groups: Sequence[SegmentGroup], pace: Pace) -> Sliced[Tensor]:
    """Attention of every row to all rows of its segment.

    heads: [num_rows, 3, num_heads, head_dim], queries, keys and values.
    Returns [num_rows, num_heads * head_dim].
    """
    num_rows, _, num_heads, head_dim = heads.shape
    output = heads.new_empty(num_rows, num_heads, head_dim)
    for group in groups:
        rows = slice(group.start, group.start + group.count * group.length)
        shape = (group.count, group.length, num_heads, head_dim)
        # each [count, num_heads, length, head_dim]
        query, key, value = heads[rows].view(shape[0], shape[1], 3, *shape[2:]).permute(2, 0, 3, 1, 4)
        result = output[rows].view(shape).transpose(1, 2)
        flops_per_query = 4.0 * group.length * num_heads * head_dim
        for segments, queries in _attention_slices(group, num_heads, flops_per_query, pace):
            part = attention(query[segments, :, queries], key[segments], value[segments])
            result[segments, :, queries] = part
            if pace.is_due(flops_per_query * part.shape[0] * part.shape[2]):
                yield
    return output.view(num_rows, -1)


def _attention_slices(
    group: SegmentGroup, num_heads: int, flops_per_query: float, pace: Pace
) -> Iterator[tuple[slice, slice]]:
    """Parts of a group that fit a slice: several segments at once, or some queries of one."""
    max_queries = min(pace.count(flops_per_query), max(1, MAX_SCORES // (num_heads * group.length)))
    num_segments = max(1, max_queries // group.length)
    num_parts = -(-group.length // max(MIN_SLICE_ROWS, max_queries))
    step = -(-group.length // num_parts)
    for first in range(0, group.count, num_segments):
        for start in range(0, group.length, step):
            yield slice(first, first + num_segments), slice(start, start + step)


class PartWeights:
    """Takes one part's weights out of a checkpoint, onto a device and into a dtype.

    nbytes: of everything taken.
    """

    def __init__(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        self.checkpoint = checkpoint
        self.device = device
        self.dtype = dtype
        self.nbytes = 0

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Raises WeightsError if it is missing or of another shape."""
        tensor = self.checkpoint.take(name, shape, self.dtype).to(self.device)
        self.nbytes += tensor.nbytes
        return tensor

    def linear(self, names: str | Sequence[str], out_features: int, in_features: int) -> Linear:
        """A projection with bias, or several of equal size stacked into one."""
        parts = [names] if isinstance(names, str) else names
        weights = [self.tensor(f"{name}.weight", out_features, in_features) for name in parts]
        biases = [self.tensor(f"{name}.bias", out_features) for name in parts]
        if len(parts) == 1:
            return Linear(weights[0], biases[0])
        return Linear(torch.cat(weights), torch.cat(biases))

    def norm(self, name: str, size: int, eps: float) -> LayerNorm:
        return LayerNorm(self.tensor(f"{name}.weight", size), self.tensor(f"{name}.bias", size), eps)


def with_defaults(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A part's configuration with what it leaves out filled in.

    A checkpoint written by transformers may omit every value that equals the architecture's default.
    """
    return {**defaults, **{key: value for key, value in values.items() if value is not None}}
