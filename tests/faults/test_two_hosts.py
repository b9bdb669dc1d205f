"""Workers that join over tcp, as from another host: keys, no shared memory, deaths and silence.

They have an address of the loopback network of their own, and a host name of their own for the
transport.  One pipeline for the file; talker and vocoder are remote in it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from omnistage.serving.launch import LaunchOptions, Pipeline, start_pipeline
from omnistage.serving.replicas import ReplicaState
from omnistage.transport import ClusterKeys
from tests.faults.starter import (
    Answer,
    Moment,
    ask_all,
    assert_same,
    cli,
    environment,
    is_alive,
    ready_again,
    replica_of,
    segments,
    settled,
    starter_spec,
    until,
)

pytestmark = [pytest.mark.starter, pytest.mark.processes, pytest.mark.asyncio(loop_scope="module")]

SILENCE_SECONDS = 6.0
REMOTE = ("talker", "vocoder")
Join = Callable[..., subprocess.Popen[bytes]]


def join_url(pipeline: Pipeline) -> str:
    return next(url for url in pipeline.address.split("|") if url.startswith("tcp://"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds the key file and what the workers say."""
    return tmp_path_factory.mktemp("site")


@pytest.fixture(scope="module")
def join(site: Path) -> Iterator[Join]:
    """Starts `omnistage worker`; ended, if need be, after the module."""
    started: list[subprocess.Popen[bytes]] = []

    def start(
        pipeline: Pipeline, stage: str, *, keys: str = "keys", patience: float = 10.0
    ) -> subprocess.Popen[bytes]:
        options = ["--join", join_url(pipeline), "--stage", stage, "--key", str(site / keys)]
        options += ["--bind", "tcp://127.0.0.2:0", "--patience", str(patience)]
        with open(site / "log", "wb") as log:
            process = subprocess.Popen(
                cli("worker", *options), env=environment(site), stdout=log, stderr=subprocess.STDOUT
            )
        (site / "log").rename(site / f"{process.pid}.log")
        started.append(process)
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pipeline(undisturbed: dict[str, Answer], site: Path, join: Join) -> AsyncIterator[Pipeline]:
    options = LaunchOptions(
        listen="tcp://127.0.0.1:0",
        key_file=str(site / "keys"),
        drain_seconds=0.0,
        heartbeat_seconds=0.2,
        silence_seconds=SILENCE_SECONDS,
    )
    spec = starter_spec(*(f"{stage}.placement=remote" for stage in REMOTE))
    async with start_pipeline(spec, options) as pipeline:
        for stage in REMOTE:
            join(pipeline, stage)
        await ready_again(pipeline)
        yield pipeline
        serving = [replica_of(pipeline, stage).pid for stage in REMOTE]
    # They have been told that the server ends, and end with it.
    await until(lambda: not any(map(is_alive, serving)), lambda: f"{serving} still run")


async def exit_status(worker: subprocess.Popen[bytes]) -> int:
    await until(lambda: worker.poll() is not None, lambda: "it does not end")
    return worker.returncode


def said(site: Path, pid: int) -> str:
    return (site / f"{pid}.log").read_text()


async def test_answers_equal_those_of_one_host(pipeline: Pipeline, undisturbed: dict[str, Answer]):
    assert_same(await ask_all(pipeline), undisturbed, tolerance=1e-5)
    for stage in REMOTE:
        address = replica_of(pipeline, stage).address
        assert "/frames|tcp://127.0.0.2:" in address
        assert "ipc:" not in address
    # Their tensors come and go as frames: only stages of this host have shared memory.
    assert not [worker for worker in segments(pipeline) if worker.startswith(REMOTE)]
    gauges = pipeline.orchestrator.gauges()
    assert all(gauges[stage]["slots_in_use"] == 0 for stage in REMOTE)
    assert gauges["talker"]["tensors_in_frames"] > 0


@pytest.mark.parametrize("stage", REMOTE)
async def test_a_killed_worker_is_replaced_by_one_that_joins(
    pipeline: Pipeline, undisturbed: dict[str, Answer], join: Join, stage: str
):
    await settled(pipeline)
    dead = replica_of(pipeline, stage).pid

    def kill(moment: Moment) -> None:
        if moment == Moment("talk", "audio", 1):
            os.kill(dead, signal.SIGKILL)
            join(pipeline, stage)

    answers = await ask_all(pipeline, kill)
    assert_same(answers, undisturbed, tolerance=1e-5)
    assert answers["talk"].replays + answers["look"].replays >= 1
    assert answers["write"].replays == 0
    assert replica_of(pipeline, stage).pid != dead
    assert replica_of(pipeline, stage).restarts == 1
    await settled(pipeline)


async def test_a_silent_worker_is_taken_for_dead_and_notices_it(
    pipeline: Pipeline, undisturbed: dict[str, Answer], site: Path, join: Join
):
    await settled(pipeline)
    vocoder = replica_of(pipeline, "vocoder")
    silent = vocoder.pid
    joining: list[asyncio.Task[None]] = []

    async def join_another() -> None:
        await until(lambda: vocoder.state is not ReplicaState.READY)
        join(pipeline, "vocoder")

    def stop(moment: Moment) -> None:
        if moment == Moment("talk", "audio", 1):
            os.kill(silent, signal.SIGSTOP)
            joining.append(asyncio.create_task(join_another()))

    answers = await ask_all(pipeline, stop)
    await joining[0]
    assert_same(answers, undisturbed, tolerance=1e-5)
    assert vocoder.pid != silent
    os.kill(silent, signal.SIGCONT)  # what it says now is about attempts that are over
    assert_same(await ask_all(pipeline), undisturbed, tolerance=1e-5)
    await until(lambda: not is_alive(silent))
    assert "nothing was heard from the orchestrator for 10.0 s; join again" in said(site, silent)
    await settled(pipeline)


async def test_strangers_and_the_unneeded_stay_out(pipeline: Pipeline, site: Path, join: Join):
    """With other keys a worker is not heard; with the right ones it is told that it is not needed."""
    ClusterKeys.generate().save(site / "other-keys")
    stranger = join(pipeline, "vocoder", keys="other-keys", patience=3.0)
    spare, local, unknown = (join(pipeline, stage) for stage in ("vocoder", "thinker", "nonsense"))
    for worker, stage in ((spare, "vocoder"), (local, "thinker"), (unknown, "nonsense")):
        assert await exit_status(worker) == 1
        assert f"the server needs no worker for stage '{stage}'" in said(site, worker.pid)
    assert await exit_status(stranger) == 1
    assert "sent no configuration within 3 s; is it running, and are the keys right?" in said(
        site, stranger.pid
    )
    assert pipeline.orchestrator.replicas.is_ready
