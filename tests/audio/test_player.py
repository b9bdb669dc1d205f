from __future__ import annotations

import pytest

from omnistage.audio.player import Player, play


def test_steady_sound_has_no_underrun() -> None:
    report = play([(0.5 + 0.1 * index, 200) for index in range(10)], 1000, started=0.2)
    assert report.time_to_first_audio == pytest.approx(0.3)
    assert (report.num_underruns, report.underrun_seconds) == (0, 0.0)
    assert report.duration == pytest.approx(2.0)
    assert report.min_in_hand == pytest.approx(0.1)


def test_late_sound_is_an_underrun_of_its_lateness() -> None:
    report = play([(0.0, 100), (0.4, 100), (0.45, 100), (0.9, 100)], 1000)
    # Played 0.0-0.1, silent 0.3 s, 0.4-0.6, silent 0.3 s, 0.9-1.0.
    assert report.num_underruns == 2
    assert report.underrun_seconds == pytest.approx(0.6)
    assert report.min_in_hand == pytest.approx(-0.3)


def test_a_prebuffer_hides_lateness() -> None:
    arrivals = [(0.0, 100), (0.05, 100), (0.24, 100)]
    assert play(arrivals, 1000).num_underruns == 1
    buffered = play(arrivals, 1000, prebuffer=0.2)  # plays 0.05-0.35
    assert buffered.num_underruns == 0
    assert buffered.time_to_first_audio == 0.0


def test_no_sound() -> None:
    report = play([(0.3, 0)], 1000)
    assert report.time_to_first_audio is None
    assert (report.num_underruns, report.duration, report.min_in_hand) == (0, 0.0, 0.0)


def test_sound_in_hand() -> None:
    player = Player(1000, prebuffer=0.15)
    player.receive(1.0, 100)
    assert player.in_hand(5.0) == pytest.approx(0.1)  # not playing yet
    player.receive(6.0, 100)
    assert player.in_hand(6.05) == pytest.approx(0.15)
    assert player.in_hand(6.5) == pytest.approx(-0.3)
