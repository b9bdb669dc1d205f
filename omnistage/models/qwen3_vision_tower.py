"""The vision tower of Qwen3-Omni and Qwen3-VL: patches of pictures to rows for the thinker's prompt.

Patches attend only within their frame pair, so frame pairs of any items run together, and what an
item gives depends on that item alone.  Besides the rows it gives deepstack rows, which the thinker
adds to its hidden states (arXiv 2406.04334; Qwen3-VL, arXiv 2511.21631).
Knows patches and rows; nothing of picture files, of requests or of prompts.
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
    LayerNorm,
    Pace,
    PartWeights,
    Rotation,
    activation_of,
    group_segments,
    in_slices,
    with_defaults,
)
from omnistage.models.protocols import Sliced
from omnistage.models.qwen3_tokens import Grid, num_visual_tokens
from omnistage.ops.linear import Linear

NORM_EPS = 1e-6
ROTARY_THETA = 10_000.0
MIN_MERGE_ROWS = 32  # of a slice; a merger does several times the work of a block in a row
IGNORED_SUFFIXES = ("rotary_pos_emb.inv_freq",)  # computed; some checkpoints store it
# What config.json may leave out: the architecture class of the published models.
DEFAULTS: dict[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": (8, 16, 24),
}


@dataclass(frozen=True, kw_only=True)
class VisionTowerConfig:
    """Sizes in elements; patch_size in pixels, temporal_patch_size in frames.

    num_positions_per_side: of the learned grid.
    deepstack_blocks: of each deepstack merger, the block it follows.
    """

    num_blocks: int
    hidden_size: int
    activation: str
    intermediate_size: int
    num_heads: int
    num_channels: int
    patch_size: int
    merge_size: int
    temporal_patch_size: int
    output_size: int
    num_positions_per_side: int
    deepstack_blocks: tuple[int, ...]
    rotary_theta: float

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> VisionTowerConfig:
        """values: the `vision_config` of config.json.  Raises WeightsError for one that cannot work."""
        full = with_defaults(values, DEFAULTS)
        hidden, num_heads = int(full["hidden_size"]), int(full["num_heads"])
        config = cls(
            num_blocks=int(full["depth"]),
            hidden_size=hidden,
            activation=str(full["hidden_act"]),
            intermediate_size=int(full["intermediate_size"]),
            num_heads=num_heads,
            num_channels=int(full["in_channels"]),
            patch_size=int(full["patch_size"]),
            merge_size=int(full["spatial_merge_size"]),
            temporal_patch_size=int(full["temporal_patch_size"]),
            output_size=int(full["out_hidden_size"]),
            num_positions_per_side=math.isqrt(int(full["num_position_embeddings"])),
            deepstack_blocks=tuple(int(index) for index in full["deepstack_visual_indexes"]),
            rotary_theta=float((full.get("rope_parameters") or {}).get("rope_theta", ROTARY_THETA)),
        )
        if hidden % (4 * num_heads):
            raise WeightsError(
                f"hidden_size {hidden} must be a multiple of four times num_heads {num_heads}, for rows and "
                "columns of rotary positions; correct vision_config in config.json"
            )
        if config.num_positions_per_side**2 != int(full["num_position_embeddings"]):
            raise WeightsError(
                f"num_position_embeddings is {full['num_position_embeddings']}, which is no square; correct "
                "vision_config in config.json"
            )
        outside = [index for index in config.deepstack_blocks if not 0 <= index < config.num_blocks]
        if outside or len(set(config.deepstack_blocks)) != len(config.deepstack_blocks):
            raise WeightsError(
                f"deepstack_visual_indexes {list(config.deepstack_blocks)} must be distinct and below depth "
                f"{config.num_blocks}; correct vision_config in config.json"
            )
        return config

    @property
    def patch_dim(self) -> int:
        """Values of one patch."""
        return self.num_channels * self.temporal_patch_size * self.patch_size**2


@dataclass(frozen=True)
class Patches:
    """One picture or video, cut in patches.

    pixels: [frame pairs * rows * columns, patch_dim], frame pair by frame pair, in it square by square
    of patches that will be merged; a patch's values by channel, frame, row, column.
    grid: frame pairs, rows and columns of patches.
    """

    pixels: Tensor
    grid: Grid


@dataclass(frozen=True)
class VisualRows:
    """What the tower makes of one item.

    embeddings: [num_tokens, output_size].  deepstack: [num_deepstack, num_tokens, output_size], in the
    order of the blocks they follow.
    """

    embeddings: Tensor
    deepstack: Tensor


@dataclass(frozen=True)
class Merger:
    """Joins each square of patches into one row and projects it.

    norm: over one patch or, if `norm_is_wide`, over the joined square.
    """

    norm: LayerNorm
    norm_is_wide: bool
    inner: Linear
    outer: Linear

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden: [num_tokens, patches of a square, size].  Returns [num_tokens, output_size]."""
        joined = self.norm(hidden.flatten(1)) if self.norm_is_wide else self.norm(hidden).flatten(1)
        return self.outer(F.gelu(self.inner(joined)))


