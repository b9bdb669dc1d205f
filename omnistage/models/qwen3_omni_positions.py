"""Rotary positions of Qwen3-Omni's and Qwen3-VL's prompts, and which rows of a prompt the talker hears.

Every row has three positions: in time, of the row and of the column of a picture.  The rules, with
what is peculiar in them, are those of the reference implementation (transformers); so is the
arithmetic, float32, for the seconds of a video are seldom whole positions.
Knows token ids and sizes of media; no torch, no tokenizer and no weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omnistage.errors import InvalidRequest, WeightsError
from omnistage.models.qwen3_tokens import Grid, num_visual_tokens

Positions = NDArray[np.float32]  # [3, num_rows]: time, row, column
Ids = NDArray[np.int64]
Place = float | np.floating[Any]  # of one row, on one axis

_NOWHERE = np.iinfo(np.int64).max


@dataclass(frozen=True, kw_only=True)
class PositionRules:
    """What config.json says about positions.

    positions_per_second: of a video.  merge_size: patches a side of the square that is one row.
    """

    image_token_id: int
    video_token_id: int
    audio_token_id: int
    vision_start_token_id: int
    audio_start_token_id: int
    positions_per_second: int
    merge_size: int

    @classmethod
    def of_thinker(cls, config: Mapping[str, Any]) -> PositionRules:
        """config: the whole config.json of Qwen3-Omni.  Raises WeightsError for a missing key."""
        try:
            values = config["thinker_config"]
            return cls._read(values, int(values["vision_config"].get("spatial_merge_size", 2)))
        except KeyError as error:
            raise _lacking(error) from error

    @classmethod
    def of_talker(cls, config: Mapping[str, Any]) -> PositionRules:
        """config: the whole config.json of Qwen3-Omni.  Raises WeightsError for a missing key."""
        try:
            values = config["talker_config"]
            return cls._read(values, int(values.get("spatial_merge_size", 2)))
        except KeyError as error:
            raise _lacking(error) from error

    @classmethod
    def _read(cls, values: Mapping[str, Any], merge_size: int) -> PositionRules:
        return cls(
            image_token_id=int(values["image_token_id"]),
            video_token_id=int(values["video_token_id"]),
            audio_token_id=int(values["audio_token_id"]),
            vision_start_token_id=int(values["vision_start_token_id"]),
            audio_start_token_id=int(values["audio_start_token_id"]),
            positions_per_second=int(values["position_id_per_seconds"]),
            merge_size=merge_size,
        )


def _lacking(error: KeyError) -> WeightsError:
    return WeightsError(f"config.json lacks {error.args[0]!r}, which Qwen3-Omni's positions need")


@dataclass(frozen=True, kw_only=True)
class PromptMedia:
    """The media of a prompt, each kind in the order of the prompt.

    seconds_per_grid: of each video, between its frame pairs.  audio_lengths: rows of each clip, sound
    tracks of videos included.  audio_in_video: whether the sound tracks lie between the frames.
    """

    image_grids: Sequence[Grid] = ()
    video_grids: Sequence[Grid] = ()
    seconds_per_grid: Sequence[float] = ()
    audio_lengths: Sequence[int] = ()
    audio_in_video: bool = False


@dataclass(frozen=True, eq=False)
class RopeIndex:
    """positions: [3, num_rows], float32.

    rope_delta: what a later row's index is short of its position, which is the same on all three axes:
    the last position + 1 - num_rows.  (The reference stores the largest position + 1 - num_rows, but
    generates from the last one; they differ after a wide, short video with its sound track.)
    """

    positions: Positions
    rope_delta: float

    def following(self, start: int, count: int) -> Positions:
        """Positions of `count` generated rows from row index `start` on: [3, count], float32."""
        row = np.arange(start, start + count, dtype=np.float32) + np.float32(self.rope_delta)
        return np.broadcast_to(row, (3, count)).copy()


def rope_index(token_ids: Sequence[int] | Ids, media: PromptMedia, rules: PositionRules) -> RopeIndex:
    """Positions of a prompt of Qwen3-Omni's thinker.

    token_ids: every placeholder already repeated as often as its item has rows.
    Without pictures and videos, positions are row indices.  Otherwise text counts on from the largest
    position of what precedes; a picture's rows share a time, a video's follow the clock.
    Raises InvalidRequest if markers and media do not fit each other.
    """
    ids = np.asarray(token_ids, dtype=np.int64)
    if not media.image_grids and not media.video_grids:
        return _finish([_counting(0, len(ids))])
    return _finish(_Walk(ids, media, rules).pieces())


def talker_rope_index(
    user_ids: Sequence[int] | Ids, num_speech_rows: int, pad_id: int, media: PromptMedia, rules: PositionRules
) -> RopeIndex:
    """Positions of the talker's prompt: the users' turns, then rows that begin the speech.

    user_ids: ids of the rows of `user_rows`.  pad_id: the id that stands for the other rows.
    The reference does not tell its talker about sound tracks between frames: unless a picture is still
    to come, it sees such a video as a clip followed by text.  So does this.
    """
    ids = np.concatenate([np.asarray(user_ids, dtype=np.int64), np.full(num_speech_rows, pad_id)])
    plain = PromptMedia(
        image_grids=media.image_grids,
        video_grids=media.video_grids,
        seconds_per_grid=media.seconds_per_grid,
        audio_lengths=media.audio_lengths,
    )
    return rope_index(ids, plain, rules)


def user_rows(token_ids: Sequence[int] | Ids, *, im_start_id: int, user_id: int) -> Ids:
    """Indices of the rows of the users' turns, each from its start marker up to the next one."""
    ids = np.asarray(token_ids, dtype=np.int64)
    starts = np.flatnonzero(ids == im_start_id)
    turn = np.searchsorted(starts, np.arange(len(ids)), side="right") - 1  # -1 before the first marker
    is_user = ids[np.minimum(starts + 1, len(ids) - 1)] == user_id
    return np.flatnonzero((turn >= 0) & np.append(is_user, False)[turn])


