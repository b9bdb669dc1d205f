"""The orchestrator: admits requests, routes them, journals and delivers what comes back, replays.

Runs in the API process's event loop and imports no torch.  It knows replicas by address only;
starting and restarting their processes is the supervisor's work (omnistage.serving.supervisor).

A request holds its whole route or nothing.  Every request ends with one Done or one error.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping

from omnistage.errors import (
    Draining,
    OmnistageError,
    Overloaded,
    ReplayExhausted,
    RequestFailed,
    TransportError,
    error_from_wire,
)
from omnistage.graph import PipelineSpec, plan_route
from omnistage.serving.backend_info import check_sampling, describe
from omnistage.serving.dispatch import build_submits, llm_stages, output_edges
from omnistage.serving.replicas import Replica, ReplicaState, ReplicaTable
from omnistage.serving.request_state import ActiveRequest, OrchestratedStream
from omnistage.serving.requests import BackendInfo, GenerateRequest
from omnistage.transport import Hub
from omnistage.transport.messages import (
    Abort,
    Chunk,
    Credit,
    Finished,
    Message,
    PeerGone,
    RequestKey,
    StepReport,
)

logger = logging.getLogger(__name__)


class Orchestrator:
    """The Backend (omnistage.serving.requests) over a hub and a table of replicas.

    Raises PipelineError for sampling defaults that no stage could use.
    """

    def __init__(self, spec: PipelineSpec, hub: Hub, model_dir: str) -> None:
        check_sampling(spec)
        self.spec = spec
        self.replicas = ReplicaTable(spec.stages.values())
        self._hub = hub
        self._model_dir = model_dir
        self._info: BackendInfo | None = None
        self._active: dict[str, ActiveRequest] = {}  # by uid
        self._waiting: deque[ActiveRequest] = deque()
        self._is_draining = False
        self._has_loaded = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._seconds_per_request = 1.0  # moving average, for Retry-After
        self.num_replays = 0
        self._num_submitted = 0

    # --- Backend ----------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken: all stages have loaded, and none is down for good.

        While a worker restarts, requests that need it wait.
        """
        is_down = any(self.replicas.failure_of(stage) for stage in self.spec.stages)
        return self._has_loaded and not is_down and not self._is_draining

    @property
    def info(self) -> BackendInfo:
        if self._info is None:
            self._info = describe(self.spec, self.replicas, self._model_dir)
        return self._info

    def submit(self, request: GenerateRequest) -> OrchestratedStream:
        """See Backend.submit."""
        if self._is_draining:
            raise Draining("the server is stopping; send the request to another one")
        if len(self._waiting) >= self.spec.max_queue:
            self._overloaded()
        route = plan_route(self.spec, inputs=set(request.media), outputs=request.outputs, entry=request.entry)
        for stage in route.stages:
            failure = self.replicas.failure_of(stage)
            if failure:
                raise RequestFailed(f"stage {stage!r} is down: {failure}")
        self._num_submitted += 1
        active = ActiveRequest(
            request,
            uid=f"{request.request_id}.{self._num_submitted}",
            route=route,
            outputs=output_edges(self.spec, request.outputs),
            llms=llm_stages(self.spec, route.stages),
        )
        self._active[active.uid] = active
        self._idle.clear()
        self._waiting.append(active)
        self._admit()
        return OrchestratedStream(active, on_read=self._on_read, on_close=self._on_close)

    def gauges(self) -> Mapping[str, Mapping[str, float]]:
        """Per stage: sums over its replicas of what they last reported; and the orchestrator's own counts."""
        table: dict[str, dict[str, float]] = {}
        for stage, replicas in self.replicas.by_stage.items():
            sums: dict[str, float] = {}
            for replica in replicas:
                for name, value in replica.gauges.items():
                    sums[name] = sums.get(name, 0.0) + value
            sums["ready_replicas"] = sum(replica.state is ReplicaState.READY for replica in replicas)
            sums["restarts"] = sum(replica.restarts for replica in replicas)
            sums["assigned_requests"] = sum(len(replica.held) for replica in replicas)
            table[stage] = sums
        table["orchestrator"] = {
            "active_requests": len(self._active),
            "waiting_requests": len(self._waiting),
            "replays": self.num_replays,
        }
        return table

    async def drain(self, timeout: float) -> None:
        """Refuse new requests and wait, at most `timeout` seconds, for those under way; then abort them."""
        self._is_draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            for active in list(self._active.values()):
                self._fail(active, Draining("the server stopped before the answer was complete"))

    def _overloaded(self) -> None:
        retry_after = max(1.0, self._seconds_per_request * (len(self._waiting) + 1))
        raise Overloaded(
            f"{len(self._waiting)} requests are waiting, the limit (max_queue) is {self.spec.max_queue}; "
            f"try again in {retry_after:.0f} s or add replicas",
            retry_after=min(retry_after, 60.0),
        )

    # --- admission and dispatch -------------------------------------------------------------

    def _admit(self) -> None:
        """Start every waiting request whose whole route has room, oldest first."""
        if not self._waiting:
            return
        still_waiting: deque[ActiveRequest] = deque()
        full: set[str] = set()  # stages an older request is waiting for
        for active in self._waiting:
            if active.is_over:
                continue
            if full.intersection(active.route.stages) or not self._dispatch(active, full):
                still_waiting.append(active)
        self._waiting = still_waiting

    def _dispatch(self, active: ActiveRequest, full: set[str]) -> bool:
        assigned: dict[str, Replica] = {}
        for stage in active.route.stages:
            media = active.request.media.get(stage, ())
            replica = self.replicas.choose(stage, [item.key for item in media])
            if replica is None:
                full.add(stage)
                return False
            assigned[stage] = replica
        active.begin_attempt(assigned)
        for stage, submit in build_submits(self.spec, active):
            replica = assigned[stage]
            replica.held.add(active.key)
            self.replicas.assign_media(replica, [item.key for item in submit.media])
            self._tell(replica, submit)
        return True

    # --- what workers say -------------------------------------------------------------------

    def handle(self, address: str, message: Message) -> None:
        """Take in a message of a running worker; start-up messages are the supervisor's."""
        replica = self.replicas.by_address.get(address)
        if replica is None:
            return  # a dead worker's last words: its requests are being replayed
        if isinstance(message, StepReport):
            self._on_report(replica, message)

    def _on_report(self, replica: Replica, report: StepReport) -> None:
        if report.gauges:
            replica.gauges = report.gauges
        for entry in report.journal:  # before anything of it is delivered
            active = self._current(entry.key)
            if active is not None:
                active.journal.setdefault(replica.stage.name, []).extend(entry.token_ids)
        for chunk in report.chunks:
            self._on_output(replica, chunk)
        self.replicas.assign_media(replica, report.cached)
        self.replicas.forget_media(replica, report.evicted)
        for finished in report.finished:
            replica.held.discard(finished.key)
            self._on_finished(replica, finished)
        replica.held.difference_update(report.aborted)
        if report.finished or report.aborted:
            self._admit()

    def _current(self, key: RequestKey) -> ActiveRequest | None:
        """The request, if it still runs and this is not an older attempt of it."""
        active = self._active.get(key.request_id)
        return active if active is not None and active.key == key and not active.is_over else None

    def _on_output(self, replica: Replica, chunk: Chunk) -> None:
        active = self._current(chunk.key)
        if active is None:
            return
        try:
            is_new = active.deliver(chunk)
        except OmnistageError as error:
            self._fail(active, error)
            return
        if not is_new:
            self._grant(active, chunk.edge)

    def _on_finished(self, replica: Replica, finished: Finished) -> None:
        active = self._current(finished.key)
        if active is None:
            return
        active.finish_stage(replica.stage.name, finished)
        if finished.error is not None:
            kind, message, code, param = finished.error
            self._fail(active, error_from_wire(kind=kind, message=message, code=code, param=param))
        elif active.is_complete:
            active.complete()
            self._remove(active)

    def _tell(self, replica: Replica, message: Message) -> None:
        """Send; to a worker that has just died it is pointless, and its death is about to be noticed."""
        try:
            self._hub.send(replica.address, message)
        except TransportError as error:
            logger.info("%s did not get %s: %s", replica.name, type(message).__name__, error)

    # --- endings ----------------------------------------------------------------------------

    def _fail(self, active: ActiveRequest, error: OmnistageError) -> None:
        self._abort_attempt(active)
        active.fail(error)
        self._remove(active)

    def _remove(self, active: ActiveRequest) -> None:
        if self._active.pop(active.uid, None) is not None:
            seconds = time.monotonic() - active.arrived
            self._seconds_per_request += 0.1 * (seconds - self._seconds_per_request)
        if not self._active:
            self._idle.set()

    def _abort_attempt(self, active: ActiveRequest) -> None:
        """Tell every replica that holds this attempt; their room is free again once they answer."""
        for replica in active.assigned.values():
            if active.key in replica.held:
                self._tell(replica, Abort(keys=(active.key,)))

    def _on_read(self, active: ActiveRequest, edge: str) -> None:
        if not active.is_over:
            self._grant(active, edge)

    def _grant(self, active: ActiveRequest, edge: str) -> None:
        replica = active.assigned.get(active.outputs[edge])
        if replica is not None and active.key in replica.held:
            self._tell(replica, Credit(key=active.key, edge=edge, count=1))

    def _on_close(self, active: ActiveRequest) -> None:
        """The client has gone or has read all."""
        if not active.is_over:
            active.is_over = True
            self._abort_attempt(active)
            self._remove(active)
            self._admit()

    # --- deaths and returns -----------------------------------------------------------------

    def on_ready(self, replica: Replica) -> None:
        self._info = None
        self._has_loaded = self._has_loaded or self.replicas.is_ready
        self._admit()

    def on_death(self, replica: Replica) -> None:
        """A worker's process is gone: release what it held elsewhere and replay its requests."""
        address = replica.address
        self.replicas.by_address.pop(address, None)
        self.replicas.forget_media(replica)
        replica.held.clear()
        self._hub.forget(address)
        for other in self.replicas.by_address.values():
            self._tell(other, PeerGone(address=address))
        for active in list(self._active.values()):
            if active.assigned.get(replica.stage.name) is replica and self._is_hit(
                active, replica.stage.name
            ):
                self._replay(active, replica)
        # Not at once: workers that died together are all reported before a request is placed again.
        asyncio.get_running_loop().call_soon(self._admit)

    def on_failure(self, replica: Replica) -> None:
        """The supervisor has given a replica up."""
        for active in list(self._active.values()):
            for stage in active.route.stages:
                failure = self.replicas.failure_of(stage)
                if failure and not active.is_over:
                    self._fail(active, RequestFailed(f"stage {stage!r} is down: {failure}"))
        self._admit()

    def _is_hit(self, active: ActiveRequest, stage: str) -> bool:
        """Whether losing this stage loses anything: it was at work, or what it sent may not have arrived."""
        consumers = [edge.consumer for edge in active.route.edges if edge.producer == stage]
        return any(name in active.unfinished for name in (stage, *consumers))

    def _replay(self, active: ActiveRequest, replica: Replica) -> None:
        self._abort_attempt(active)
        if active.attempt >= self.spec.replay_budget:
            error = ReplayExhausted(
                f"stage {replica.stage.name!r} died while it served this request, which makes "
                f"{active.attempt + 1} deaths; it survives {self.spec.replay_budget} (replay_budget); "
                "if that goes on, its input may be what ends the stage"
            )
            active.fail(error)
            self._remove(active)
            return
        self.num_replays += 1
        active.retire_attempt()
        # First in line: its client has been waiting longest.
        self._waiting.appendleft(active)