@dataclass(frozen=True)
class _Run:
    """Consecutive frame pairs of one item in one pack."""

    item: int
    first_frame: int
    num_frames: int
    height: int
    width: int

    @property
    def frame_rows(self) -> int:
        return self.height * self.width

    @property
    def num_rows(self) -> int:
        return self.num_frames * self.frame_rows


class Qwen3VisionTower:
    """See the module.  weight_bytes: memory of the weights as held."""

    def __init__(
        self, config: VisionTowerConfig, checkpoint: Checkpoint, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Takes every tensor it needs from `checkpoint`.  Raises WeightsError."""
        self.config = config
        self.device = device
        self.dtype = dtype
        self._square = config.merge_size**2  # patches
        weights = PartWeights(checkpoint, device, dtype)
        hidden = config.hidden_size
        # The published tensor is a convolution whose stride is its size: a product with whole patches.
        kernel = (config.num_channels, config.temporal_patch_size, config.patch_size, config.patch_size)
        self._embed = Linear(
            weights.tensor("patch_embed.proj.weight", hidden, *kernel).reshape(hidden, -1),
            weights.tensor("patch_embed.proj.bias", hidden),
        )
        side = config.num_positions_per_side
        self._positions = weights.tensor("pos_embed.weight", side * side, hidden).float()
        spatial = hidden // config.num_heads // 2  # elements of a head that turn with the row
        steps = torch.arange(0, spatial, 2, dtype=torch.float32) / spatial
        self._frequencies = (1.0 / config.rotary_theta**steps).to(device)  # [head_dim / 4]
        self._blocks = [self._block(weights, f"blocks.{index}") for index in range(config.num_blocks)]
        self._merger, self._deepstack = self._mergers(weights)
        self.weight_bytes = weights.nbytes

    def _block(self, weights: PartWeights, name: str) -> EncoderBlock:
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        return EncoderBlock(
            num_heads=self.config.num_heads,
            attention_norm=weights.norm(f"{name}.norm1", hidden, NORM_EPS),
            qkv=weights.linear(f"{name}.attn.qkv", 3 * hidden, hidden),
            output=weights.linear(f"{name}.attn.proj", hidden, hidden),
            mlp_norm=weights.norm(f"{name}.norm2", hidden, NORM_EPS),
            up=weights.linear(f"{name}.mlp.linear_fc1", inner, hidden),
            down=weights.linear(f"{name}.mlp.linear_fc2", hidden, inner),
            activation=activation_of(self.config.activation),
        )

    def _mergers(self, weights: PartWeights) -> tuple[Merger, dict[int, Merger]]:
        """The main merger, and the deepstack mergers by the block they follow."""
        is_omni = "merger.ln_q.weight" in weights.checkpoint.names
        names = ("ln_q", "mlp.0", "mlp.2") if is_omni else ("norm", "linear_fc1", "linear_fc2")
        size = self.config.hidden_size
        joined = size * self._square

        def merger(name: str, norm_is_wide: bool) -> Merger:
            return Merger(
                norm=weights.norm(f"{name}.{names[0]}", joined if norm_is_wide else size, NORM_EPS),
                norm_is_wide=norm_is_wide,
                inner=weights.linear(f"{name}.{names[1]}", joined, joined),
                outer=weights.linear(f"{name}.{names[2]}", self.config.output_size, joined),
            )

        folder = "merger_list" if is_omni else "deepstack_merger_list"
        blocks = enumerate(self.config.deepstack_blocks)
        return merger("merger", False), {block: merger(f"{folder}.{index}", True) for index, block in blocks}

    def num_tokens(self, grid: Grid) -> int:
        """Rows of an item of `grid` patches."""
        return num_visual_tokens(grid, self.config.merge_size)

    @torch.inference_mode()
    def encode(self, items: Sequence[Patches]) -> Sliced[list[VisualRows]]:
        """Rows of each item, in the tower's dtype on its device.

        items: pictures and videos in any order; their pixels in any dtype, on any device.
        Raises WeightsError if the patches are not of this tower's size or do not fill their grid.
        """
        pace = Pace(self.device, self.dtype)
        for item in items:
            self._check(item)
        results = [self._empty(self.num_tokens(item.grid)) for item in items]
        for pack in self._packs(items):
            hidden, rotation = yield from self._start(pack, items, pace)
            groups = group_segments([run.frame_rows for run in pack for _ in range(run.num_frames)])
            taken = 0
            for index, block in enumerate(self._blocks):
                hidden = yield from block.run(hidden, groups, rotation, pace)
                if index in self._deepstack:
                    rows = yield from self._merge(self._deepstack[index], hidden, pace)
                    self._hand_out(rows, pack, [result.deepstack[taken] for result in results])
                    taken += 1
            rows = yield from self._merge(self._merger, hidden, pace)
            self._hand_out(rows, pack, [result.embeddings for result in results])
        return results

    def _check(self, item: Patches) -> None:
        config = self.config
        frames, height, width = item.grid
        expected = (frames * height * width, config.patch_dim)
        if tuple(item.pixels.shape) != expected or height % config.merge_size or width % config.merge_size:
            raise WeightsError(
                f"patches of shape {list(item.pixels.shape)} in a grid of {item.grid} do not fit a vision "
                f"tower that takes {list(expected)} and merges squares of {config.merge_size}; take "
                "preprocessor_config.json and config.json of one model"
            )

    def _empty(self, num_tokens: int) -> VisualRows:
        shape = (len(self._deepstack), num_tokens, self.config.output_size)
        return VisualRows(
            embeddings=torch.empty(shape[1:], dtype=self.dtype, device=self.device),
            deepstack=torch.empty(shape, dtype=self.dtype, device=self.device),
        )

    def _packs(self, items: Sequence[Patches]) -> list[list[_Run]]:
        """All frame pairs, equal sizes together, in lists of about CPU_PACK_ROWS rows."""
        limit = CPU_PACK_ROWS if self.device.type == "cpu" else DEVICE_PACK_ROWS
        packs: list[list[_Run]] = []
        room = 0
        for index in sorted(range(len(items)), key=lambda index: math.prod(items[index].grid[1:])):
            frames, height, width = items[index].grid
            first = 0
            while first < frames:
                if room < height * width:
                    packs.append([])
                    room = max(limit, height * width)
                count = min(frames - first, room // (height * width))
                packs[-1].append(_Run(index, first, count, height, width))
                room -= count * height * width
                first += count
        return packs

    def _start(
        self, pack: list[_Run], items: Sequence[Patches], pace: Pace
    ) -> Sliced[tuple[Tensor, Rotation]]:
        """Embedded patches with their learned positions [num_rows, hidden], and their rotary positions."""
        embedded, angles = [], []
        for run in pack:
            places = _places(run.height, run.width, self.config.merge_size).to(self.device)
            first = run.first_frame * run.frame_rows
            pixels = items[run.item].pixels[first : first + run.num_rows]
            embedded.append((yield from self._embed_run(run, pixels, places, pace)))
            turned = (places[:, :, None] * self._frequencies).flatten(1)  # [frame_rows, head_dim / 2]
            angles.append(turned.repeat(run.num_frames, 1))
        return torch.cat(embedded), Rotation.of(torch.cat(angles))

    def _embed_run(self, run: _Run, pixels: Tensor, places: Tensor, pace: Pace) -> Sliced[Tensor]:
        """[num_rows, hidden].  pixels: [num_rows, patch_dim].  places: from `_places`."""
        hidden = self.config.hidden_size
        learned = yield from in_slices(
            lambda rows: self._learned(run, places[rows]), run.frame_rows, 40.0 * hidden, pace
        )
        learned = learned.repeat(run.num_frames, 1)

        def embed(rows: slice) -> Tensor:
            return self._embed(pixels[rows].to(self.device, self.dtype), learned[rows])

        return (yield from in_slices(embed, run.num_rows, 2.0 * hidden * self.config.patch_dim, pace))

    def _learned(self, run: _Run, places: Tensor) -> Tensor:
        """The grid of learned positions, stretched over a frame pair so that the corners meet.

        places: rows and columns of patches [num_rows, 2].  Returns [num_rows, hidden], interpolated
        bilinearly in float32.
        """
        side = self.config.num_positions_per_side
        steps = torch.tensor([max(run.height - 1, 1), max(run.width - 1, 1)], device=self.device)
        exact = places * (side - 1) / steps
        lower = exact.floor()
        (down, right), (up, left) = (exact - lower).unbind(1), (1 - (exact - lower)).unbind(1)
        row, column = lower.long().unbind(1)
        next_row, next_column = (lower.long() + 1).clamp_max(side - 1).unbind(1)
        corners = ((row, column), (row, next_column), (next_row, column), (next_row, next_column))
        indices = torch.stack([r * side + c for r, c in corners], 1)
        shares = torch.stack((up * left, up * right, down * left, down * right), 1)
        rows = F.embedding_bag(indices, self._positions, per_sample_weights=shares, mode="sum")
        return rows.to(self.dtype)

    def _merge(self, merger: Merger, hidden: Tensor, pace: Pace) -> Sliced[Tensor]:
        """hidden: [num_rows, hidden].  Returns [num_rows / patches of a square, output_size]."""
        squares = hidden.view(-1, self._square, self.config.hidden_size)
        joined = self._square * self.config.hidden_size
        flops = 2.0 * joined * (joined + self.config.output_size)
        return (
            yield from in_slices(
                lambda rows: merger(squares[rows]), len(squares), flops, pace, MIN_MERGE_ROWS
            )
        )

    def _hand_out(self, rows: Tensor, pack: list[_Run], targets: Sequence[Tensor]) -> None:
        """Copy a pack's rows to where its items want them.  targets: by item, [num_tokens, output_size]."""
        pieces = torch.split(rows, [run.num_rows // self._square for run in pack])
        for run, piece in zip(pack, pieces, strict=True):
            first = run.first_frame * run.frame_rows // self._square
            targets[run.item][first : first + len(piece)] = piece


def _places(height: int, width: int, merge_size: int) -> Tensor:
    """Row and column of each patch of a frame pair, square by square: [height * width, 2], float32."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    squares = torch.stack((rows, columns), -1).float()
    squares = squares.view(height // merge_size, merge_size, width // merge_size, merge_size, 2)
    return squares.transpose(1, 2).reshape(-1, 2)


def load_vision_tower(
    directory: Path,
    values: Mapping[str, Any],
    *,
    prefix: str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Qwen3VisionTower:
    """The tower from a model directory's safetensors files.

    values: the `vision_config` of config.json.  prefix: how the tower's tensors begin
    ("thinker.visual.", "model.visual.").  Raises WeightsError naming what is missing, unexpected or wrong.
    """
    config = VisionTowerConfig.from_json(values)
    checkpoint = Checkpoint(directory, prefix=prefix)
    tower = Qwen3VisionTower(config, checkpoint, device=torch.device(device), dtype=dtype)
    checkpoint.finish(ignored_suffixes=IGNORED_SUFFIXES)
    return tower
