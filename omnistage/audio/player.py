"""A model of somebody listening: when sound starts, and where it would have stopped for want of samples.

Pure arithmetic on arrival times; plays nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class PlaybackReport:
    """All in seconds but num_underruns.

    time_to_first_audio: from the start to the first samples; None if none came.
    underrun_seconds: silence between samples that a listener heard.  min_in_hand: the least sound left
    when more arrived (negative: how late it was).  duration: of all sound.
    """

    time_to_first_audio: float | None
    num_underruns: int
    underrun_seconds: float
    min_in_hand: float
    duration: float


class Player:
    """Plays samples as they arrive, pausing when it has none.

    sample_rate: Hz.  started: the instant the listener asked, on the clock of the arrival times.
    prebuffer: seconds of sound gathered before playing starts.
    """

    def __init__(self, sample_rate: int, *, started: float = 0.0, prebuffer: float = 0.0) -> None:
        self._sample_rate = sample_rate
        self._started = started
        self._prebuffer = prebuffer
        self._first_arrival: float | None = None
        self._plays_until: float | None = None  # None until playing starts
        self._num_samples = 0
        self._num_underruns = 0
        self._underrun_seconds = 0.0
        self._min_in_hand = float("inf")

    def receive(self, arrival: float, num_samples: int) -> None:
        """Samples arrive; arrivals never go back in time."""
        if num_samples <= 0:
            return
        if self._first_arrival is None:
            self._first_arrival = arrival
        self._num_samples += num_samples
        seconds = num_samples / self._sample_rate
        if self._plays_until is None:
            if self.duration >= self._prebuffer:
                self._plays_until = arrival + self.duration
            return
        in_hand = self._plays_until - arrival
        self._min_in_hand = min(self._min_in_hand, in_hand)
        if in_hand < 0:
            self._num_underruns += 1
            self._underrun_seconds -= in_hand
        self._plays_until = max(self._plays_until, arrival) + seconds

    def in_hand(self, now: float) -> float:
        """Seconds of sound received and not yet played; negative: for how long it has been silent."""
        if self._plays_until is None:
            return self.duration
        return self._plays_until - now

    @property
    def duration(self) -> float:
        """Seconds of sound received."""
        return self._num_samples / self._sample_rate

    def report(self) -> PlaybackReport:
        first = self._first_arrival
        return PlaybackReport(
            time_to_first_audio=None if first is None else first - self._started,
            num_underruns=self._num_underruns,
            underrun_seconds=self._underrun_seconds,
            min_in_hand=0.0 if self._min_in_hand == float("inf") else self._min_in_hand,
            duration=self.duration,
        )


def play(
    arrivals: Iterable[tuple[float, int]], sample_rate: int, *, started: float = 0.0, prebuffer: float = 0.0
) -> PlaybackReport:
    """arrivals: (instant in seconds, number of samples), in order."""
    player = Player(sample_rate, started=started, prebuffer=prebuffer)
    for arrival, num_samples in arrivals:
        player.receive(arrival, num_samples)
    return player.report()
