"""Where one request's time went: numbers and a text table.  Knows only events and stage timings.

All instants are seconds after the request's admission.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from omnistage.serving.requests import AudioDelta, Done, Event, TextDelta


@dataclass(frozen=True)
class StageRow:
    """One stage's part.  received .. finished: instants; None if it never came to that.

    queued, computed, transferred: durations in seconds.  computed is at most finished - started: the
    rest of that span the stage waited for input, for its turn on a shared device, or for its reader.
    """

    stage: str
    received: float
    started: float | None
    first_output: float | None
    finished: float | None
    queued: float
    computed: float
    transferred: float


@dataclass(frozen=True)
class Timeline:
    """total: seconds until the last event.  audio_seconds: of speech made.

    real_time_factor: total / audio_seconds, under 1 if speech was made faster than it plays; None
    without speech.
    """

    rows: tuple[StageRow, ...]
    total: float
    time_to_first_token: float | None
    time_to_first_audio: float | None
    audio_seconds: float
    real_time_factor: float | None


class Recorder:
    """Notes when a request's first text and first sound arrived, and how much sound there was."""

    def __init__(self) -> None:
        self._created = time.monotonic()
        self._first_text: float | None = None
        self._first_audio: float | None = None
        self._last = self._created
        self.audio_seconds = 0.0

    def observe(self, event: Event) -> None:
        self._last = now = time.monotonic()
        if isinstance(event, TextDelta) and self._first_text is None and (event.text or event.token_ids):
            self._first_text = now
        elif isinstance(event, AudioDelta) and len(event.pcm) > 0:
            self._first_audio = self._first_audio or now
            self.audio_seconds += len(event.pcm) / event.sample_rate

    def timeline(self, done: Done) -> Timeline:
        arrived = done.arrived or self._created

        def after(instant: float | None) -> float | None:
            return max(0.0, instant - arrived) if instant else None

        rows = [
            StageRow(
                stage=timing.stage,
                received=after(timing.received) or 0.0,
                started=after(timing.started),
                first_output=after(timing.first_output),
                finished=after(timing.finished),
                queued=timing.queued,
                computed=timing.computed,
                transferred=timing.transferred,
            )
            for timing in done.timings
        ]
        total = after(self._last) or 0.0
        return Timeline(
            rows=tuple(sorted(rows, key=lambda row: (row.received, row.started or row.received, row.stage))),
            total=total,
            time_to_first_token=after(self._first_text),
            time_to_first_audio=after(self._first_audio),
            audio_seconds=self.audio_seconds,
            real_time_factor=total / self.audio_seconds if self.audio_seconds else None,
        )


def timeline_as_json(timeline: Timeline) -> dict[str, Any]:
    """The `omnistage` object of an answer that asked for `return_timings`."""
    return {
        "timings": [
            {
                "stage": row.stage,
                "received": _rounded(row.received),
                "started": _rounded(row.started),
                "first_output": _rounded(row.first_output),
                "finished": _rounded(row.finished),
                "queued": _rounded(row.queued),
                "computed": _rounded(row.computed),
                "transferred": _rounded(row.transferred),
            }
            for row in timeline.rows
        ],
        "total": _rounded(timeline.total),
        "time_to_first_token": _rounded(timeline.time_to_first_token),
        "time_to_first_audio": _rounded(timeline.time_to_first_audio),
        "audio_seconds": _rounded(timeline.audio_seconds),
        "real_time_factor": _rounded(timeline.real_time_factor),
    }


def timeline_as_text(timeline: Timeline, *, width: int = 40) -> str:
    """A table for terminals.  width: characters of the bar column.

    In a bar `.` is queued, `#` from the start to the first output, `=` from there to the end.
    """
    name_width = max([len(row.stage) for row in timeline.rows] + [len("stage")])
    lines = [f"{'stage':<{name_width}}  {'queued':>8}  {'computed':>8}  {'transfer':>8}  timeline"]
    for row in timeline.rows:
        lines.append(
            f"{row.stage:<{name_width}}  {_seconds(row.queued)}  {_seconds(row.computed)}  "
            f"{_seconds(row.transferred)}  {_bar(row, timeline.total, width)}".rstrip()
        )
    facts = [f"total {timeline.total:.3f} s"]
    if timeline.time_to_first_token is not None:
        facts.append(f"first token {timeline.time_to_first_token:.3f} s")
    if timeline.time_to_first_audio is not None:
        facts.append(f"first audio {timeline.time_to_first_audio:.3f} s")
    if timeline.real_time_factor is not None:
        facts.append(f"{timeline.audio_seconds:.2f} s of speech")
        facts.append(f"real-time factor {timeline.real_time_factor:.2f}")
    return "\n".join([*lines, ", ".join(facts)])


def _seconds(value: float) -> str:
    return f"{value:>6.3f} s"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def _bar(row: StageRow, total: float, width: int) -> str:
    if total <= 0:
        return ""
    started = row.started if row.started is not None else row.finished or row.received
    finished = row.finished if row.finished is not None else total
    first_output = row.first_output if row.first_output is not None else finished
    bar = ""
    for column in range(width):
        instant = (column + 0.5) * total / width
        if instant < row.received or instant > finished:
            bar += " "
        elif instant < started:
            bar += "."
        else:
            bar += "#" if instant < first_output else "="
    if not bar.strip():  # shorter than half a column
        column = min(width - 1, int(row.received / total * width))
        bar = " " * column + "#"
    return bar.rstrip()
