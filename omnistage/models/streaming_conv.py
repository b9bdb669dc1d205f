"""Causal convolutions over streams: each keeps the past rows its next outputs need, in any chunking.

Rows are time-major, [num_streams, num_rows, channels]; streams of a call may be at different places,
but have equal numbers of past and of new rows.  On a CPU the weights are packed once into oneDNN's
blocked layout.  Knows no architecture and no request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from omnistage.ops.linear import can_pack
from omnistage.ops.native.library import DTYPES, library

Histories = list[Tensor]  # one stream's past rows, [num_past, channels] per layer with a memory

_PACKING_ROWS = 128  # the layout is chosen for this many; the choice hardly depends on it
_NO_DIVISION_BY_ZERO = 1e-9  # as in the published activation


@dataclass(frozen=True)
class PastRows:
    """One layer's memory: the last `num_rows` rows it took in, of each stream.

    slot: its place in a stream's Histories.  is_padded: a new stream's past is zeros; otherwise it is
    empty and grows up to `num_rows`.
    """

    slot: int
    num_rows: int
    channels: int
    is_padded: bool = True

    def new_history(self, like: Tensor) -> Tensor:
        """The past of a stream that begins, in the dtype and on the device of `like`."""
        return like.new_zeros(self.num_rows if self.is_padded else 0, self.channels)

    def extend(self, histories: Histories, rows: Tensor) -> Tensor:
        """One stream's past and its new rows, [num_new, channels], in one; its past moves on."""
        window = torch.cat((histories[self.slot], rows))
        histories[self.slot] = self._tail(window)
        return window

    def window(self, streams: Sequence[Histories], num_new: int) -> tuple[Tensor, Tensor]:
        """Room for the next `num_new` rows of every stream, behind their past.

        Returns [num_streams, num_past + num_new, channels], and the view of it that the caller fills
        before `keep`.
        """
        past = [histories[self.slot] for histories in streams]
        num_past = past[0].shape[0]
        window = past[0].new_empty(len(past), num_past + num_new, self.channels)
        for row, history in zip(window, past, strict=True):
            row[:num_past] = history
        return window, window[:, num_past:]

    def keep(self, streams: Sequence[Histories], window: Tensor) -> None:
        """The last rows of a filled window become the streams' past."""
        for histories, rows in zip(streams, window, strict=True):
            histories[self.slot] = self._tail(rows)

    def _tail(self, rows: Tensor) -> Tensor:
        return rows[max(rows.shape[0] - self.num_rows, 0) :].clone()  # not a view: the window is large


class CausalConv:
    """A convolution whose output row t depends on input rows t - context ... t.

    weight: [out_channels, in_channels / groups, kernel_size].  bias: [out_channels].
    upsample: output rows per input row; out_channels then counts every phase, phase-major.
    past: its memory.  is_padded: a new stream's past is zeros; otherwise outputs begin once `context`
    rows are there.  nbytes: of weight and bias as held.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor,
        *,
        slot: int,
        dilation: int = 1,
        groups: int = 1,
        upsample: int = 1,
        is_padded: bool = True,
    ) -> None:
        self.context = (weight.shape[2] - 1) * dilation
        self.past = PastRows(slot, self.context, weight.shape[1] * groups, is_padded)
        self.nbytes = weight.nbytes + bias.nbytes
        self._out_channels = weight.shape[0]
        self._upsample = upsample
        self._dilation = [1, dilation]
        self._groups = groups
        self._bias = bias
        # A 2-D convolution over one line, channels last: rows enter and leave it without a copy.
        self._weight = weight[:, :, None].contiguous(memory_format=torch.channels_last)
        self._is_packed = can_pack(weight)
        if self._is_packed:
            size = [1, self.past.channels, 1, self.context + _PACKING_ROWS]
            with torch.inference_mode(False), torch.no_grad():
                self._weight = torch.ops.mkldnn._reorder_convolution_weight(
                    weight[:, :, None].contiguous(), [0, 0], [1, 1], self._dilation, groups, size
                )

    @classmethod
    def transposed(cls, weight: Tensor, bias: Tensor, *, stride: int, slot: int) -> CausalConv:
        """A transposed convolution without its incomplete outputs, as an ordinary one.

        weight: [in_channels, out_channels, kernel_size], kernel_size a multiple of stride.  Every input
        row makes `stride` output rows, except the first kernel_size / stride - 1: the outputs they
        would make lack rows before the start, and the reference trims them.
        """
        in_channels, out_channels, kernel_size = weight.shape
        reach = kernel_size // stride  # input rows that meet in one output row, the newest last
        phases = weight.view(in_channels, out_channels, reach, stride).permute(3, 1, 0, 2).flip(3)
        return cls(
            phases.reshape(stride * out_channels, in_channels, reach),
            bias.repeat(stride),
            slot=slot,
            upsample=stride,
            is_padded=False,
        )

    def push(self, streams: Sequence[Histories], window: Tensor) -> Tensor:
        """Outputs that are complete now, [num_streams, num_outputs, out_channels / upsample].

        window: from `past.window`, filled.  Its last rows become the streams' past.
        """
        self.past.keep(streams, window)
        return self(window)

    def __call__(self, window: Tensor) -> Tensor:
        """window: [batch, context + n, in_channels].  Returns [batch, n * upsample, out / upsample]."""
        batch = window.shape[0]
        channels = self._out_channels // self._upsample
        if window.shape[1] <= self.context:
            return window.new_empty(batch, 0, channels)
        image = window.transpose(1, 2).unsqueeze(2)  # [batch, in_channels, 1, context + n], channels last
        if self._is_packed:
            outputs = torch.ops.mkldnn._convolution_pointwise(
                image, self._weight, self._bias, [0, 0], [1, 1], self._dilation, self._groups, "none", [], ""
            )
        else:
            outputs = F.conv2d(
                image, self._weight, self._bias, dilation=tuple(self._dilation), groups=self._groups
            )
        return cast(Tensor, outputs).squeeze(2).transpose(1, 2).reshape(batch, -1, channels)


class Snake:
    """x + sin(alpha x)^2 / beta per channel (SnakeBeta, after arXiv 2006.08195).

    log_alpha, log_beta: [channels].
    """

    def __init__(self, log_alpha: Tensor, log_beta: Tensor) -> None:
        self.nbytes = 2 * log_alpha.nbytes
        self._alpha = log_alpha.exp()
        self._gain = (log_beta.exp() + _NO_DIVISION_BY_ZERO).rsqrt()

    def __call__(self, rows: Tensor, *, out: Tensor) -> None:
        """rows, out: [num_streams, num_rows, channels]; may be the same."""
        native = library() if rows.device.type == "cpu" and rows.dtype in DTYPES else None
        if native is not None and rows.stride(2) == out.stride(2) == 1:
            for source, target in zip(rows, out, strict=True):
                native.omnistage_snake(
                    DTYPES[rows.dtype],
                    torch.get_num_threads(),
                    *source.shape,
                    source.data_ptr(),
                    source.stride(0),
                    self._alpha.data_ptr(),
                    self._gain.data_ptr(),
                    target.data_ptr(),
                    target.stride(0),
                )
            return
        wave = rows * self._alpha
        wave.sin_()
        wave *= self._gain
        torch.addcmul(rows, wave, wave, out=out)
