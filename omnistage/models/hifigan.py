"""The HiFi-GAN decoder of VITS as a stream: latents in, samples out, any chunking, one result.

Every convolution keeps the inputs its next outputs still need, so nothing is computed twice and the
edges see the same zeros as in one pass; outputs come out as soon as their right context is there.
Generator: Kong et al., HiFi-GAN (arXiv 2010.05646), with residual blocks of the second kind.
Rows are time-major, [time, channels], which makes upsampling a reshape and history a copy of rows.
Knows no sentence and no request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from omnistage.errors import StreamError, WeightsError
from omnistage.models.registry import PartSource
from omnistage.models.vits_files import read_weights, require_float32

MODEL_TYPE = "vits_hifigan"
SLOPE = 0.1  # of the leaky ReLU inside the network
LAST_SLOPE = 0.01  # and before the last convolution


@dataclass(frozen=True)
class HifiganConfig:
    """sample_rate: Hz.  upsample_rates: their product is the hop.  dilations: per kernel, per convolution."""

    sample_rate: int
    num_channels: int
    initial_channels: int
    kernel_size: int
    upsample_rates: tuple[int, ...]
    upsample_kernel_sizes: tuple[int, ...]
    resblock_kernel_sizes: tuple[int, ...]
    resblock_dilations: tuple[tuple[int, ...], ...]

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> HifiganConfig:
        """From config.json's content.  Raises WeightsError if a setting is missing or unknown."""
        if config.get("model_type") != MODEL_TYPE:
            raise WeightsError(
                f"config.json has model_type {config.get('model_type')!r}, not {MODEL_TYPE!r}; "
                "name a directory that holds a converted vocoder"
            )
        try:
            settings = {name: _frozen(value) for name, value in config.items() if name != "model_type"}
            return cls(**settings)
        except TypeError as error:
            raise WeightsError(f"the vocoder's config.json is wrong: {error}; convert it again") from error

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every weight's name and shape, as in the published generator."""
        channels = self.initial_channels
        shapes: dict[str, tuple[int, ...]] = {
            "conv_pre.weight": (channels, self.num_channels, self.kernel_size),
            "conv_pre.bias": (channels,),
        }
        block = 0
        for stage, kernel_size in enumerate(self.upsample_kernel_sizes):
            shapes[f"ups.{stage}.weight"] = (channels, channels // 2, kernel_size)
            channels //= 2
            shapes[f"ups.{stage}.bias"] = (channels,)
            for size, dilations in zip(self.resblock_kernel_sizes, self.resblock_dilations, strict=True):
                for layer in range(len(dilations)):
                    shapes[f"resblocks.{block}.convs.{layer}.weight"] = (channels, channels, size)
                    shapes[f"resblocks.{block}.convs.{layer}.bias"] = (channels,)
                block += 1
        shapes["conv_post.weight"] = (1, channels, self.kernel_size)
        return shapes


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


class Conv:
    """One convolution after a leaky ReLU, over rows; with `upsample`, that many output rows per input row.

    weight: [out_channels, in_channels, kernel_size], kernel_size odd; with upsample, out_channels
    counts every phase, phase-major.  context: input rows an output needs on each side.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, *, dilation: int = 1, slope: float, upsample: int = 1
    ) -> None:
        # A 2-D convolution over one line, channels last: rows enter and leave it without a copy.
        self.weight = weight[:, :, None].contiguous(memory_format=torch.channels_last)
        self.bias = bias
        self.dilation = dilation
        self.slope = slope
        self.upsample = upsample
        self.context = (weight.shape[2] - 1) * dilation // 2
        self.in_channels = weight.shape[1]

    def __call__(self, rows: Tensor) -> Tensor:
        """rows: [n + 2 * context, in_channels].  Returns [n * upsample, out_channels / upsample]."""
        if self.slope != 1.0:
            rows = F.leaky_relu(rows, self.slope)
        image = rows.T[None, :, None]  # [1, in_channels, 1, n + 2 * context], channels last
        outputs = F.conv2d(image, self.weight, self.bias, dilation=(1, self.dilation))
        outputs = outputs[0, :, 0].T  # [n, out_channels]
        return outputs.reshape(outputs.shape[0] * self.upsample, -1)

    @classmethod
    def transposed(cls, weight: Tensor, bias: Tensor, *, stride: int, slope: float) -> Conv:
        """A transposed convolution as an ordinary one: each input row makes `stride` output rows.

        weight: [in_channels, out_channels, kernel_size], kernel_size - stride even.  Output row
        r of input row t is the sum over inputs t + s of tap r + padding - s * stride, where it exists.
        """
        in_channels, out_channels, kernel_size = weight.shape
        padding = (kernel_size - stride) // 2
        context = (stride - 1 + padding) // stride
        phases = torch.zeros(stride, out_channels, in_channels, 2 * context + 1, dtype=weight.dtype)
        for phase in range(stride):
            for shift in range(-context, context + 1):
                tap = phase + padding - shift * stride
                if 0 <= tap < kernel_size:
                    phases[phase, :, :, shift + context] = weight[:, :, tap].T
        return cls(phases.flatten(0, 1), bias.repeat(stride), slope=slope, upsample=stride)


class ConvStream:
    """A convolution's place in one utterance.

    history: [rows, in_channels], the inputs that later outputs need; starts as the left zero padding.
    """

    def __init__(self, conv: Conv) -> None:
        self.conv = conv
        self.history = conv.weight.new_zeros(conv.context, conv.in_channels)

    def push(self, rows: Tensor, *, is_last: bool) -> tuple[Tensor, Tensor]:
        """rows: the next inputs.  Returns the outputs complete now, and the inputs at their centres."""
        context = self.conv.context
        known = [self.history, rows]
        if is_last:
            known.append(rows.new_zeros(context, self.conv.in_channels))
        window = torch.cat(known)
        num_outputs = window.shape[0] - 2 * context
        if num_outputs <= 0:
            self.history = window
            return rows.new_zeros(0, self.conv.weight.shape[0] // self.conv.upsample), window[:0]
        self.history = window[num_outputs:].clone()  # not a view: the window is large
        return self.conv(window), window[context : context + num_outputs]


class FusionStream:
    """Residual blocks side by side, averaged.  Blocks with less context wait for the slowest."""

    def __init__(self, blocks: list[list[Conv]]) -> None:
        self._blocks = [[ConvStream(conv) for conv in convs] for convs in blocks]
        self._waiting: list[Tensor | None] = [None for _ in blocks]

    def push(self, rows: Tensor, *, is_last: bool) -> Tensor:
        """rows: [n, channels].  Returns the averaged rows that every block has reached."""
        outputs = []
        for waiting, streams in zip(self._waiting, self._blocks, strict=True):
            hidden = rows
            for stream in streams:
                change, centres = stream.push(hidden, is_last=is_last)
                hidden = change.add_(centres)
            outputs.append(hidden if waiting is None else torch.cat([waiting, hidden]))
        num_ready = min(output.shape[0] for output in outputs)
        self._waiting = [output[num_ready:].clone() for output in outputs]
        total = outputs[0][:num_ready]
        for output in outputs[1:]:
            total = total + output[:num_ready]
        return total / len(outputs)


class HifiganState:
    """One utterance's progress through the decoder.  num_frames: taken in so far."""

    def __init__(self, entry: Conv, stages: list[tuple[Conv, list[list[Conv]]]], exit_: Conv) -> None:
        self.num_frames = 0
        self.is_finished = False
        self._entry = ConvStream(entry)
        self._stages = [(ConvStream(upsample), FusionStream(blocks)) for upsample, blocks in stages]
        self._exit = ConvStream(exit_)

    def push(self, frames: Tensor, *, is_last: bool) -> Tensor:
        """frames: [n, num_channels].  Returns the samples that are complete now, [num_samples]."""
        rows, _ = self._entry.push(frames, is_last=is_last)
        for upsample, fusion in self._stages:
            rows, _ = upsample.push(rows, is_last=is_last)
            rows = fusion.push(rows, is_last=is_last)
        samples, _ = self._exit.push(rows, is_last=is_last)
        return torch.tanh(samples[:, 0])


class Hifigan:
    """See omnistage.models.protocols.VocoderModel.  weights: as HifiganConfig.shapes names them."""

    def __init__(self, config: HifiganConfig, weights: Mapping[str, Tensor]) -> None:
        self.sample_rate = config.sample_rate
        self.num_channels = config.num_channels
        self.hop = int(np.prod(config.upsample_rates))
        self.weight_bytes = sum(weight.nbytes for weight in weights.values())
        self._entry = Conv(weights["conv_pre.weight"], weights["conv_pre.bias"], slope=1.0)
        self._exit = Conv(weights["conv_post.weight"], None, slope=LAST_SLOPE)
        self._stages: list[tuple[Conv, list[list[Conv]]]] = []
        num_blocks = len(config.resblock_kernel_sizes)
        for stage, rate in enumerate(config.upsample_rates):
            upsample = Conv.transposed(
                weights[f"ups.{stage}.weight"], weights[f"ups.{stage}.bias"], stride=rate, slope=SLOPE
            )
            blocks = [
                [
                    Conv(
                        weights[f"resblocks.{stage * num_blocks + block}.convs.{layer}.weight"],
                        weights[f"resblocks.{stage * num_blocks + block}.convs.{layer}.bias"],
                        dilation=dilation,
                        slope=SLOPE,
                    )
                    for layer, dilation in enumerate(dilations)
                ]
                for block, dilations in enumerate(config.resblock_dilations)
            ]
            self._stages.append((upsample, blocks))

    def start(self) -> HifiganState:
        """A fresh streaming state for one utterance."""
        return HifiganState(self._entry, self._stages, self._exit)

    @torch.inference_mode()
    def decode(self, state: HifiganState, frames: Tensor, *, is_last: bool) -> NDArray[np.float32]:
        """frames: [num_frames, num_channels], may be empty.  Returns the samples that became complete.

        Sound lags the frames by the decoder's right context until is_last; over an utterance exactly
        num_frames * hop samples come out.  Equal to the one-pass decode within float rounding
        (measured: 2e-6).  Raises StreamError after is_last, or for frames of another width.
        """
        if state.is_finished:
            raise StreamError(f"the utterance ended after {state.num_frames} frames; start() a new state")
        if frames.ndim != 2 or frames.shape[1] != self.num_channels:
            raise StreamError(
                f"frames have shape {tuple(frames.shape)}, "
                f"the vocoder takes [num_frames, {self.num_channels}]; use the acoustic model it came with"
            )
        state.num_frames += frames.shape[0]
        state.is_finished = is_last
        weight = self._entry.weight
        return state.push(frames.to(weight), is_last=is_last).float().cpu().numpy()


def load_vocoder(source: PartSource, *, device: str = "cpu", dtype: str = "float32") -> Hifigan:
    """Load a converted vocoder: config.json and model.safetensors in source.directory.

    Raises WeightsError if a file is missing, damaged or of another shape, or dtype is not float32.
    """
    require_float32(dtype, "HiFi-GAN vocoder")
    config = HifiganConfig.from_json(source.config)
    weights = read_weights(source.directory, config.shapes())
    return Hifigan(config, {name: weight.to(device) for name, weight in weights.items()})
