"""Prompts of Qwen3-Omni and Qwen3-VL: placeholders, rotary positions, rows between layers.

Rows are ready as soon as everything before them is: the positions of a prefix never depend on what
follows it.  Knows neither the engine's steps nor the talker.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from omnistage.engine.request import EmbeddingRows, Rows, TokenRows
from omnistage.errors import InvalidRequest, StreamError, WeightsError
from omnistage.models.qwen3_omni_positions import (
    PositionRules,
    PromptMedia,
    RopeIndex,
    rope_index,
    vl_rope_index,
)
from omnistage.models.qwen3_tokens import Grid
from omnistage.ops.tensors import to_torch
from omnistage.stages.prompts import unnamed
from omnistage.stages.qwen3_handover import HeardPrompt
from omnistage.types import MediaSegment, MergedSegment, Payload, Segment, TokenSegment

Ids = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Qwen3Rules:
    """What config.json says of a model's prompts.

    placeholders: token id by modality.  markers: ids that begin an item, and belong to it.
    positions: of ids and their media.  positions_per_second: of a video's clock.
    im_start_id, user_id: tell the users' turns, None where nobody asks.
    """

    placeholders: Mapping[str, int]
    markers: frozenset[int]
    positions: Callable[[Ids, PromptMedia], RopeIndex]
    positions_per_second: int = 0
    im_start_id: int | None = None
    user_id: int | None = None

    @classmethod
    def of_omni(cls, config: Mapping[str, Any]) -> Qwen3Rules:
        """config: the whole config.json.  Raises WeightsError for a missing key."""
        rules = PositionRules.of_thinker(config)
        return cls(
            placeholders={
                "image": rules.image_token_id,
                "video": rules.video_token_id,
                "audio": rules.audio_token_id,
            },
            markers=frozenset((rules.vision_start_token_id, rules.audio_start_token_id)),
            positions=lambda ids, media: rope_index(ids, media, rules),
            positions_per_second=rules.positions_per_second,
            im_start_id=_optional_id(config, "im_start_token_id"),
            user_id=_optional_id(config, "user_token_id"),
        )

    @classmethod
    def of_vl(cls, config: Mapping[str, Any]) -> Qwen3Rules:
        """config: the whole config.json.  Raises WeightsError for a missing key."""
        try:
            image_id, video_id = int(config["image_token_id"]), int(config["video_token_id"])
            start_id = int(config["vision_start_token_id"])
            merge_size = int(config["vision_config"].get("spatial_merge_size", 2))
        except KeyError as error:
            raise WeightsError(f"config.json lacks {error.args[0]!r}, which its prompts need") from error

        def positions(ids: Ids, media: PromptMedia) -> RopeIndex:
            return vl_rope_index(
                ids, media, image_token_id=image_id, video_token_id=video_id, merge_size=merge_size
            )

        return cls(
            placeholders={"image": image_id, "video": video_id},
            markers=frozenset((start_id,)),
            positions=positions,
        )


def _optional_id(config: Mapping[str, Any], key: str) -> int | None:
    return int(config[key]) if config.get(key) is not None else None


@dataclass(frozen=True, eq=False)
class _Item:
    """What an encoder made of one medium.

    embeddings: [num_rows, hidden].  deepstack: [num_layers, num_rows, hidden].  grid: of what is seen.
    seconds_per_grid: of a video.
    """

    modality: str
    embeddings: Tensor
    digest: str | None
    deepstack: Tensor | None
    grid: Grid | None
    seconds_per_grid: float

    @classmethod
    def of(cls, payload: Payload) -> _Item:
        """Raises StreamError for what is no encoder's output."""
        embeddings, deepstack = (payload.tensors.get(name) for name in ("embeddings", "deepstack"))
        info = payload.info
        if embeddings is None or "modality" not in info:
            raise StreamError(f"this model's prompt takes embeddings, not {payload.type.value}")
        grid = (int(info["t"]), int(info["h"]), int(info["w"])) if "t" in info else None
        # Copied, so that rows can be recomputed after a preemption whatever becomes of the encoder.
        return cls(
            modality=str(info["modality"]),
            embeddings=to_torch(embeddings).clone(),
            digest=str(info["digest"]) if info.get("digest") else None,
            deepstack=None if deepstack is None else to_torch(deepstack).clone(),
            grid=grid,
            seconds_per_grid=float(info.get("second_per_grid", 0.0)),
        )


