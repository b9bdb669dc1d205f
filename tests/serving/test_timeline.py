"""Timelines: the arithmetic, the table and the picture."""

from __future__ import annotations

import time
from xml.etree import ElementTree

import numpy as np
import pytest

from omnistage.serving.requests import AudioDelta, Done, TextDelta
from omnistage.serving.timeline import Recorder, StageRow, Timeline, timeline_as_json, timeline_as_text
from omnistage.serving.timeline_svg import timeline_as_svg
from omnistage.types import FinishReason, StageTiming, Usage


def row(stage: str, received: float, started: float, first: float | None, finished: float) -> StageRow:
    return StageRow(stage, received, started, first, finished, started - received, 0.5, 0.01)


TIMELINE = Timeline(
    rows=(row("thinker", 0.0, 1.0, 2.0, 4.0), row("talker", 2.0, 2.0, 3.0, 4.0)),
    total=4.0,
    time_to_first_token=2.0,
    time_to_first_audio=3.0,
    audio_seconds=8.0,
    real_time_factor=0.5,
)


def test_recorder_measures_from_admission(monkeypatch: pytest.MonkeyPatch):
    clock = iter([100.0, 101.0, 102.0, 103.0, 104.5, 106.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    recorder = Recorder()  # at 100
    recorder.observe(TextDelta(""))  # at 101: no text yet
    recorder.observe(TextDelta("Two", (5,)))
    recorder.observe(AudioDelta(np.zeros(0, np.float32), 22_050))
    recorder.observe(AudioDelta(np.zeros(44_100, np.float32), 22_050))  # at 104.5
    late = StageTiming(stage="vocoder", received=104.0, started=104.1, first_output=104.2, finished=105.0)
    never = StageTiming(stage="thinker", received=100.5)
    done = Done(FinishReason.STOP, Usage(), (late, never), arrived=100.25)
    recorder.observe(done)  # at 106
    timeline = recorder.timeline(done)
    assert [entry.stage for entry in timeline.rows] == ["thinker", "vocoder"]
    assert timeline.rows[0].started is None
    assert timeline.rows[0].finished is None
    assert timeline.rows[1].received == pytest.approx(3.75)
    assert timeline.rows[1].queued == pytest.approx(0.1)
    assert timeline.time_to_first_token == pytest.approx(1.75)
    assert timeline.time_to_first_audio == pytest.approx(4.25)
    assert timeline.total == pytest.approx(5.75)
    assert timeline.audio_seconds == 2.0
    assert timeline.real_time_factor == pytest.approx(5.75 / 2)


def test_without_speech_there_is_no_real_time_factor():
    recorder = Recorder()
    timeline = recorder.timeline(Done(FinishReason.STOP, Usage()))
    assert timeline.real_time_factor is None
    assert timeline.time_to_first_token is None
    assert timeline_as_json(timeline)["timings"] == []
    assert "real-time" not in timeline_as_text(timeline)
    ElementTree.fromstring(timeline_as_svg(timeline))


def test_text_bars_stand_on_the_clock():
    lines = timeline_as_text(TIMELINE, width=8).splitlines()
    assert lines[1].endswith("..##====")
    assert lines[2].endswith("    ##==")
    assert lines[3] == (
        "total 4.000 s, first token 2.000 s, first audio 3.000 s, 8.00 s of speech, real-time factor 0.50"
    )


def test_a_very_short_stage_is_still_seen():
    timeline = Timeline((row("vision", 1.01, 1.01, 1.02, 1.03),), 4.0, None, None, 0.0, None)
    assert timeline_as_text(timeline, width=8).splitlines()[1].endswith("s    #")


def test_svg_bars_stand_on_the_clock():
    svg = ElementTree.fromstring(timeline_as_svg(TIMELINE))
    name = "{http://www.w3.org/2000/svg}"
    bars = [
        (float(rect.get("x")), float(rect.get("width")), rect.find(f"{name}title").text)
        for rect in svg.iter(f"{name}rect")
        if rect.find(f"{name}title") is not None
    ]
    assert [title for _, _, title in bars] == [
        "thinker queued: 1.000 s",
        "thinker until its first output: 1.000 s",
        "thinker until its last output: 2.000 s",
        "talker until its first output: 1.000 s",
        "talker until its last output: 1.000 s",
    ]
    queued, first, rest, talker, _ = bars
    assert first[1] == pytest.approx(queued[1], abs=0.2)
    assert rest[1] == pytest.approx(2 * queued[1], abs=0.2)
    assert talker[0] == pytest.approx(rest[0], abs=0.2), "both begin at 2 s"
    texts = [text.text for text in svg.iter(f"{name}text")]
    assert "first token 2.000 s" in texts
    assert "first audio 3.000 s" in texts


def test_svg_escapes_names():
    timeline = Timeline((row("<a&b>", 0.0, 1.0, 2.0, 4.0),), 4.0, None, None, 0.0, None)
    svg = ElementTree.fromstring(timeline_as_svg(timeline))
    assert "<a&b>" in [element.text for element in svg.iter()]


@pytest.mark.parametrize("total", [0.0, 0.0004, 0.9, 7.0, 3600.0])
def test_svg_of_any_length(total: float):
    timeline = Timeline((row("a", 0.0, 0.0, None, total),), total, total, total, 1.0, total)
    svg = timeline_as_svg(timeline)
    assert ElementTree.fromstring(svg) is not None
    assert svg.count("<text") < 40, "a readable number of ticks"
