"""Which position each row has, and when positions tell blocks apart."""

from __future__ import annotations

import numpy as np
import pytest

from omnistage.engine.positions import RowPositions
from omnistage.models.qwen3_omni_positions import RopeIndex


def test_row_indices_until_others_are_given() -> None:
    rows = RowPositions()
    rows.extend(0, np.arange(5))
    assert rows.are_row_indices
    np.testing.assert_array_equal(rows.rows(3, 7), [[3, 4, 5, 6]] * 3)
    rows.extend(8, np.array([[8, 8], [8, 9], [8, 8]]))
    assert not rows.are_row_indices
    np.testing.assert_array_equal(rows.rows(7, 9), [[7, 8]] * 3)
    np.testing.assert_array_equal(rows.rows(9, 12), [[8, 10, 11], [9, 10, 11], [8, 10, 11]])
    assert rows.material(0, 8) == b"\0"
    assert rows.material(8, 12) != b"\0"
    assert rows.material(10, 14) == b"\0"  # what follows is at its index again


@pytest.mark.parametrize("delta", [-551.0, 0.333333, 12.0])
def test_following_rows_are_the_models(delta: float) -> None:
    prompt = np.broadcast_to(np.arange(600, dtype=np.float32) + np.float32(delta), (3, 600))
    rows = RowPositions()
    rows.extend(0, prompt)
    last = prompt[:, -1].max()
    index = RopeIndex(prompt, float(last + np.float32(1) - np.float32(600)))
    np.testing.assert_array_equal(rows.rows(600, 700), index.following(600, 100))
    np.testing.assert_array_equal(rows.rows(650, 651), index.following(650, 1))
    np.testing.assert_array_equal(rows.rows(599, 601)[:, 1:], index.following(600, 1))


def test_one_axis_is_three_equal_ones() -> None:
    one, three = RowPositions(), RowPositions()
    one.extend(0, np.array([4, 9, 9.5]))
    three.extend(0, np.array([[4, 9, 9.5]] * 3))
    assert one.material(0, 5) == three.material(0, 5)


def test_rows_in_between_count_on() -> None:
    rows = RowPositions()
    rows.extend(0, np.array([7.0]))
    rows.extend(3, np.array([0.0, 1.0]))
    np.testing.assert_array_equal(rows.rows(0, 7)[0], [7, 8, 9, 0, 1, 2, 3])
