"""Processes killed in the middle of answers: nothing a client sees changes, and nothing is left over.

One pipeline of real workers for the whole file; each test leaves it as it found it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from omnistage.errors import ReplayExhausted
from omnistage.serving.launch import LaunchOptions, Pipeline, start_pipeline
from omnistage.serving.requests import GenerateRequest
from tests.conftest import holdings
from tests.faults.starter import (
    STAGES,
    Answer,
    Moment,
    ask_all,
    assert_same,
    child_running,
    num_descriptors,
    pids,
    prepare,
    read,
    ready_again,
    replica_of,
    restarts,
    segments,
    settled,
    starter_spec,
    until,
)

pytestmark = [
    pytest.mark.starter,
    pytest.mark.processes,
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pipeline(undisturbed: dict[str, Answer]) -> AsyncIterator[Pipeline]:
    """Warm: what a first request allocates for good is there before anything is counted."""
    before = holdings()
    async with start_pipeline(starter_spec("replay_budget=1"), LaunchOptions(drain_seconds=0.0)) as pipeline:
        await ready_again(pipeline)
        assert_same(await ask_all(pipeline), undisturbed, tolerance=1e-5)
        yield pipeline
    leaked = holdings().beyond(before)
    assert not [one for one in leaked if "descriptors" not in one]


# The moment of each death: hearing and vision while they encode, the others while they stream.
MOMENTS = {
    "hearing": Moment("talk", "text", 2),
    "vision": Moment("talk", "text", 2),
    "thinker": Moment("look", "text", 6),
    "talker": Moment("talk", "audio", 1),
    "vocoder": Moment("look", "audio", 1),
}


@pytest.mark.parametrize("stage", STAGES)
async def test_a_killed_worker_changes_no_answer(
    pipeline: Pipeline, undisturbed: dict[str, Answer], stage: str
):
    await settled(pipeline)
    running, counted, opened = pids(pipeline), restarts(pipeline), num_descriptors()

    def kill(moment: Moment) -> None:
        if moment == MOMENTS[stage]:
            os.kill(running[stage], signal.SIGKILL)

    answers = await ask_all(pipeline, kill)
    assert_same(answers, undisturbed, tolerance=1e-5)
    assert sum(answer.replays for answer in answers.values()) >= 1
    await settled(pipeline)
    now = pids(pipeline)
    assert now[stage] != running[stage]
    assert {**now, stage: 0} == {**running, stage: 0}
    assert restarts(pipeline) == {**counted, stage: counted[stage] + 1}
    await until(lambda: num_descriptors() == opened, lambda: f"{num_descriptors()} descriptors, not {opened}")
    assert segments(pipeline) <= {replica_of(pipeline, name).worker for name in STAGES}


async def test_the_replay_budget_bounds_deaths_per_request(
    pipeline: Pipeline, undisturbed: dict[str, Answer]
):
    """The budget is one: the request hit twice fails once, the one hit once and the one beside it go on."""
    await settled(pipeline)
    request = await prepare(pipeline, "talk")
    write = await prepare(pipeline, "write")
    killed: list[int] = []
    later: list[asyncio.Task[Answer]] = []

    def kill(moment: Moment) -> None:
        thinker = replica_of(pipeline, "thinker")
        if moment.kind == "text" and moment.count >= 3 and thinker.pid not in killed and len(killed) < 2:
            if killed:
                later.append(asyncio.create_task(read(pipeline.orchestrator.submit(write))))
            os.kill(thinker.pid, signal.SIGKILL)
            killed.append(thinker.pid)

    speech = pipeline.orchestrator.submit(await say(pipeline, "Nobody kills what this sentence needs."))
    beside = asyncio.create_task(read(speech))
    stream = pipeline.orchestrator.submit(request)
    with pytest.raises(ReplayExhausted, match=r"'thinker' died.* 2 deaths; it survives 1 \(replay_budget"):
        await read(stream, "talk", kill)
    late = await later[0]
    assert late.replays == 1
    assert late.token_ids == undisturbed["write"].token_ids
    assert len((await beside).pcm) > 0
    assert (await beside).replays == 0
    await settled(pipeline)


async def say(pipeline: Pipeline, text: str) -> GenerateRequest:
    request = await prepare(pipeline, "talk")
    return dataclasses.replace(
        request, request_id="say", outputs=("audio",), segments=(), entry="talker", text=text
    )


async def test_a_killed_nursery_takes_its_workers_along_and_all_are_replayed(
    pipeline: Pipeline, undisturbed: dict[str, Answer]
):
    await settled(pipeline)
    running, counted, opened = pids(pipeline), restarts(pipeline), num_descriptors()
    nursery = child_running("omnistage.stages.nursery")

    def kill(moment: Moment) -> None:
        if moment == Moment("look", "text", 3):
            os.kill(nursery, signal.SIGKILL)

    answers = await ask_all(pipeline, kill)
    assert_same(answers, undisturbed, tolerance=1e-5)
    assert {answer.replays for answer in answers.values()} <= {0, 1}
    assert answers["look"].replays == 1
    await settled(pipeline)
    assert not set(running.values()) & set(pids(pipeline).values())
    assert restarts(pipeline) == {stage: count + 1 for stage, count in counted.items()}
    await until(lambda: num_descriptors() == opened, lambda: f"{num_descriptors()} descriptors, not {opened}")


async def test_a_killed_lease_broker_is_replaced_and_used(pipeline: Pipeline, undisturbed: dict[str, Answer]):
    await settled(pipeline)
    running, opened = pids(pipeline), num_descriptors()
    broker = child_running("lease_broker")

    def kill(moment: Moment) -> None:
        if moment == Moment("look", "text", 3):
            os.kill(broker, signal.SIGKILL)

    answers = await ask_all(pipeline, kill)
    assert_same(answers, undisturbed, tolerance=1e-5)
    assert not any(answer.replays for answer in answers.values())
    assert pids(pipeline) == running
    successor = child_running("lease_broker")
    assert successor != broker
    assert_same(await ask_all(pipeline), undisturbed, tolerance=1e-5)
    # Each worker has a connection to it, beside its listener, its selector and its standard streams.
    folder = f"/proc/{successor}/fd"
    opened_there = [os.readlink(f"{folder}/{number}") for number in os.listdir(folder)]
    assert sum(name.startswith("socket:") for name in opened_there) == 1 + len(STAGES)
    await settled(pipeline)
    await until(lambda: num_descriptors() == opened, lambda: f"{num_descriptors()} descriptors, not {opened}")


async def test_requests_wait_for_a_stage_that_restarts(pipeline: Pipeline, undisturbed: dict[str, Answer]):
    await settled(pipeline)
    os.kill(replica_of(pipeline, "thinker").pid, signal.SIGKILL)
    await until(lambda: not pipeline.orchestrator.replicas.is_ready)
    assert pipeline.orchestrator.is_ready
    answer = await read(pipeline.orchestrator.submit(await prepare(pipeline, "write")))
    assert answer.token_ids == undisturbed["write"].token_ids
    assert answer.replays == 0