@dataclass(frozen=True, eq=False)
class _Piece:
    """Consecutive rows of the prompt: token_ids [num_rows], and their content where it is given."""

    token_ids: Ids
    items: tuple[_Item, ...] = ()
    embeddings: Tensor | None = None
    digest: str | None = None
    deepstack: Tensor | None = None


class Qwen3Prompts:
    """See omnistage.stages.prompts.PromptAdapter."""

    def __init__(self, rules: Qwen3Rules) -> None:
        self._rules = rules

    def open(self, segments: Sequence[Segment], *, is_heard: bool) -> Qwen3Prompt:
        """Raises InvalidRequest for a video with sound where the model hears nothing."""
        has_sound = "audio" in self._rules.placeholders
        if not has_sound and any(isinstance(segment, MergedSegment) for segment in segments):
            raise InvalidRequest("this model takes no sound of a video; leave use_audio_in_video out")
        return Qwen3Prompt(segments, self._rules, is_heard=is_heard)


class Qwen3Prompt:
    """See omnistage.stages.prompts.Prompt."""

    def __init__(self, segments: Sequence[Segment], rules: Qwen3Rules, *, is_heard: bool) -> None:
        self._rules = rules
        self._segments = list(segments)
        self._delivered: dict[tuple[str, int], _Item] = {}
        self._named = {(part.stage, part.item) for segment in segments for part in _media_of(segment)}
        self._pieces: list[_Piece] = []  # of the leading segments that are known
        self._num_taken = 0  # rows
        self._is_heard = is_heard
        merged = [segment for segment in segments if isinstance(segment, MergedSegment)]
        self._has_tracks = bool(merged)
        self.has_exports = is_heard and bool(self._named)
        self._pend()

    @property
    def is_complete(self) -> bool:
        return len(self._pieces) == len(self._segments)

    def deliver(self, stage: str, item: int, payload: Payload) -> None:
        if (stage, item) not in self._named:
            raise unnamed(stage, item)
        delivered = _Item.of(payload)
        if delivered.modality not in self._rules.placeholders:
            raise StreamError(f"this model has no place for {delivered.modality} in its prompt")
        self._delivered[stage, item] = delivered
        self._pend()

    def take_ready(self) -> tuple[Rows, ...]:
        ids, media = self._known()
        stop = len(ids)
        if not self.is_complete:
            if self._has_tracks:
                return ()  # whether a silent video counts as one depends on what follows
            while stop and int(ids[stop - 1]) in self._rules.markers:
                stop -= 1  # the marker of an item is read with the item
        if stop <= self._num_taken:
            return ()
        positions = self._rules.positions(ids[:stop], media).positions
        start = self._num_taken
        self._num_taken = stop
        return tuple(self._rows(ids, positions, start, stop))

    def handover(self) -> Payload:
        ids, media = self._known()
        return HeardPrompt(ids, media).payload()

    def _pend(self) -> None:
        """Take in the segments whose content has become known."""
        for segment in self._segments[len(self._pieces) :]:
            if any((part.stage, part.item) not in self._delivered for part in _media_of(segment)):
                return
            self._pieces.append(self._piece(segment))

    def _piece(self, segment: Segment) -> _Piece:
        if isinstance(segment, TokenSegment):
            return _Piece(np.array(segment.token_ids, dtype=np.int64))
        items = [self._delivered[part.stage, part.item] for part in _media_of(segment)]
        if isinstance(segment, MergedSegment):
            return _merge(items[0], items[1], self._rules)
        item = items[0]
        token_id = self._rules.placeholders[item.modality]
        return _Piece(
            np.full(item.embeddings.shape[0], token_id, dtype=np.int64),
            (item,),
            item.embeddings,
            item.digest,
            item.deepstack,
        )

    def _known(self) -> tuple[Ids, PromptMedia]:
        """Ids of the leading pieces, and their media."""
        parts = [piece.token_ids for piece in self._pieces]
        ids = np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
        items = [item for piece in self._pieces for item in piece.items]
        videos = [item for item in items if item.modality == "video"]
        media = PromptMedia(
            image_grids=[item.grid for item in items if item.modality == "image" and item.grid],
            video_grids=[item.grid for item in videos if item.grid],
            seconds_per_grid=[item.seconds_per_grid for item in videos],
            audio_lengths=[item.embeddings.shape[0] for item in items if item.modality == "audio"],
            audio_in_video=self._has_tracks,
        )
        return ids, media

    def _rows(self, ids: Ids, positions: NDArray[np.float32], start: int, stop: int) -> list[Rows]:
        """Rows [start, stop): of pieces with content, whole ones."""
        rows: list[Rows] = []
        first = 0
        for piece in self._pieces:
            last = first + len(piece.token_ids)
            low, high = max(first, start), min(last, stop)
            if low < high and piece.embeddings is None:
                rows.append(TokenRows(tuple(ids[low:high].tolist()), positions=positions[:, low:high]))
            elif low < high and piece.embeddings is not None:
                rows.append(
                    EmbeddingRows(
                        piece.embeddings,
                        digest=piece.digest,
                        positions=positions[:, low:high],
                        deepstack=piece.deepstack,
                        is_exported=self._is_heard and self._is_users(ids, low),
                    )
                )
            first = last
        return rows

    def _is_users(self, ids: Ids, row: int) -> bool:
        """Whether a row lies in a turn of the user."""
        starts = np.flatnonzero(ids[:row] == self._rules.im_start_id)
        return bool(len(starts)) and int(ids[starts[-1] + 1]) == self._rules.user_id


