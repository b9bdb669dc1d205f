"""Rotary positions of one sequence's rows.  Knows neither what the rows are nor where they lie."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

NUM_AXES = 3  # time, row, column; a model with one axis uses the first

Positions = NDArray[np.float32]  # [NUM_AXES, num_rows]


class RowPositions:
    """Row indices, until a caller gives other positions.

    A row nobody gave a position for counts on from the last row that has one: its position is its
    index plus what that row's largest position differs from its own index, in float32, on all axes.
    So do generated rows (the rule of `RopeIndex.following` in omnistage.models.qwen3_omni_positions).
    are_row_indices: whether every row's position is its index, known rows and later ones.
    """

    def __init__(self) -> None:
        self.are_row_indices = True
        self._given: Positions | None = None  # of the first rows; None while all are row indices
        self._delta = np.float32(0)  # of the rows after them

    def extend(self, start: int, positions: NDArray[Any]) -> None:
        """Give the rows from index `start` on, which must be new: [num_rows] or [NUM_AXES, num_rows]."""
        num_rows = positions.shape[-1]
        given = np.broadcast_to(positions.astype(np.float32), (NUM_AXES, num_rows))
        if not num_rows or (self._given is None and (given == _counting(start, start + num_rows)).all()):
            return
        self.are_row_indices = False
        self._given = np.concatenate((self.rows(0, start), given), axis=1)
        stop = np.float32(start + num_rows)
        self._delta = self._given[:, -1].max() + np.float32(1) - stop

    def rows(self, start: int, stop: int) -> Positions:
        """[NUM_AXES, stop - start]; the rows need not be known."""
        if self._given is None:
            return _counting(start, stop)
        num_given = self._given.shape[1]
        if stop <= num_given:
            return self._given[:, start:stop]
        following = _counting(max(start, num_given), stop) + self._delta
        return np.concatenate((self._given[:, start:], following), axis=1) if start < num_given else following

    def material(self, start: int, stop: int) -> bytes:
        """Names the positions of rows [start, stop): one byte if they are row indices."""
        if self._given is not None:
            rows = self.rows(start, stop)
            if (rows != _counting(start, stop)).any():
                return b"\1" + rows.tobytes()
        return b"\0"


def _counting(start: int, stop: int) -> Positions:
    return np.broadcast_to(np.arange(start, stop, dtype=np.float32), (NUM_AXES, stop - start))
