"""The supervisor: starts workers, hands them their configuration, restarts the one that dies.

Owns the hub's receive loop; what concerns requests goes to the orchestrator.  A worker's death never
reaches the API process: its process alone is restarted, with all stages it served (`colocate`), and with
a bounded number of quick deaths.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from omnistage.errors import OmnistageError, TransportError, WeightsError, error_from_wire
from omnistage.graph import PipelineSpec
from omnistage.graph.dump import to_json
from omnistage.serving.backend_info import Facts
from omnistage.serving.orchestrator import Orchestrator
from omnistage.serving.processes import WorkerProcess, share_processes
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

MAX_QUICK_DEATHS = 5
BACKOFF_SECONDS = 0.1  # before the restart that follows the second quick death, doubled for each one more
SHUTDOWN_SECONDS = 5.0
HEARTBEAT_SECONDS = 2.0
SILENCE_SECONDS = 20.0
LOADING_FACTOR = 30  # a loading worker says little; that its connection breaks is noticed all the same

Progress = Callable[[str, float, str], None]  # replica, fraction, what


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
        self._processes: dict[str, WorkerProcess] = {}  # replica's name -> what serves it
        self._restarts: set[asyncio.Task[None]] = set()
        self._loops: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._load_error: OmnistageError | None = None
        self._is_closing = False

    async def start(self) -> None:
        """Start every local worker; returns once they are asked for, not once they are ready."""
        await self._host.start(self._on_exit)
        self._run(self._receive())
        table = self._orchestrator.replicas
        for process in share_processes(table, with_guests=self._host.shares_processes):
            self._processes.update((replica.name, process) for replica in process.replicas)
            if process.replicas[0].stage.placement == "local":
                self._spawn(process)
        if any(replica.stage.placement == "remote" for replica in table.all()):
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

    def _spawn(self, process: WorkerProcess) -> None:
        process.begin()
        config, *guests = (self._configure(replica, process.num_starts) for replica in process.wanted)
        self._host.spawn(msgspec.structs.replace(config, guests=tuple(guests)), config.name)

    def _configure(self, replica: Replica, num_starts: int) -> WorkerConfig:
        """A worker with a name of its own is about to serve the replica."""
        replica.worker = f"{replica.stage.name}-{replica.index}-{num_starts}"
        replica.state = ReplicaState.STARTING
        self._by_worker[replica.worker] = replica
        return msgspec.structs.replace(
            self._template, name=replica.worker, stage=replica.stage.name, started=time.monotonic()
        )

    def _on_exit(self, name: str, status: int) -> None:
        """A process has ended, for whatever reason.  name: of the first of its workers."""
        self._changed.set()
        first = self._by_worker.get(name)
        if first is None:
            return
        process = self._processes[first.name]
        for replica in process.replicas:
            self._by_worker.pop(replica.worker, None)
        if self._is_closing:
            for replica in process.replicas:
                self._remove_leftovers(replica.worker)
            return
        process.note_death()
        for replica in process.replicas:
            self._lose(replica)
        if not process.wanted:
            return
        if process.num_quick_deaths > MAX_QUICK_DEATHS:
            reason = (
                f"{process.name} died {process.num_quick_deaths} times in a row soon after its start, at "
                f"last with status {status} (negative: a signal); see the log for the reason"
            )
            for replica in process.wanted:
                self._give_up(replica, reason)
            return
        for replica in process.wanted:
            replica.restarts += 1
        num_quick_deaths = process.num_quick_deaths
        delay = 0.0 if num_quick_deaths <= 1 else BACKOFF_SECONDS * 2 ** (num_quick_deaths - 2)
        logger.error("worker %s ended with status %d; restarting it in %.1f s", name, status, delay)
        task = asyncio.create_task(self._respawn(process, delay))
        self._restarts.add(task)
        task.add_done_callback(self._restarts.discard)

    async def _respawn(self, process: WorkerProcess, delay: float) -> None:
        await asyncio.sleep(delay)  # back-off, so that a broken model does not burn the machine
        if process.wanted:
            self._spawn(process)

    def _lose(self, replica: Replica) -> None:
        """Everything the worker held is gone; its requests are replayed."""
        self._processes[replica.name].forget_loaded(replica)
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
        process = self._processes[replica.name]
        if not process.note_loaded(replica):
            return
        for loaded in process.wanted:
            loaded.state = ReplicaState.READY
        for loaded in process.wanted:
            self._progress(loaded.name, 1.0, "ready")
            self._orchestrator.on_ready(loaded)
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
