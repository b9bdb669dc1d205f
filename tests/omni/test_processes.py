"""Qwen3-Omni in processes of its own: shared memory or tcp, and each worker killed midway."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from omnistage.serving.launch import LaunchOptions, Pipeline
from tests.faults.starter import until
from tests.models.qwen3_reference import OMNI_CASES
from tests.omni.asking import ask, assert_equals_reference, omni_graph, question, running

pytestmark = [pytest.mark.processes, pytest.mark.asyncio(loop_scope="module")]
CASES = ("all", "audio_in_video", "two_images", "text")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pipeline(qwen3_omni_dir: Path) -> AsyncIterator[Pipeline]:
    # Media that are encoded anew: a cache would keep the killed encoders out of work.
    changes = {stage: {"encoder_cache": 1} for stage in ("vision", "hearing")}
    async with running(
        omni_graph(qwen3_omni_dir, changes=changes, replay_budget=3), LaunchOptions(drain_seconds=2.0)
    ) as started:
        yield started


async def test_answers_through_shared_memory(pipeline, qwen3_omni_dir):
    heard = await asyncio.gather(*(ask(pipeline, question(qwen3_omni_dir, case)) for case in OMNI_CASES))
    for case, answer in zip(OMNI_CASES, heard, strict=True):
        assert_equals_reference(answer, qwen3_omni_dir, case)


@pytest.mark.parametrize(
    ("stage", "kind"),
    [("vision", "text"), ("hearing", "text"), ("thinker", "text"), ("talker", "audio"), ("vocoder", "audio")],
)
async def test_a_worker_killed_midway_changes_no_answer(stage, kind, pipeline, qwen3_omni_dir):
    (replica,) = pipeline.orchestrator.replicas.by_stage[stage]
    victim, killed = replica.pid, []

    def kill(heard):
        if not killed and heard.order.count(kind) == 2:
            killed.append(victim)
            os.kill(victim, signal.SIGKILL)

    requests = [question(qwen3_omni_dir, case, name=f"{case}-{stage}") for case in CASES]
    heard = await asyncio.gather(*(ask(pipeline, request, kill) for request in requests))
    for case, answer in zip(CASES, heard, strict=True):
        assert_equals_reference(answer, qwen3_omni_dir, case)
    assert killed
    assert sum(answer.done.replays for answer in heard) >= 1
    await until(lambda: replica.pid not in (0, victim), lambda: f"{stage} was not restarted")


@pytest.mark.parametrize("stage", ["thinker", "talker", "vocoder"])
@pytest.mark.parametrize("max_tokens", [2, 9])
async def test_a_worker_killed_after_the_text_changes_no_sound(stage, max_tokens, pipeline, qwen3_omni_dir):
    """Cut text, sampled speech that goes on long after it: the replay hears the whole text at once."""

    def request(name):
        talker = {"temperature": 0.9, "top_k": 50, "max_tokens": 70}
        fields = {"max_tokens": max_tokens, "talker": talker, "seed": 1}
        return question(qwen3_omni_dir, "text", name=f"{name}-{stage}-{max_tokens}", **fields)

    expected = await ask(pipeline, request("whole"))
    (replica,) = pipeline.orchestrator.replicas.by_stage[stage]
    victim, killed = replica.pid, []

    def kill(heard):
        if not killed and heard.order.count("audio") == 3:
            killed.append(victim)
            os.kill(victim, signal.SIGKILL)

    heard = await ask(pipeline, request("killed"), kill)
    assert killed
    assert heard.token_ids == expected.token_ids
    assert heard.sound.shape == expected.sound.shape
    np.testing.assert_allclose(heard.sound, expected.sound, atol=1e-5, rtol=0)
    await until(lambda: replica.pid not in (0, victim), lambda: f"{stage} was not restarted")


async def test_answers_over_tcp(qwen3_omni_dir):
    with tempfile.TemporaryDirectory(prefix="of-") as folder:
        options = LaunchOptions(transport="tcp", key_file=str(Path(folder) / "keys"), drain_seconds=2.0)
        async with running(omni_graph(qwen3_omni_dir), options) as started:
            heard = await asyncio.gather(
                *(ask(started, question(qwen3_omni_dir, case)) for case in OMNI_CASES)
            )
    for case, answer in zip(OMNI_CASES, heard, strict=True):
        assert_equals_reference(answer, qwen3_omni_dir, case)