def last_assistant_row(token_ids: Sequence[int] | Ids, *, im_start_id: int, assistant_id: int) -> int:
    """Index of the start marker of the last assistant turn, which is the one to be generated.

    Raises InvalidRequest if there is none.
    """
    ids = np.asarray(token_ids, dtype=np.int64)
    starts = np.flatnonzero((ids[:-1] == im_start_id) & (ids[1:] == assistant_id))
    if not len(starts):
        raise InvalidRequest("the prompt does not begin an assistant's turn, so nobody can speak in it")
    return int(starts[-1])


def grid_positions(grid: Grid, merge_size: int, start: Place, times: NDArray[np.float32]) -> Positions:
    """Rows of a picture or video: [3, num_rows].

    start: position of the first.  times: [frame pairs], positions after it.
    """
    height, width = grid[1] // merge_size, grid[2] // merge_size
    axes = np.empty((3, grid[0], height, width), dtype=np.float32)
    axes[0] = times[:, None, None]
    axes[1] = np.arange(height, dtype=np.float32)[:, None]
    axes[2] = np.arange(width, dtype=np.float32)
    return axes.reshape(3, -1) + np.float32(start)


def vl_rope_index(
    token_ids: Sequence[int] | Ids,
    media: PromptMedia,
    *,
    image_token_id: int,
    video_token_id: int,
    merge_size: int,
) -> RopeIndex:
    """Positions of a prompt of Qwen3-VL, which writes the time of each frame pair as text before it.

    Every frame pair is thus a picture of its own; after one, text continues at its start + its longer side.
    Raises InvalidRequest if markers and media do not fit each other.
    """
    ids = np.asarray(token_ids, dtype=np.int64)
    frames = [(1, grid[1], grid[2]) for grid in media.video_grids for _ in range(grid[0])]
    grids = {image_token_id: iter(media.image_grids), video_token_id: iter(frames)}
    kind = np.where((ids == image_token_id) | (ids == video_token_id), ids, -1)
    bounds = [0, *(np.flatnonzero(np.diff(kind)) + 1).tolist(), len(ids)]
    pieces: list[Positions] = []
    start = 0
    for first, last in pairwise(bounds):
        if kind[first] < 0:
            pieces.append(_counting(start, last - first))
            start += last - first
            continue
        grid = next(grids[int(kind[first])], None)
        num_rows = 0 if grid is None else num_visual_tokens(grid, merge_size)
        if grid is None or num_rows != last - first:
            raise _misfit(f"{last - first} rows at {first} are for a picture of {num_rows} rows")
        pieces.append(grid_positions(grid, merge_size, start, np.arange(grid[0], dtype=np.float32)))
        start += max(grid[1:]) // merge_size
    return _finish(pieces)


def _counting(start: Place, count: int) -> Positions:
    """Text: [3, count], counting up from `start` on all axes."""
    return np.broadcast_to(np.arange(count, dtype=np.float32) + np.float32(start), (3, count))


def _finish(pieces: list[Positions]) -> RopeIndex:
    positions = np.ascontiguousarray(np.concatenate(pieces, axis=1))
    num_rows = positions.shape[1]
    last = positions[:, -1].max() if num_rows else np.float32(-1)
    return RopeIndex(positions, float(last + np.float32(1) - np.float32(num_rows)))


def _misfit(what: str) -> InvalidRequest:
    return InvalidRequest(
        f"the prompt's media markers do not fit its media: {what}; do not write such markers in text"
    )


