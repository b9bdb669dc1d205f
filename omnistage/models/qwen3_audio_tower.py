"""The audio tower of Qwen3-Omni: log-mel features to rows for the thinker's prompt.

Features are cut in chunks that are convolved by themselves, and in windows of several chunks that
attend to nothing outside; so windows of any clips run together, and what a clip gives depends on
that clip alone.  Architecture: the AuT encoder of Qwen3-Omni (arXiv 2509.17765, section 2.2).
Knows features and rows; nothing of sound, of requests or of prompts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from omnistage.errors import WeightsError
from omnistage.models.loader import Checkpoint
from omnistage.models.packed_blocks import (
    CPU_PACK_ROWS,
    DEVICE_PACK_ROWS,
    EncoderBlock,
    Pace,
    PartWeights,
    activation_of,
    group_segments,
    in_slices,
    with_defaults,
)
from omnistage.models.protocols import Sliced
from omnistage.models.qwen3_tokens import NUM_CONVOLUTIONS, convolved_length, num_audio_tokens
from omnistage.ops.linear import Linear

MAX_TIMESCALE = 10_000  # of the sinusoidal positions
NORM_EPS = 1e-5
IGNORED_SUFFIXES = ("positional_embedding.positional_embedding",)  # computed; some checkpoints store it
# What config.json may leave out: the published 30B-A3B's architecture class.
DEFAULTS: dict[str, Any] = {
    "num_mel_bins": 128,
    "encoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "d_model": 1280,
    "activation_function": "gelu",
    "n_window": 50,
    "n_window_infer": 800,
    "downsample_hidden_size": 480,
    "output_dim": 3584,
}


@dataclass(frozen=True, kw_only=True)
class AudioTowerConfig:
    """Sizes in elements, except: chunk_frames in log-mel frames, chunks_per_window in chunks."""

    num_mel_bins: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    hidden_size: int
    activation: str
    chunk_frames: int
    chunks_per_window: int
    num_channels: int
    output_size: int

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> AudioTowerConfig:
        """values: the `audio_config` of config.json.  Raises WeightsError for one that cannot work."""
        full = with_defaults(values, DEFAULTS)
        chunk_frames = 2 * int(full["n_window"])
        config = cls(
            num_mel_bins=int(full["num_mel_bins"]),
            num_layers=int(full["encoder_layers"]),
            num_heads=int(full["encoder_attention_heads"]),
            intermediate_size=int(full["encoder_ffn_dim"]),
            hidden_size=int(full["d_model"]),
            activation=str(full["activation_function"]),
            chunk_frames=chunk_frames,
            chunks_per_window=int(full["n_window_infer"]) // max(1, chunk_frames),
            num_channels=int(full["downsample_hidden_size"]),
            output_size=int(full["output_dim"]),
        )
        if config.chunk_frames < 1 or config.chunks_per_window < 1:
            raise WeightsError(
                f"n_window_infer is {full['n_window_infer']} frames, but must hold at least one chunk of "
                f"2 * n_window = {config.chunk_frames} frames; correct audio_config in config.json"
            )
        if config.hidden_size % (2 * config.num_heads):
            raise WeightsError(
                f"d_model {config.hidden_size} must be a multiple of twice encoder_attention_heads "
                f"{config.num_heads}; correct audio_config in config.json"
            )
        return config

    @property
    def convolved_bins(self) -> int:
        """Mel bins left by the convolutions."""
        return convolved_length(self.num_mel_bins)


@dataclass(frozen=True)
class _Window:
    """Frames of one clip that attend to each other.

    width: frames a chunk is padded to.  first_token: row of the clip's result.
    """

    clip: int
    first_frame: int
    num_frames: int
    width: int
    first_token: int
    num_tokens: int


class Qwen3AudioTower:
    """See the module.  weight_bytes: memory of the weights as held."""

    def __init__(
        self, config: AudioTowerConfig, checkpoint: Checkpoint, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Takes every tensor it needs from `checkpoint`.  Raises WeightsError."""
        self.config = config
        self.device = device
        self.dtype = dtype
        self._activation = activation_of(config.activation)
        weights = PartWeights(checkpoint, device, dtype)
        hidden, channels = config.hidden_size, config.num_channels
        self._convolutions: list[tuple[Tensor, Tensor]] = []
        for index in range(1, NUM_CONVOLUTIONS + 1):
            kernel = weights.tensor(f"conv2d{index}.weight", channels, 1 if index == 1 else channels, 3, 3)
            bias = weights.tensor(f"conv2d{index}.bias", channels)
            # The layout with channels innermost convolves nearly twice as fast on a CPU.
            self._convolutions.append((kernel.contiguous(memory_format=torch.channels_last), bias))
        self._conv_out = Linear(weights.tensor("conv_out.weight", hidden, channels * config.convolved_bins))
        self._positions = _sinusoids(convolved_length(config.chunk_frames), hidden).to(device, dtype)
        self._blocks = [self._block(weights, f"layers.{index}") for index in range(config.num_layers)]
        self._final_norm = weights.norm("ln_post", hidden, NORM_EPS)
        self._inner = weights.linear("proj1", hidden, hidden)
        self._outer = weights.linear("proj2", config.output_size, hidden)
        self.weight_bytes = weights.nbytes

    def _block(self, weights: PartWeights, name: str) -> EncoderBlock:
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        return EncoderBlock(
            num_heads=self.config.num_heads,
            attention_norm=weights.norm(f"{name}.self_attn_layer_norm", hidden, NORM_EPS),
            qkv=weights.linear([f"{name}.self_attn.{part}_proj" for part in "qkv"], hidden, hidden),
            output=weights.linear(f"{name}.self_attn.out_proj", hidden, hidden),
            mlp_norm=weights.norm(f"{name}.final_layer_norm", hidden, NORM_EPS),
            up=weights.linear(f"{name}.fc1", inner, hidden),
            down=weights.linear(f"{name}.fc2", hidden, inner),
            activation=self._activation,
        )

    def num_tokens(self, num_frames: int) -> int:
        """Rows of a clip of so many log-mel frames."""
        return num_audio_tokens(num_frames, self.config.chunk_frames)

    @torch.inference_mode()
    def encode(self, clips: Sequence[Tensor]) -> Sliced[list[Tensor]]:
        """Rows [num_tokens, output_size] of each clip, in the tower's dtype on its device.

        clips: log-mel features, each [num_mel_bins, num_frames], any dtype and device, not empty.
        Raises WeightsError if the features have another number of bins than the tower.
        """
        config, pace = self.config, Pace(self.device, self.dtype)
        for clip in clips:
            if clip.shape[0] != config.num_mel_bins:
                raise WeightsError(
                    f"the features have {clip.shape[0]} mel bins, the audio tower needs "
                    f"{config.num_mel_bins}; take preprocessor_config.json and config.json of one model"
                )
        sizes = [self.num_tokens(clip.shape[1]) for clip in clips]
        results = [
            torch.empty(size, config.output_size, dtype=self.dtype, device=self.device) for size in sizes
        ]
        for pack in self._packs(clips):
            hidden = yield from self._embed(pack, clips, pace)
            groups = group_segments([window.num_tokens for window in pack])
            for block in self._blocks:
                hidden = yield from block.run(hidden, groups, None, pace)
            encoded = yield from self._project(hidden, pace)
            pieces = torch.split(encoded, [window.num_tokens for window in pack])
            for window, piece in zip(pack, pieces, strict=True):
                results[window.clip][window.first_token :][: window.num_tokens] = piece
        return results

    def _packs(self, clips: Sequence[Tensor]) -> list[list[_Window]]:
        """All windows, the longest first, in lists of at most about CPU_PACK_ROWS rows."""
        limit = CPU_PACK_ROWS if self.device.type == "cpu" else DEVICE_PACK_ROWS
        windows = [window for index, clip in enumerate(clips) for window in self._windows(index, clip)]
        packs: list[list[_Window]] = []
        num_rows = limit
        for window in sorted(windows, key=lambda window: -window.num_tokens):
            if num_rows + window.num_tokens > limit:
                packs.append([])
                num_rows = 0
            packs[-1].append(window)
            num_rows += window.num_tokens
        return packs

    def _windows(self, index: int, clip: Tensor) -> list[_Window]:
        num_frames, chunk = clip.shape[1], self.config.chunk_frames
        step = self.config.chunks_per_window * chunk
        return [
            _Window(
                clip=index,
                first_frame=first,
                num_frames=min(step, num_frames - first),
                # The last chunk is filled up with zeros, but a clip shorter than one chunk is not.
                width=min(chunk, num_frames),
                first_token=self.num_tokens(first),
                num_tokens=self.num_tokens(min(step, num_frames - first)),
            )
            for first in range(0, num_frames, step)
        ]

    def _embed(self, pack: list[_Window], clips: Sequence[Tensor], pace: Pace) -> Sliced[Tensor]:
        """Rows [num_rows, hidden] of the pack's windows in order."""
        rows: dict[_Window, Tensor] = {}
        for width in dict.fromkeys(window.width for window in pack):
            windows = [window for window in pack if window.width == width]
            chunks = [self._chunks(window, clips[window.clip]) for window in windows]
            embedded = yield from self._convolve(torch.cat(chunks), pace)
            pieces = torch.split(embedded, [len(part) for part in chunks])
            for window, piece in zip(windows, pieces, strict=True):
                rows[window] = piece.flatten(0, 1)[: window.num_tokens]  # only a last chunk is not full
        return torch.cat([rows[window] for window in pack])

    def _chunks(self, window: _Window, clip: Tensor) -> Tensor:
        """[num_chunks, 1, num_mel_bins, width], zeros after the clip's end."""
        frames = clip[:, window.first_frame :][:, : window.num_frames].to(self.device, self.dtype)
        padded = F.pad(frames, (0, -window.num_frames % window.width))
        return padded.view(len(clip), -1, window.width).transpose(0, 1).unsqueeze(1)

    def _convolve(self, chunks: Tensor, pace: Pace) -> Sliced[Tensor]:
        """chunks: [num_chunks, 1, num_mel_bins, width].  Returns [num_chunks, positions, hidden]."""
        channels, width = self.config.num_channels, chunks.shape[-1]
        positions = self._positions[: convolved_length(width)]

        def embed(part: slice) -> Tensor:
            image = chunks[part].contiguous(memory_format=torch.channels_last)
            for kernel, bias in self._convolutions:
                image = F.gelu(F.conv2d(image, kernel, bias, stride=2, padding=1))
            columns = image.permute(0, 3, 1, 2).flatten(2)  # [num_chunks, positions, channels * bins]
            embedded = self._conv_out(columns.flatten(0, 1)).view(*columns.shape[:2], -1)
            return embedded + positions

        second = 18.0 * channels * channels * (self.config.num_mel_bins / 4) * (width / 4)
        flops = second * 1.25 + 2.0 * channels * self.config.convolved_bins * self.config.hidden_size * len(
            positions
        )
        return (yield from in_slices(embed, len(chunks), flops, pace, min_rows=1))

    def _project(self, hidden: Tensor, pace: Pace) -> Sliced[Tensor]:
        """hidden: [num_rows, hidden].  Returns [num_rows, output_size]."""
        size = self.config.hidden_size

        def project(rows: slice) -> Tensor:
            return self._outer(self._activation(self._inner(self._final_norm(hidden[rows]))))

        flops_per_row = 2.0 * size * (size + self.config.output_size)
        return (yield from in_slices(project, len(hidden), flops_per_row, pace))


def _sinusoids(length: int, size: int) -> Tensor:
    """Positions [length, size], float32: sines in the first half, cosines in the second.

    Frequencies as in arXiv 1706.03762, but spaced so that the slowest has MAX_TIMESCALE exactly.
    """
    step = math.log(MAX_TIMESCALE) / (size // 2 - 1)
    frequencies = torch.exp(-step * torch.arange(size // 2).float())
    angles = torch.arange(length)[:, None] * frequencies
    return torch.cat((angles.sin(), angles.cos()), dim=1)


def load_audio_tower(
    directory: Path,
    values: Mapping[str, Any],
    *,
    prefix: str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Qwen3AudioTower:
    """The tower from a model directory's safetensors files.

    values: the `audio_config` of config.json.  prefix: how the tower's tensors begin
    ("thinker.audio_tower.").  Raises WeightsError naming what is missing, unexpected or wrong.
    """
    config = AudioTowerConfig.from_json(values)
    checkpoint = Checkpoint(directory, prefix=prefix)
    tower = Qwen3AudioTower(config, checkpoint, device=torch.device(device), dtype=dtype)
    checkpoint.finish(ignored_suffixes=IGNORED_SUFFIXES)
    return tower
