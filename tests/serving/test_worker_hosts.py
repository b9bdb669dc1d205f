"""NurseryHost against nurseries played by the test: deaths at awkward moments lose no worker."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import AsyncIterator

import msgspec
import pytest

from omnistage.serving import worker_hosts
from omnistage.serving.worker_hosts import NurseryHost
from omnistage.stages.config import WorkerConfig


class FakeNursery:
    """Stands for the process and holds its end of the connection."""

    started: list[FakeNursery]

    def __init__(self, command, *, pass_fds, **options):
        if type(self).refused:
            type(self).refused -= 1
            raise OSError("no more processes")
        self.connection = socket.socket(fileno=os.dup(pass_fds[0]))
        self.connection.settimeout(5)
        self.is_dead = threading.Event()
        type(self).started.append(self)

    def commands(self, count=1):
        """Names of the next workers to start."""
        names = []
        lines = self.connection.makefile("r")
        for _ in range(count):
            names.append(json.loads(lines.readline())["spawn"])
        return names

    def tell(self, **event):
        self.connection.sendall(json.dumps(event).encode() + b"\n")

    def die(self):
        self.connection.close()
        self.is_dead.set()

    kill = die

    def wait(self, timeout=None):
        assert self.is_dead.wait(5)


@pytest.fixture
def nurseries(monkeypatch):
    FakeNursery.started = []
    FakeNursery.refused = 0
    monkeypatch.setattr(worker_hosts.subprocess, "Popen", FakeNursery)
    return FakeNursery.started


@pytest.fixture
async def host(nurseries, tmp_path) -> AsyncIterator:
    """exits: (worker, status) in order."""
    host = NurseryHost(tmp_path)
    host.exits = []
    await host.start(lambda name, status: host.exits.append((name, status)))
    yield host
    for nursery in nurseries:
        nursery.die()
    async with asyncio.timeout(5):
        await host.close()


def spawn(host, name):
    host.spawn(WorkerConfig(name=name, stage="s", run_id="r", control="c"), name)


async def until(is_true):
    for _ in range(5000):
        if is_true():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not happen within five seconds")


async def test_no_nursery_without_workers(host, nurseries):
    await asyncio.sleep(0.01)
    assert nurseries == []


async def test_workers_start_and_end(host, nurseries):
    spawn(host, "a")
    spawn(host, "b")
    await until(lambda: nurseries)
    assert await asyncio.to_thread(nurseries[0].commands, 2) == ["a", "b"]
    nurseries[0].tell(started="a", pid=7)
    await until(lambda: host.pid_of("a") == 7)
    nurseries[0].tell(exited="a", pid=7, status=-9)
    await until(lambda: host.exits)
    assert host.exits == [("a", -9)]
    assert host.pid_of("a") == 0


async def test_guests_go_with_their_worker_and_end_with_it(host, nurseries):
    guest = WorkerConfig(name="g", stage="s", run_id="r", control="c")
    host.spawn(WorkerConfig(name="a", stage="s", run_id="r", control="c", guests=(guest,)), "a")
    await until(lambda: nurseries)
    line = await asyncio.to_thread(nurseries[0].connection.makefile("r").readline)
    sent = msgspec.convert(json.loads(line)["config"], WorkerConfig)
    assert sent.guests == (guest,)
    nurseries[0].tell(started="a", pid=7)
    nurseries[0].tell(exited="a", pid=7, status=1)
    await until(lambda: host.exits)
    assert host.exits == [("a", 1)]


async def test_a_dead_nursery_ends_its_workers_and_another_starts_on_demand(host, nurseries):
    spawn(host, "a")
    await until(lambda: nurseries)
    await asyncio.to_thread(nurseries[0].commands)
    nurseries[0].die()
    await until(lambda: host.exits)
    assert host.exits == [("a", -9)]
    await asyncio.sleep(0.01)
    assert len(nurseries) == 1
    spawn(host, "b")
    await until(lambda: len(nurseries) == 2)
    assert await asyncio.to_thread(nurseries[1].commands) == ["b"]


async def test_a_nursery_that_dies_with_commands_unread_is_noticed(host, nurseries):
    """The kernel then reports a reset instead of an end of file."""
    spawn(host, "a")
    await until(lambda: nurseries)
    await asyncio.to_thread(nurseries[0].commands)
    spawn(host, "b")
    await asyncio.sleep(0.01)
    nurseries[0].die()
    await until(lambda: len(host.exits) == 2)
    assert sorted(host.exits) == [("a", -9), ("b", -9)]


async def test_a_worker_asked_for_while_its_nursery_is_being_reaped_goes_to_the_next(host, nurseries):
    spawn(host, "a")
    await until(lambda: nurseries)
    await asyncio.to_thread(nurseries[0].commands)
    nurseries[0].kill = lambda: None
    nurseries[0].connection.close()
    await until(lambda: host._writer is None)
    spawn(host, "b")
    await asyncio.sleep(0.01)
    assert host.exits == []
    nurseries[0].is_dead.set()
    await until(lambda: len(nurseries) == 2)
    assert host.exits == [("a", -9)]
    assert await asyncio.to_thread(nurseries[1].commands) == ["b"]


async def test_a_nursery_that_cannot_start_is_a_death_of_its_workers(host, nurseries):
    FakeNursery.refused = 1
    spawn(host, "a")
    await until(lambda: host.exits)
    assert host.exits == [("a", -9)]
    spawn(host, "b")
    await until(lambda: nurseries)
    assert await asyncio.to_thread(nurseries[0].commands) == ["b"]


async def test_closing_while_a_nursery_is_being_reaped_starts_no_other(host, nurseries):
    spawn(host, "a")
    await until(lambda: nurseries)
    await asyncio.to_thread(nurseries[0].commands)
    nurseries[0].kill = lambda: None
    nurseries[0].connection.close()
    await until(lambda: host._writer is None)
    closing = asyncio.create_task(host.close())
    await asyncio.sleep(0.01)
    nurseries[0].is_dead.set()
    async with asyncio.timeout(5):
        await closing
    assert len(nurseries) == 1
    assert host.exits == []
