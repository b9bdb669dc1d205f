"""The supervisor: starts workers, hands them their configuration, restarts the one that dies.

Owns the hub's receive loop; what concerns requests goes to the orchestrator.  A worker's death never
reaches the API process: that replica alone is restarted, with a bounded number of quick deaths.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import msgspec

from omnistage.errors import OmnistageError, TransportError, WeightsError, error_from_wire
from omnistage.graph import PipelineSpec
from omnistage.graph.dump import to_json
from omnistage.serving.backend_info import Facts
from omnistage.serving.orchestrator import Orchestrator
from omnistage.serving.replicas import Replica, ReplicaState
from omnistage.serving.worker_hosts import WorkerHost
from omnistage.stages.config import WorkerConfig
from omnistage.transport import Hub, remove_leftovers
from omnistage.transport.messages import (
    Configure,
    Heartbeat,
    Hello,
    LoadFailed,
    Loading,
    Message,
    Ready,
    Shutdown,
    StepReport,
)

logger = logging.getLogger(__name__)

QUICK_DEATH_SECONDS = 10.0  # after its start, and without a request to blame
MAX_QUICK_DEATHS = 5
BACKOFF_SECONDS = 0.1  # before the restart that follows the second quick death, doubled for each one more
SHUTDOWN_SECONDS = 5.0
HEARTBEAT_SECONDS = 2.0
SILENCE_SECONDS = 20.0
LOADING_FACTOR = 30  # a loading worker says little; that its connection breaks is noticed all the same

Progress = Callable[[str, float, str], None]  # replica, fraction, what


@dataclass
class _Starts:
    """When a replica's processes were started, to bound quick deaths."""

    count: int = 0
    quick_deaths: int = 0
    at: float = field(default_factory=time.monotonic)


