"""Qwen3-Omni's encoders in the thinker's process and its vocoder in the talker's: same answers, one fate."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from omnistage.errors import RequestFailed, WeightsError
from omnistage.graph import PipelineSpec
from omnistage.serving.launch import LaunchOptions, Pipeline, start_pipeline
from omnistage.serving.replicas import Replica, ReplicaState
from tests.conftest import holdings
from tests.faults.starter import ready_again, replica_of, segments, until
from tests.models.qwen3_reference import OMNI_CASES, omni_answer
from tests.omni.asking import ask, assert_equals_reference, omni_graph, question, running

CASES = ("all", "audio_in_video", "two_images", "text")
THINKING, SPEAKING = ("thinker", "vision", "hearing"), ("talker", "vocoder")


def colocated(directory: Path, **settings) -> PipelineSpec:
    """Media are encoded anew each time: a cache would keep the encoders out of work."""
    changes = {
        "vision": {"colocate": "thinker", "encoder_cache": 1},
        "hearing": {"colocate": "thinker", "encoder_cache": 1},
        "vocoder": {"colocate": "talker"},
    }
    return omni_graph(directory, changes=changes, **settings)


async def ask_each(pipeline, directory, cases, name, watch=None):
    requests = [question(directory, case, name=f"{case}-{name}") for case in cases]
    heard = await asyncio.gather(*(ask(pipeline, request, watch) for request in requests))
    for case, answer in zip(cases, heard, strict=True):
        assert_equals_reference(answer, directory, case)
    return heard


async def test_answers_of_threads(qwen3_omni_dir):
    async with running(colocated(qwen3_omni_dir)) as pipeline:
        await ask_each(pipeline, qwen3_omni_dir, OMNI_CASES, "threads")


# --- processes: one pipeline for three tests, each of which leaves it serving


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pipeline(qwen3_omni_dir: Path) -> AsyncIterator[Pipeline]:
    before = holdings()
    spec = colocated(qwen3_omni_dir, replay_budget=3)
    async with running(spec, LaunchOptions(drain_seconds=2.0)) as started:
        yield started
    left = [one for one in holdings().beyond(before) if "descriptors" not in one]
    assert not left


def replicas(pipeline: Pipeline, stages: tuple[str, ...]) -> list[Replica]:
    return [replica_of(pipeline, stage) for stage in stages]


@pytest.mark.processes
@pytest.mark.asyncio(loop_scope="module")
async def test_answers_of_two_processes(pipeline, qwen3_omni_dir):
    thinking, speaking = ({one.pid for one in replicas(pipeline, each)} for each in (THINKING, SPEAKING))
    assert len(thinking) == len(speaking) == 1
    assert thinking != speaking
    await ask_each(pipeline, qwen3_omni_dir, OMNI_CASES, "together")


@pytest.mark.processes
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("stages", "kind"), [(THINKING, "text"), (SPEAKING, "audio")])
async def test_a_process_killed_midway_restarts_as_one(stages, kind, pipeline, qwen3_omni_dir):
    mine, others = replicas(pipeline, stages), replicas(pipeline, THINKING + SPEAKING)
    others = [replica for replica in others if replica not in mine]
    before = {replica.name: (replica.pid, replica.restarts) for replica in (*mine, *others)}
    victim, killed = mine[0].pid, []

    def kill(heard):
        if not killed and heard.order.count(kind) == 2:
            killed.append(victim)
            os.kill(victim, signal.SIGKILL)

    heard = await ask_each(pipeline, qwen3_omni_dir, CASES, stages[0], kill)
    assert killed
    replays = [answer.done.replays for answer in heard]
    assert max(replays) == 1  # three stages are gone, and it is one death
    await ready_again(pipeline)
    assert {replica.restarts - before[replica.name][1] for replica in mine} == {1}
    assert len({replica.pid for replica in mine}) == 1
    assert mine[0].pid != victim
    assert {replica.name: (replica.pid, replica.restarts) for replica in others}.items() <= before.items()
    assert segments(pipeline) <= {replica.worker for replica in (*mine, *others)}
    await ask_each(pipeline, qwen3_omni_dir, ("all",), f"after-{stages[0]}")


@pytest.mark.processes
async def test_a_guest_that_cannot_be_loaded(qwen3_omni_dir):
    """Its stage alone is given up, with the reason; its host serves on in a new process."""
    spec = colocated(qwen3_omni_dir)
    broken = dataclasses.replace(spec.stages["vocoder"], part="nothing")
    spec = dataclasses.replace(spec, stages={**spec.stages, "vocoder": broken})
    async with start_pipeline(spec, LaunchOptions(drain_seconds=0.0)) as pipeline:
        with pytest.raises(WeightsError, match="no part 'nothing'"):
            await ready_again(pipeline)
        assert "no part 'nothing'" in replica_of(pipeline, "vocoder").failure
        whole = [replica_of(pipeline, stage) for stage in (*THINKING, "talker")]
        await until(lambda: all(replica.state is ReplicaState.READY for replica in whole))
        assert [replica.restarts for replica in whole] == [0, 0, 0, 1]
        heard = await ask(pipeline, question(qwen3_omni_dir, "image", outputs=("text",)))
        assert heard.token_ids == omni_answer(qwen3_omni_dir, "image").tokens
        with pytest.raises(RequestFailed, match=r"stage 'vocoder' is down: .* no part 'nothing'"):
            await ask(pipeline, question(qwen3_omni_dir, "image"))
