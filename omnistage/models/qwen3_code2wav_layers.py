"""The layers of Code2Wav as streams: windowed attention, ConvNeXt upsampling, snake decoder blocks.

The transformer and the upsamplers take the new rows of all streams one after another, [num_rows,
channels] with a count per stream; the decoder takes streams of equal length side by side.  Each layer
keeps what it needs of a stream's past in that stream's Histories.  Knows no request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from omnistage.models.streaming_conv import CausalConv, Histories, PastRows, Snake
from omnistage.ops.activation import swiglu
from omnistage.ops.linear import Linear
from omnistage.ops.norm import rms_norm
from omnistage.ops.rotary import rotate_

_LAYER_NORM_EPS = 1e-6  # of the ConvNeXt blocks, as published


def project(linear: Linear, rows: Tensor, residual: Tensor | None = None) -> Tensor:
    """linear(rows), whose rows do not depend on their number: [num_rows, out_features].

    oneDNN sums a single row in another order than the same row among several; a second one is added.
    """
    if rows.shape[0] > 1:
        return linear(rows, residual)
    doubled = None if residual is None else residual.repeat(2, 1)
    return linear(rows.repeat(2, 1), doubled)[:1]


@dataclass(frozen=True)
class Packed:
    """New rows of several streams, one after another.

    streams: their histories.  counts: new rows of each, at least 1.
    """

    streams: Sequence[Histories]
    counts: Sequence[int]
    _masks: dict[tuple[int, int, int], Tensor | None] = field(default_factory=dict)

    def upsampled(self, factor: int) -> Packed:
        """The same streams with `factor` rows for each."""
        return Packed(self.streams, [count * factor for count in self.counts])

    def mask(self, num_past: int, count: int, reach: int, like: Tensor) -> Tensor | None:
        """[count, num_past + count], added to the scores: a new row sees itself and `reach` rows before it.

        None if all see all.  In the dtype and on the device of `like`, the same for all calls.
        """
        key = (num_past, count, reach)
        if key not in self._masks:
            visible = torch.ones(count, num_past + count, dtype=torch.bool, device=like.device)
            visible.tril_(num_past).triu_(num_past - reach)
            mask = like.new_zeros(visible.shape).masked_fill_(~visible, -torch.inf)
            self._masks[key] = None if bool(visible.all()) else mask
        return self._masks[key]


@dataclass(frozen=True, kw_only=True)
class WindowedAttention:
    """Self-attention in which a row sees itself and the `past.num_rows` rows before it.

    past: rows of [2 * num_kv_heads * head_dim], keys (rotated), then values.
    output: its weight has the layer scale in it.
    """

    past: PastRows
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv: Linear
    output: Linear

    def __call__(
        self, rows: Tensor, residual: Tensor, cosine: Tensor, sine: Tensor, packed: Packed
    ) -> Tensor:
        """rows: normalised, residual: not, both [num_rows, hidden].  Returns residual + attention."""
        heads = project(self.qkv, rows).view(
            rows.shape[0], -1, self.head_dim
        )  # queries, then keys, then values
        rotate_(heads[:, : self.num_heads + self.num_kv_heads], cosine, sine)
        attended = [
            self._attend(histories, new, packed)
            for histories, new in zip(packed.streams, torch.split(heads, list(packed.counts)), strict=True)
        ]
        return project(self.output, torch.cat(attended), residual)

    def _attend(self, histories: Histories, heads: Tensor, packed: Packed) -> Tensor:
        """heads: one stream's, [count, num_heads + 2 * num_kv_heads, head_dim]."""
        count = heads.shape[0]
        context = self.past.extend(histories, heads[:, self.num_heads :].flatten(1))
        mask = packed.mask(context.shape[0] - count, count, self.past.num_rows, heads)
        context = context.view(context.shape[0], -1, self.head_dim)
        keys, values = context.transpose(0, 1).unsqueeze(0).chunk(2, dim=1)
        attended = F.scaled_dot_product_attention(
            heads[:, : self.num_heads].transpose(0, 1).unsqueeze(0),  # [1, num_heads, count, head_dim]
            keys,
            values,
            attn_mask=mask,
            enable_gqa=self.num_heads != self.num_kv_heads,
        )
        return attended.squeeze(0).transpose(0, 1).reshape(count, -1)


@dataclass(frozen=True, kw_only=True)
class TransformerLayer:
    """A pre-norm block; the layer scales are in the weights of its two output projections."""

    attention_norm: Tensor
    attention: WindowedAttention
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    eps: float

    def __call__(self, hidden: Tensor, cosine: Tensor, sine: Tensor, packed: Packed) -> Tensor:
        """hidden: [num_rows, hidden_size].  Returns the same shape."""
        normed = rms_norm(hidden, self.attention_norm, self.eps)
        hidden = self.attention(normed, hidden, cosine, sine, packed)
        normed = rms_norm(hidden, self.mlp_norm, self.eps)
        return project(self.down, swiglu(project(self.gate_up, normed)), hidden)