class Supervisor:
    def __init__(
        self,
        *,
        spec: PipelineSpec,
        hub: Hub,
        host: WorkerHost,
        orchestrator: Orchestrator,
        template: WorkerConfig,
        progress: Progress | None = None,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        """heartbeat_seconds, silence_seconds: see omnistage.serving.launch.LaunchOptions."""
        self._pipeline = to_json(spec)
        self._hub = hub
        self._host = host
        self._orchestrator = orchestrator
        self._template = template  # of every local worker: all but name, stage and start
        self._progress = progress or (lambda replica, fraction, what: None)
        self._heartbeat_seconds = heartbeat_seconds
        self._silence_seconds = silence_seconds
        self._by_worker: dict[str, Replica] = {}
        self._starts: dict[str, _Starts] = {}
        self._restarts: set[asyncio.Task[None]] = set()
        self._loops: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._load_error: OmnistageError | None = None
        self._is_closing = False

    async def start(self) -> None:
        """Start every local worker; returns once they are asked for, not once they are ready."""
        await self._host.start(self._on_exit)
        self._run(self._receive())
        replicas = self._orchestrator.replicas.all()
        for replica in replicas:
            if replica.stage.placement == "local":
                self._spawn(replica)
        if any(replica.stage.placement == "remote" for replica in replicas):
            self._run(self._watch_remote())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(self._on_loop_end)
        self._loops.append(task)

    def _on_loop_end(self, task: asyncio.Task[None]) -> None:
        """A bug ended a loop: no request could end any more, so all of them fail now."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.critical("the supervisor broke", exc_info=error)
            for replica in self._orchestrator.replicas.all():
                self._give_up(replica, f"the supervisor broke ({error!r}); restart the server")

    async def wait_ready(self) -> None:
        """Return when every stage has a ready replica.  Raises the error of one that cannot be loaded."""
        while not self._orchestrator.replicas.is_ready:
            if self._load_error is not None:
                raise self._load_error
            self._changed.clear()
            await self._changed.wait()

    async def close(self) -> None:
        """Ask every worker to end, then end those that do not."""
        self._is_closing = True
        for task in self._restarts:
            task.cancel()
        for replica in self._orchestrator.replicas.all():
            if replica.address:
                self._tell(replica.address, Shutdown())
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SHUTDOWN_SECONDS):
                    while self._has_serving_workers():
                        self._changed.clear()
                        await self._changed.wait()
        finally:
            await self._host.close()
            for name in list(self._by_worker):
                self._remove_leftovers(name)
            for task in self._loops:
                task.cancel()
            await asyncio.gather(*self._loops, *self._restarts, return_exceptions=True)

    def _has_serving_workers(self) -> bool:
        """Whether a worker here is going to obey a Shutdown soon; one that loads would not."""
        return any(
            replica.state is ReplicaState.READY and replica.stage.placement == "local"
            for replica in self._by_worker.values()
        )

    # --- processes --------------------------------------------------------------------------

    def _spawn(self, replica: Replica) -> None:
        starts = self._starts.setdefault(replica.name, _Starts())
        starts.count += 1
        starts.at = time.monotonic()
        name = f"{replica.stage.name}-{replica.index}-{starts.count}"
        replica.worker = name
        replica.state = ReplicaState.STARTING
        self._by_worker[name] = replica
        config = msgspec.structs.replace(
            self._template, name=name, stage=replica.stage.name, started=time.monotonic()
        )
        self._host.spawn(config, name)

    def _on_exit(self, name: str, status: int) -> None:
        """A worker's process has ended, for whatever reason."""
        replica = self._by_worker.pop(name, None)
        self._changed.set()
        if replica is None or replica.worker != name:
            return
        if self._is_closing:
            self._remove_leftovers(name)
            return
        starts = self._starts[replica.name]
        # It never served, or had nothing to do: the next one would die of the same cause.  What a request
        # causes is bounded by that request's replay budget.
        is_new = time.monotonic() - starts.at < QUICK_DEATH_SECONDS
        is_quick = replica.state is not ReplicaState.READY or (is_new and not replica.held)
        self._lose(replica)
        if replica.state is ReplicaState.FAILED:
            return
        starts.quick_deaths = starts.quick_deaths + 1 if is_quick else 0
        if starts.quick_deaths > MAX_QUICK_DEATHS:
            self._give_up(
                replica,
                f"{replica.name} died {starts.quick_deaths} times in a row soon after its start, at last "
                f"with status {status} (negative: a signal); see the log for the reason",
            )
            return
        replica.restarts += 1
        delay = 0.0 if starts.quick_deaths <= 1 else BACKOFF_SECONDS * 2 ** (starts.quick_deaths - 2)
        logger.error("worker %s ended with status %d; restarting it in %.1f s", name, status, delay)
        task = asyncio.create_task(self._respawn(replica, delay))
        self._restarts.add(task)
        task.add_done_callback(self._restarts.discard)

    async def _respawn(self, replica: Replica, delay: float) -> None:
        await asyncio.sleep(delay)  # back-off, so that a broken model does not burn the machine
        if replica.state is not ReplicaState.FAILED:
            self._spawn(replica)

    def _lose(self, replica: Replica) -> None:
        """Everything the process held is gone; its requests are replayed."""
        if replica.state is not ReplicaState.FAILED:
            replica.state = ReplicaState.STARTING
        if replica.address:
            self._orchestrator.on_death(replica)
        self._remove_leftovers(replica.worker)
        replica.address = ""
        replica.gauges = {}

    def _remove_leftovers(self, worker: str) -> None:
        """Unlink the shared memory that a killed process could not."""
        remove_leftovers(self._template.run_id, worker)

    def _give_up(self, replica: Replica, reason: str) -> None:
        logger.error("giving up on %s: %s", replica.name, reason)
        replica.state = ReplicaState.FAILED
        replica.failure = reason
        self._load_error = self._load_error or WeightsError(
            f"stage {replica.stage.name!r} does not start: {reason}"
        )
        self._orchestrator.on_failure(replica)
        self._changed.set()

    # --- messages ---------------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            try:
                address, message = await self._hub.receive()
            except TransportError as error:
                logger.error("a malformed message was discarded: %s", error)
                continue
            heard = self._orchestrator.replicas.by_address.get(address)
            if heard is not None:
                heard.heard = time.monotonic()
            self._handle(address, message)
            if isinstance(message, StepReport):
                self._hub.release(message)

    def _handle(self, address: str, message: Message) -> None:
        match message:
            case Hello():
                self._on_hello(address, message)
            case Loading(worker=worker, fraction=fraction, what=what):
                replica = self._by_worker.get(worker)
                if replica is not None:
                    self._progress(replica.name, fraction, what)
            case Ready(worker=worker, info=info, phases=phases):
                self._on_ready(worker, info, phases)
            case LoadFailed():
                self._on_load_failed(message)
            case Heartbeat():
                return  # that it was heard has been noted
            case _:
                self._orchestrator.handle(address, message)

    def _on_hello(self, address: str, hello: Hello) -> None:
        replica = self._by_worker.get(hello.worker) or self._adopt(hello)
        if replica is None or self._is_closing:
            logger.warning("worker %s of stage %r is not needed", hello.worker, hello.stage)
            self._tell(address, Shutdown())
            return
        replica.worker, replica.address, replica.host, replica.pid = (
            hello.worker,
            address,
            hello.host,
            hello.pid,
        )
        replica.state = ReplicaState.LOADING
        replica.heard = time.monotonic()
        self._orchestrator.replicas.by_address[address] = replica
        self._tell(
            address, Configure(pipeline=self._pipeline, stage=replica.stage.name, replica=replica.index)
        )

    def _adopt(self, hello: Hello) -> Replica | None:
        """A worker that joined by itself takes a place of its stage that is free or whose holder is gone."""
        for replica in self._orchestrator.replicas.by_stage.get(hello.stage, []):
            if replica.stage.placement != "remote":
                continue
            if replica.address and not self._tell(replica.address, Heartbeat(worker=replica.worker)):
                self._lose_remote(replica, "has lost its connection")
            if not replica.address:
                self._by_worker[hello.worker] = replica
                return replica
        return None

    def _tell(self, address: str, message: Message) -> bool:
        """Send; False if the worker is not connected: it has died, which is noticed elsewhere."""
        try:
            self._hub.send(address, message)
        except TransportError as error:
            logger.info("%s was not sent: %s", type(message).__name__, error)
            return False
        return True

    def _on_load_failed(self, failed: LoadFailed) -> None:
        replica = self._by_worker.get(failed.worker)
        if replica is None:
            return
        if replica.stage.placement == "remote":  # another host may have what this one lacks
            self._lose_remote(replica, f"cannot load its model: {failed.text}")
            return
        self._load_error = error_from_wire(
            kind=failed.kind, message=failed.text, code="load_failed", param=None
        )
        self._give_up(replica, failed.text)

    def _on_ready(self, worker: str, info: Facts, phases: dict[str, float]) -> None:
        replica = self._by_worker.get(worker)
        if replica is None:
            return
        replica.info = info
        replica.phases = phases
        replica.state = ReplicaState.READY
        self._progress(replica.name, 1.0, "ready")
        self._orchestrator.on_ready(replica)
        self._changed.set()

    async def _watch_remote(self) -> None:
        """Heartbeats for workers on other hosts, whose processes nobody here can watch."""
        while not self._is_closing:
            await asyncio.sleep(self._heartbeat_seconds)  # the beat itself, not a wait for something
            for replica in () if self._is_closing else list(self._by_worker.values()):
                if replica.stage.placement != "remote" or not replica.address:
                    continue
                is_loading = replica.state is ReplicaState.LOADING
                patience = self._silence_seconds * (LOADING_FACTOR if is_loading else 1)
                silence = time.monotonic() - replica.heard
                if silence > patience:
                    self._lose_remote(replica, f"has been silent for {silence:.0f} s")
                elif not self._tell(replica.address, Heartbeat(worker=replica.worker)):
                    # What was under way is lost, even if it should connect again.
                    self._lose_remote(replica, "has lost its connection")

    def _lose_remote(self, replica: Replica, reason: str) -> None:
        """A worker that joined is gone: its place is free for the next one."""
        logger.error("worker %s %s; its place is free", replica.worker, reason)
        self._by_worker.pop(replica.worker, None)
        replica.restarts += 1
        self._lose(replica)