def _media_of(segment: Segment) -> tuple[MediaSegment, ...]:
    if isinstance(segment, MergedSegment):
        return segment.video, segment.sound
    return (segment,) if isinstance(segment, MediaSegment) else ()


def _merge(video: _Item, sound: _Item, rules: Qwen3Rules) -> _Piece:
    """Rows of a video and of its sound track by time, a video row first where they are equal."""
    if video.grid is None or video.modality != "video" or sound.modality != "audio":
        raise StreamError(f"a {video.modality} and a {sound.modality} item are no video with its sound")
    num_video, num_sound = video.embeddings.shape[0], sound.embeddings.shape[0]
    # In double precision, as the reference's processor computes them.
    clock = np.arange(video.grid[0]) * video.seconds_per_grid * rules.positions_per_second
    times = np.concatenate((np.repeat(clock, num_video // video.grid[0]), np.arange(num_sound)))
    order = np.argsort(times, kind="stable")
    rows = torch.from_numpy(order)
    names = [item.digest for item in (video, sound) if item.digest is not None]
    deepstack = video.deepstack
    if deepstack is not None:
        silence = deepstack.new_zeros(deepstack.shape[0], num_sound, deepstack.shape[2])
        deepstack = torch.cat((deepstack, silence), dim=1)[:, rows]
    ids = np.where(order < num_video, rules.placeholders["video"], rules.placeholders["audio"])
    return _Piece(
        ids.astype(np.int64),
        (video, sound),
        torch.cat((video.embeddings, sound.embeddings))[rows],
        f"{names[0]}+{names[1]}@{video.seconds_per_grid!r}" if len(names) == 2 else None,
        deepstack,
    )
