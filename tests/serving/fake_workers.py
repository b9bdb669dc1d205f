"""A supervised pipeline whose workers say, fail and die as a test wants: no process, no socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from omnistage.errors import TransportError
from omnistage.graph import PipelineSpec
from omnistage.serving import supervisor as supervisor_module
from omnistage.serving.orchestrator import Orchestrator
from omnistage.serving.replicas import Replica
from omnistage.serving.requests import GenerateRequest
from omnistage.serving.supervisor import Supervisor
from omnistage.stages.config import WorkerConfig
from omnistage.transport.messages import Hello, Ready
from omnistage.types import TokenSegment


class FakeHub:
    """sent: what each address was sent.  gone: addresses that cannot be reached."""

    address = "hub"

    def __init__(self):
        self.sent = {}
        self.gone = set()
        self._inbox = asyncio.Queue()

    async def say(self, address, message):
        """A message of a worker; returns when it has been handled."""
        self._inbox.put_nowait((address, message))
        for _ in range(4):
            await asyncio.sleep(0)

    async def receive(self):
        return await self._inbox.get()

    def send(self, to, message):
        if to in self.gone:
            raise TransportError(f"{to} is gone")
        self.sent.setdefault(to, []).append(message)

    def last(self, address):
        return self.sent[address][-1]

    def release(self, message):
        pass

    def forget(self, address):
        self.gone.add(address)

    def close(self):
        pass

    def stats(self):
        return {}


class FakeHost:
    """spawned: names of the workers, in order.  guests: of each process, by the name of its first worker."""

    def __init__(self, *, shares_processes=True):
        self.shares_processes = shares_processes
        self.spawned = []
        self.guests = {}

    async def start(self, on_exit):
        self.exit = on_exit

    def spawn(self, config, name):
        self.spawned.append(name)
        self.guests[name] = [guest.name for guest in config.guests]

    def pid_of(self, name):
        return 0

    async def close(self):
        pass


class Site:
    """A supervised pipeline and its fakes."""

    def __init__(self, spec: PipelineSpec, *, shares_processes=True, **options):
        self.hub, self.host = FakeHub(), FakeHost(shares_processes=shares_processes)
        self.orchestrator = Orchestrator(spec, self.hub, "")
        self.supervisor = Supervisor(
            spec=spec,
            hub=self.hub,
            host=self.host,
            orchestrator=self.orchestrator,
            template=WorkerConfig(name="", stage="", run_id="test", control="hub"),
            **options,
        )

    def replica(self, stage="llm", index=0) -> Replica:
        return self.orchestrator.replicas.by_stage[stage][index]

    async def hello(self, worker, stage="llm"):
        address = f"@{worker}"
        await self.hub.say(address, Hello(worker=worker, stage=stage, address=address, pid=1, host="h"))

    async def ready(self, worker, stage="llm"):
        await self.hello(worker, stage)
        await self.hub.say(f"@{worker}", Ready(worker=worker, info={}))

    def submit(self, name="r"):
        request = GenerateRequest(request_id=name, outputs=("text",), segments=(TokenSegment((1,)),))
        return self.orchestrator.submit(request)

    async def spawned(self, count):
        await until(lambda: len(self.host.spawned) >= count)


async def until(is_true):
    for _ in range(5000):
        if is_true():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not happen within five seconds")


async def error_of(stream):
    async with asyncio.timeout(5):
        with pytest.raises(Exception) as caught:  # noqa: PT011 (the callers look at it)
            async for _ in stream:
                pass
    return caught.value


@asynccontextmanager
async def opened_sites(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Awaitable[Site]]]:
    """What starts a Site; all of them are closed at the end."""
    monkeypatch.setattr(supervisor_module, "BACKOFF_SECONDS", 0.0)
    monkeypatch.setattr(supervisor_module, "SHUTDOWN_SECONDS", 0.05)
    opened = []

    async def start(spec: PipelineSpec, **options) -> Site:
        site = Site(spec, **options)
        opened.append(site)
        await site.supervisor.start()
        return site

    yield start
    for site in opened:
        async with asyncio.timeout(5):
            await site.supervisor.close()