@dataclass(frozen=True, kw_only=True)
class ConvNextUpsampler:
    """A transposed convolution without overlap, then a ConvNeXt block (arXiv 2201.03545), causal.

    expand: [factor * channels] per row.  narrow: its weight and bias have the block's gamma in them.
    """

    factor: int
    expand: Linear
    depthwise: CausalConv
    norm_weight: Tensor
    norm_bias: Tensor
    widen: Linear
    narrow: Linear

    def __call__(self, rows: Tensor, packed: Packed) -> tuple[Tensor, Packed]:
        """rows: [num_rows, channels].  Returns [num_rows * factor, channels] and whose they are."""
        packed = packed.upsampled(self.factor)
        rows = project(self.expand, rows).view(-1, rows.shape[1])
        mixed = self._mix(rows, packed)
        normed = F.layer_norm(
            mixed, self.norm_weight.shape, self.norm_weight, self.norm_bias, _LAYER_NORM_EPS
        )
        return project(self.narrow, F.gelu(project(self.widen, normed)), rows), packed

    def _mix(self, rows: Tensor, packed: Packed) -> Tensor:
        """The depthwise convolution of every stream in one call: what straddles two streams is dropped."""
        windows = [
            self.depthwise.past.extend(histories, new)
            for histories, new in zip(packed.streams, torch.split(rows, list(packed.counts)), strict=True)
        ]
        if len(windows) == 1:
            return self.depthwise(windows[0][None])[0]
        sizes = [window.shape[0] for window in windows]
        sizes[-1] -= self.depthwise.context
        outputs = torch.split(self.depthwise(torch.cat(windows)[None])[0], sizes)
        return torch.cat([out[:count] for out, count in zip(outputs, packed.counts, strict=True)])


@dataclass(frozen=True, kw_only=True)
class ResidualUnit:
    """rows + point(snake(conv(snake(rows)))), the convolution dilated."""

    snake: Snake
    conv: CausalConv
    inner_snake: Snake
    point: Linear

    def __call__(self, rows: Tensor, streams: Sequence[Histories]) -> Tensor:
        """rows: [num_streams, num_rows, channels].  Returns the same shape."""
        window, new = self.conv.past.window(streams, rows.shape[1])
        self.snake(rows, out=new)
        inner = self.conv.push(streams, window)
        self.inner_snake(inner, out=inner)
        return self.point(inner.flatten(0, 1), rows.flatten(0, 1)).view(rows.shape)


@dataclass(frozen=True, kw_only=True)
class DecoderBlock:
    """A snake, a transposed convolution that waits for one more row, and residual units."""

    snake: Snake
    upsample: CausalConv
    units: tuple[ResidualUnit, ...]

    def __call__(self, rows: Tensor, streams: Sequence[Histories]) -> Tensor:
        """rows: [num_streams, num_rows, channels].  Returns [num_streams, rows complete, channels / 2]."""
        window, new = self.upsample.past.window(streams, rows.shape[1])
        self.snake(rows, out=new)
        rows = self.upsample.push(streams, window)
        if rows.shape[1]:
            for unit in self.units:
                rows = unit(rows, streams)
        return rows


@dataclass(frozen=True, kw_only=True)
class WaveHead:
    """A snake and the convolution to one channel, as a product with each tap and a sum over taps.

    taps: channels -> kernel_size.  (oneDNN's convolution to a single channel takes four times as long.)
    """

    snake: Snake
    past: PastRows
    taps: Linear
    bias: Tensor

    def __call__(self, rows: Tensor, streams: Sequence[Histories]) -> Tensor:
        """rows: [num_streams, num_rows, channels].  Returns samples in [-1, 1], [num_streams, num_rows]."""
        num_streams, num_rows, _ = rows.shape
        window, new = self.past.window(streams, num_rows)
        self.snake(rows, out=new)
        self.past.keep(streams, window)
        products = self.taps(window.flatten(0, 1))  # [num_streams * (past + num_rows), kernel_size]
        size = self.past.num_rows + 1
        stride = window.shape[1] * size
        # products[t + tap, tap] for every tap side by side: [num_streams, num_rows, kernel_size]
        diagonals = products.as_strided((num_streams, num_rows, size), (stride, size, size + 1))
        return diagonals.sum(-1).add_(self.bias).clamp_(-1.0, 1.0)