class _Walk:
    """One pass over the items of a prompt, in the reference's order of decisions."""

    def __init__(self, ids: Ids, media: PromptMedia, rules: PositionRules) -> None:
        self._ids, self._media, self._rules = ids, media, rules
        self._visions = np.flatnonzero(ids == rules.vision_start_token_id)
        self._audios = np.flatnonzero(ids == rules.audio_start_token_id)
        marked = ids[np.minimum(self._visions + 1, len(ids) - 1)]
        opener = rules.audio_start_token_id if media.audio_in_video else rules.video_token_id
        self._images_left = int((marked == rules.image_token_id).sum())
        self._videos_left = int((marked == opener).sum())
        self._audios_left = len(self._audios)
        # With sound tracks between the frames, only they count as videos; a silent video beside them is text.
        self._num_items = self._images_left + self._audios_left
        self._num_items += 0 if media.audio_in_video else self._videos_left
        self._image, self._video, self._audio = 0, 0, 0  # the next of each kind
        self._cursor = 0  # the next row
        self._start: np.floating[Any] = np.float32(0)  # its position
        self._pieces: list[Positions] = []

    def pieces(self) -> list[Positions]:
        """Consecutive positions that cover the prompt."""
        for _ in range(self._num_items):
            self._item()
        if self._cursor < len(self._ids):
            self._text(len(self._ids) - self._cursor)
        if self._cursor != len(self._ids):
            raise _misfit(f"{len(self._ids)} rows hold items of {self._cursor} rows")
        return self._pieces

    def _item(self) -> None:
        """Text up to the next item, its begin marker, its rows and its end marker."""
        sees_vision = self._images_left > 0 or self._videos_left > 0
        vision = self._next(self._visions) if sees_vision else _NOWHERE
        audio = self._next(self._audios) if self._audios_left > 0 else _NOWHERE
        begin = min(vision, audio)
        if begin == _NOWHERE:
            raise _misfit("an item lacks its begin marker")
        is_merged = audio == vision + 1
        num_markers = 2 if is_merged else 1
        self._text(begin - self._cursor)
        self._text(num_markers)
        if is_merged:
            self._merged()
        elif begin == audio:
            self._rows(_counting(self._start, self._next_clip()))
        else:
            self._visual(int(self._ids[min(begin + 1, len(self._ids) - 1)]))
        self._rows(_counting(self._start, num_markers))

    def _next(self, markers: Ids) -> int:
        index = int(np.searchsorted(markers, self._cursor))
        return int(markers[index]) if index < len(markers) else _NOWHERE

    def _text(self, count: int) -> None:
        self._pieces.append(_counting(self._start, count))
        self._cursor += count
        self._start += np.float32(count)

    def _rows(self, piece: Positions) -> None:
        """Add rows after whose largest position the next ones start."""
        self._pieces.append(piece)
        self._cursor += piece.shape[1]
        if piece.shape[1]:
            self._start = piece.max() + np.float32(1)

    def _visual(self, token_id: int) -> None:
        if token_id == self._rules.image_token_id:
            self._rows(self._next_image())
        elif token_id == self._rules.video_token_id:
            self._rows(self._next_video())
        else:
            raise _misfit(f"a vision marker is followed by token {token_id}")

    def _merged(self) -> None:
        """A video and its sound track by time, the video first where they are equal.

        What follows counts on from the rows after the last one of the other kind, not from all of them.
        """
        sound = _counting(self._start, self._next_clip())
        video = self._next_video()
        both = np.concatenate([video, sound], axis=1)
        order = np.argsort(both[0], kind="stable")
        is_video = order < video.shape[1]
        changes = np.flatnonzero(is_video[1:] != is_video[:-1])
        tail = int(changes[-1]) + 1 if len(changes) else 0
        merged = both[:, order]
        self._rows(merged[:, :tail])
        self._rows(merged[:, tail:])

    def _next_image(self) -> Positions:
        grid = _pick(self._media.image_grids, self._image, "pictures")
        self._image += 1
        self._images_left -= 1
        times = np.arange(grid[0], dtype=np.float32) * np.float32(self._rules.positions_per_second)
        return grid_positions(grid, self._rules.merge_size, self._start, times)

    def _next_video(self) -> Positions:
        grid = _pick(self._media.video_grids, self._video, "videos")
        seconds = np.float32(_pick(self._media.seconds_per_grid, self._video, "videos' frame times"))
        self._video += 1
        self._videos_left -= 1
        # rounded after each step, as the reference does
        times = np.arange(grid[0], dtype=np.float32) * seconds * np.float32(self._rules.positions_per_second)
        return grid_positions(grid, self._rules.merge_size, self._start, times)

    def _next_clip(self) -> int:
        length = _pick(self._media.audio_lengths, self._audio, "clips")
        self._audio += 1
        self._audios_left -= 1
        return int(length)


def _pick(values: Sequence[Any], index: int, what: str) -> Any:
    if index >= len(values):
        raise _misfit(f"it marks more than the {len(values)} {what} given")
    return values[index]
