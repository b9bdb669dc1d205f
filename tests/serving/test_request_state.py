"""What the last event of a request says of its llm stages."""

from __future__ import annotations

import pytest

from omnistage.graph import Route
from omnistage.serving.request_state import ActiveRequest
from omnistage.serving.requests import Done, GenerateRequest
from omnistage.transport.messages import Finished
from omnistage.types import FinishReason, StageTiming, Usage

STAGES = ("vision", "thinker", "talker", "vocoder")
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def active(stages: tuple[str, ...], llms: tuple[str, ...]) -> ActiveRequest:
    route = Route(stages=stages, edges=(), outputs={}, entry=None)
    request = GenerateRequest(request_id="r", outputs=())
    made = ActiveRequest(request, uid="r.1", route=route, outputs={}, llms=llms)
    made.unfinished = set(stages)
    return made


def finish(request: ActiveRequest, stage: str, *, reason: FinishReason = STOP, **counts: int) -> None:
    finished = Finished(
        key=request.key,
        timing=StageTiming(stage=stage, received=1.0),
        usage=Usage(**counts),
        finish_reason=reason,
    )
    request.finish_stage(stage, finished)


async def last_event(request: ActiveRequest) -> Done:
    assert request.is_complete
    request.complete()
    event, _ = await request.next_event()
    assert isinstance(event, Done)
    return event


@pytest.mark.parametrize("talker_first", [False, True])
@pytest.mark.parametrize(
    ("thinker", "talker"), [(STOP, STOP), (STOP, LENGTH), (LENGTH, STOP), (LENGTH, LENGTH)]
)
async def test_the_prompt_s_llm_gives_reason_and_usage(
    thinker: FinishReason, talker: FinishReason, talker_first: bool
):
    request = active(STAGES, ("thinker", "talker"))
    finish(request, "vision", completion_tokens=1000)
    ends = [
        ("thinker", thinker, {"prompt_tokens": 30, "completion_tokens": 5, "cached_tokens": 16}),
        ("talker", talker, {"prompt_tokens": 39, "completion_tokens": 44, "cached_tokens": 2}),
    ]
    for stage, reason, counts in reversed(ends) if talker_first else ends:
        finish(request, stage, reason=reason, **counts)
    finish(request, "vocoder", reason=LENGTH)
    done = await last_event(request)
    assert done.finish_reason is thinker
    assert done.usage == Usage(prompt_tokens=30, completion_tokens=5, cached_tokens=16)
    assert done.audio_tokens == 44
    assert done.truncated == (("talker",) if talker is LENGTH else ())
    assert [timing.stage for timing in done.timings] == [*STAGES]


async def test_an_empty_speech_counts_nothing():
    request = active(STAGES, ("thinker", "talker"))
    for stage in STAGES:
        finish(request, stage)
    done = await last_event(request)
    assert (done.finish_reason, done.usage, done.audio_tokens, done.truncated) == (STOP, Usage(), 0, ())


async def test_without_an_llm_all_stages_count():
    request = active(("talker", "vocoder"), ())
    finish(request, "talker", prompt_tokens=3, completion_tokens=2)
    finish(request, "vocoder", completion_tokens=1, reason=LENGTH)
    done = await last_event(request)
    assert done.usage == Usage(prompt_tokens=3, completion_tokens=3)
    assert (done.finish_reason, done.audio_tokens, done.truncated) == (STOP, 0, ())


async def test_a_replay_keeps_the_first_word():
    request = active(STAGES, ("thinker", "talker"))
    finish(request, "talker", reason=LENGTH, completion_tokens=7)
    request.retire_attempt()
    request.unfinished = set(STAGES)
    for stage in STAGES:
        finish(request, stage, completion_tokens=3)
    done = await last_event(request)
    assert (done.truncated, done.audio_tokens, done.replays) == (("talker",), 7, 1)
