"""Workers behind a network of their own: a namespace that a virtual cable joins to this host.

Needs root and the kernel's network namespaces; skipped without.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from omnistage.serving.launch import LaunchOptions, Pipeline, start_pipeline
from omnistage.serving.replicas import ReplicaState
from tests.faults.starter import (
    Answer,
    Moment,
    ask_all,
    assert_same,
    cli,
    environment,
    ready_again,
    replica_of,
    settled,
    starter_spec,
    until,
)

REMOTE = ("talker", "vocoder")


@dataclass(frozen=True)
class Cable:
    """near, far: the ends' addresses.  device: the near end.  namespace: where the far end is."""

    near: str
    far: str
    device: str
    namespace: str


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@pytest.fixture
def cable() -> Iterator[Cable]:
    number = os.getpid() % 250
    cable = Cable(f"198.18.{number}.1", f"198.18.{number}.2", f"omn{number}", f"omnistage{os.getpid()}")
    far_device = f"omf{number}"
    with ExitStack() as stack:
        try:
            ip("netns", "add", cable.namespace)
            stack.callback(ip, "netns", "del", cable.namespace)  # takes both ends along
            ip("link", "add", cable.device, "type", "veth", "peer", "name", far_device)
            ip("link", "set", far_device, "netns", cable.namespace)
            ip("addr", "add", f"{cable.near}/30", "dev", cable.device)
            ip("link", "set", cable.device, "up")
            inside = ("netns", "exec", cable.namespace, "ip")
            ip(*inside, "addr", "add", f"{cable.far}/30", "dev", far_device)
            ip(*inside, "link", "set", far_device, "up")
            ip(*inside, "link", "set", "lo", "up")  # between the two workers
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield cable


@pytest.mark.full
@pytest.mark.starter
@pytest.mark.processes
@pytest.mark.skipif(shutil.which("ip") is None, reason="iproute2 is not installed")
async def test_a_cut_cable_is_survived(home: Path, cable: Cable, undisturbed: dict[str, Answer]):
    """Answers over the cable equal local ones, also where it is cut and other workers have to join."""
    started: list[subprocess.Popen[bytes]] = []

    def join_all(pipeline: Pipeline) -> None:
        url = next(url for url in pipeline.address.split("|") if url.startswith("tcp://"))
        for stage in REMOTE:
            options = ["--join", url, "--stage", stage, "--key", str(home / "keys")]
            options += ["--bind", f"tcp://{cable.far}:0", "--patience", "8"]
            command = ["ip", "netns", "exec", cable.namespace, *cli("worker", *options)]
            started.append(subprocess.Popen(command, env=environment(home)))

    options = LaunchOptions(
        listen=f"tcp://{cable.near}:0",
        key_file=str(home / "keys"),
        drain_seconds=0.0,
        heartbeat_seconds=0.2,
        silence_seconds=5.0,
    )
    spec = starter_spec(*(f"{stage}.placement=remote" for stage in REMOTE), "replay_budget=2")
    try:
        async with start_pipeline(spec, options) as pipeline:
            join_all(pipeline)
            await ready_again(pipeline)
            assert_same(await ask_all(pipeline), undisturbed, tolerance=1e-5)

            async def mend() -> None:
                replicas = [replica_of(pipeline, stage) for stage in REMOTE]
                await until(lambda: all(one.state is not ReplicaState.READY for one in replicas))
                ip("link", "set", cable.device, "up")
                join_all(pipeline)

            mending: list[asyncio.Task[None]] = []

            def cut(moment: Moment) -> None:
                if moment == Moment("talk", "audio", 1):
                    ip("link", "set", cable.device, "down")
                    mending.append(asyncio.create_task(mend()))

            answers = await ask_all(pipeline, cut)
            await mending[0]
            assert_same(answers, undisturbed, tolerance=1e-5)
            assert answers["talk"].replays >= 1
            assert answers["write"].replays == 0
            await settled(pipeline)
            # Those behind the cut have noticed that nobody counts on them any more.
            await until(lambda: all(worker.poll() == 1 for worker in started[:2]))
        await until(lambda: all(worker.poll() == 0 for worker in started[2:]))
    finally:
        for worker in started:
            worker.kill()
            worker.wait()
