"""The worker: one stage replica's loop between its endpoint and its stage.

Per turn: take what has arrived, let the stage do one slice, send what it made.  Knows streams,
credits, timings and the device lease; knows nothing of models.  Blocks when there is nothing to do.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Collection, Sequence

from omnistage.errors import OmnistageError, TransportError
from omnistage.stages.lease import DeviceLease
from omnistage.stages.stage import Emitted, Ended, Outbox, Stage
from omnistage.transport import Arrival, Endpoint, StreamTable
from omnistage.transport.messages import (
    ORCHESTRATOR,
    Abort,
    Chunk,
    Chunks,
    Credit,
    Finished,
    Heartbeat,
    Journal,
    Message,
    PeerGone,
    RequestKey,
    Shutdown,
    StepReport,
    Submit,
)
from omnistage.types import FinishReason, HostTensor, Payload, StageTiming

logger = logging.getLogger(__name__)

GAUGE_SECONDS = 0.25


class _Ticket:
    """What the worker keeps for one request at this stage.

    held: what will be one message on an edge that does not stream.  backlog: payloads that wait for
    credits, per edge.  ended: set when the stage is done but the backlog is not empty yet.
    """

    def __init__(self, submit: Submit) -> None:
        self.submit = submit
        self.held: dict[str, list[Emitted]] = {}
        self.backlog: dict[str, deque[Emitted]] = {edge: deque() for edge in submit.consumers}
        self.ended: Ended | None = None
        self.received = time.monotonic()
        self.started = 0.0
        self.first_output = 0.0
        self.computed = 0.0
        self.transferred = 0.0

    @property
    def has_backlog(self) -> bool:
        return any(self.backlog.values())

    def timing(self, stage: str) -> StageTiming:
        return StageTiming(
            stage=stage,
            received=self.received,
            started=self.started,
            first_output=self.first_output,
            finished=time.monotonic(),
            computed=self.computed,
            transferred=self.transferred,
        )


class Worker:
    """Runs one stage until a Shutdown arrives or the orchestrator is gone.

    whole_edges: those out of the stage that carry one message per request instead of a stream.
    patience: seconds without a word from the orchestrator after which it is taken for gone; None where
    the operating system tells (a worker dies with its parent).
    The stage is attached after construction, because building it needs this worker's credits.
    """

    def __init__(
        self,
        *,
        name: str,
        stage_name: str,
        endpoint: Endpoint,
        lease: DeviceLease,
        whole_edges: Collection[str] = (),
        patience: float | None = None,
    ) -> None:
        self._name = name
        self._whole_edges = frozenset(whole_edges)
        self._patience = patience
        self._stage_name = stage_name
        self._endpoint = endpoint
        self._lease = lease
        self._stage: Stage | None = None
        self._tickets: dict[RequestKey, _Ticket] = {}
        self._streams = StreamTable()
        self._outbox = Outbox()
        self._chunks: list[Chunk] = []  # for the orchestrator, with the next report
        self._outgoing: dict[str, list[Chunk]] = {}  # by consumer: sent together, before anything else is
        self._finished: list[Finished] = []
        self._aborted: list[RequestKey] = []
        self._is_stopping = False
        self._gauges_sent = 0.0
        self._idle_since = 0.0  # when receive() last began to block; 0.0 while computing
        self._computed = 0.0  # seconds in steps since the start

    def attach(self, stage: Stage) -> None:
        self._stage = stage

    def credits(self, key: RequestKey) -> int | None:
        """Chunks the request may still send on its most restricted edge; None: unbounded."""
        ticket = self._tickets.get(key)
        if ticket is None:
            return 0
        if ticket.has_backlog:
            return 0
        credits = [self._streams.sender(key, edge).credits for edge in ticket.submit.consumers]
        return min((limit for limit in credits if limit is not None), default=None)

    def run(self) -> None:
        """Loop until Shutdown.

        An exception of the stage escapes: the process is then restarted.  Raises TransportError if the
        orchestrator is silent for longer than `patience`.
        """
        stage = self._required_stage()
        try:
            while not self._is_stopping:
                if stage.deadline() is None:
                    self._lease.release()
                    self._report(idle=True)
                    self._idle_since = time.monotonic()
                    if not self._drain(self._patience):
                        raise TransportError(
                            f"nothing was heard from the orchestrator for {self._patience} s; join again"
                        )
                    self._idle_since = 0.0
                else:
                    self._drain(0)
                self._work(stage)
        finally:
            self._lease.release()
            stage.close()

    def _required_stage(self) -> Stage:
        assert self._stage is not None, "attach a stage before running the worker"
        return self._stage

    def _work(self, stage: Stage) -> None:
        deadline = stage.deadline()
        if deadline is None or self._is_stopping:
            self._report()
            return
        if not self._lease.is_held:
            self._lease.acquire(deadline)
        started = time.monotonic()
        stage.step(self._outbox)
        ended = time.monotonic()
        self._computed += ended - started
        for key in dict.fromkeys(self._outbox.worked):
            ticket = self._tickets.get(key)
            if ticket is not None:
                ticket.started = ticket.started or started
                ticket.computed += ended - started
        self._report()
        following = stage.deadline()
        if following is not None and self._lease.should_yield(following):
            self._lease.release()

    # --- incoming ---------------------------------------------------------------------------

    def _drain(self, timeout: float | None) -> bool:
        """Take in every message that has arrived, after waiting at most `timeout` seconds for the first.

        False if there was none.
        """
        some = False
        while True:
            try:
                message = self._endpoint.receive(timeout)
            except TransportError as error:
                logger.error("%s: a malformed message was discarded: %s", self._name, error)
                continue
            if message is None:
                return some
            self._handle(message)
            some, timeout = True, 0.0

    def _handle(self, message: Message) -> None:
        match message:
            case Chunk():
                self._on_chunk(message)
            case Chunks(chunks=chunks):
                for chunk in chunks:
                    self._on_chunk(chunk)
            case Submit():
                self._on_submit(message)
            case Credit():
                self._on_credit(message)
            case Abort(keys=keys):
                for key in keys:
                    self._required_stage().abort(key)
                    self._forget(key)
                    self._aborted.append(key)
            case PeerGone(address=address):
                self._endpoint.forget(address)
            case Heartbeat():
                self._endpoint.send(ORCHESTRATOR, Heartbeat(worker=self._name))
            case Shutdown():
                self._is_stopping = True
            case _:
                logger.warning("%s: unexpected message %s", self._name, type(message).__name__)

    def _on_submit(self, submit: Submit) -> None:
        if self._streams.is_stale(submit.key):
            return
        self._tickets[submit.key] = _Ticket(submit)
        outbound = {edge: submit.credits.get(edge) for edge in submit.consumers}
        early = self._streams.open(submit.key, inbound=submit.producers, outbound=outbound)
        try:
            self._required_stage().submit(submit)
        except OmnistageError as error:
            self._fail(submit.key, error)
        for chunk in early:
            self._on_chunk(chunk)

    def _on_chunk(self, chunk: Chunk) -> None:
        """Pass a chunk on, keep it if it overtook its Submit, discard it if its request is over."""
        now = time.monotonic()
        try:
            arrival = self._streams.accept(chunk)
            if arrival is Arrival.EARLY:
                return
            ticket = self._tickets.get(chunk.key)
            if arrival is Arrival.IN_ORDER and ticket is not None and ticket.ended is None:
                if not ticket.started:
                    ticket.received = now
                if 0.0 < self._idle_since < chunk.sent < now:
                    ticket.transferred += now - chunk.sent  # otherwise it waited for a step, not for a wire
                self._required_stage().receive(chunk)
                ticket.transferred += time.monotonic() - now
        except OmnistageError as error:
            self._fail(chunk.key, error)
        self._endpoint.release(chunk)

    def _on_credit(self, credit: Credit) -> None:
        ticket = self._tickets.get(credit.key)
        if self._streams.grant(credit) and ticket is not None:
            self._flush(credit.key, ticket)
            self._send_chunks()

    def _fail(self, key: RequestKey, error: OmnistageError) -> None:
        self._required_stage().abort(key)
        self._finish(Ended(key, error=error))

    def _forget(self, key: RequestKey) -> None:
        """The request is over here: later chunks of it are discarded without a word."""
        self._tickets.pop(key, None)
        for chunk in self._streams.end(key):
            self._endpoint.release(chunk)

    # --- outgoing ---------------------------------------------------------------------------

    def _report(self, *, idle: bool = False) -> None:
        """Send what the outbox holds: chunks to their consumers, one message to the orchestrator."""
        outbox, self._outbox = self._outbox, Outbox()
        for emitted in outbox.emitted:
            self._send(emitted)
        self._send_chunks()
        for key, edge in outbox.consumed:
            self._grant(key, edge)
        for ended in outbox.ended:
            self._end(ended)
        gauges = self._gauges(idle=idle)
        report = StepReport(
            worker=self._name,
            chunks=tuple(self._chunks),
            journal=tuple(Journal(key, token_ids) for key, token_ids in outbox.journal),
            finished=tuple(self._finished),
            aborted=tuple(self._aborted),
            cached=tuple(outbox.cached),
            evicted=tuple(outbox.evicted),
            gauges=gauges,
        )
        something = report.chunks or report.journal or report.finished or report.aborted
        if something or report.cached or report.evicted or gauges:
            self._endpoint.send(ORCHESTRATOR, report)
            self._chunks, self._finished, self._aborted = [], [], []

    def _send(self, emitted: Emitted) -> None:
        """Queue a payload on every edge of its request, and send what the credits allow."""
        ticket = self._tickets.get(emitted.key)
        if ticket is None:
            return
        began = time.monotonic()
        ticket.first_output = ticket.first_output or began
        for edge, backlog in ticket.backlog.items():
            if emitted.edges is not None and edge not in emitted.edges:
                continue
            if edge not in self._whole_edges:
                backlog.append(emitted)
                continue
            held = ticket.held.setdefault(edge, [])
            held.append(emitted)
            if emitted.is_last:
                backlog.append(merge(held))
                held.clear()
        self._flush(emitted.key, ticket)
        ticket.transferred += time.monotonic() - began

    def _flush(self, key: RequestKey, ticket: _Ticket) -> None:
        for edge, backlog in ticket.backlog.items():
            sender = self._streams.sender(key, edge)
            while backlog and sender.can_send():
                emitted = backlog.popleft()
                chunk = Chunk(
                    key=key,
                    edge=edge,
                    sequence=sender.next_sequence(is_last=emitted.is_last),
                    payload=emitted.payload,
                    is_last=emitted.is_last,
                    item=emitted.item,
                    sent=time.monotonic(),
                )
                address = ticket.submit.consumers[edge]
                if address == ORCHESTRATOR:
                    self._chunks.append(chunk)
                else:
                    self._outgoing.setdefault(address, []).append(chunk)
        if ticket.ended is not None and not ticket.has_backlog:
            self._finish(ticket.ended)

    def _send_chunks(self) -> None:
        """One message per consumer, however many requests have something for it."""
        outgoing, self._outgoing = self._outgoing, {}
        for address, chunks in outgoing.items():
            self._endpoint.send(address, chunks[0] if len(chunks) == 1 else Chunks(chunks=tuple(chunks)))

    def _end(self, ended: Ended) -> None:
        """Finish now, or once what the request has made is sent; an error does not wait."""
        ticket = self._tickets.get(ended.key)
        if ticket is not None and ticket.has_backlog and ended.error is None:
            ticket.ended = ended
        else:
            self._finish(ended)

    def _grant(self, key: RequestKey, edge: str) -> None:
        ticket = self._tickets.get(key)
        producer = ticket.submit.producers.get(edge) if ticket else None
        if producer is not None and producer != ORCHESTRATOR:
            self._endpoint.send(producer, Credit(key=key, edge=edge, count=1))

    def _finish(self, ended: Ended) -> None:
        ticket = self._tickets.get(ended.key)
        if ticket is None:
            return  # aborted meanwhile, or failed twice: it has been answered
        error = None
        if ended.error is not None:
            error = (type(ended.error).__name__, ended.error.message, ended.error.code, ended.error.param)
        reason = FinishReason.ABORT if error else ended.finish_reason
        timing = ticket.timing(self._stage_name)
        self._finished.append(Finished(ended.key, timing, ended.usage, reason, error))
        self._forget(ended.key)

    def _gauges(self, *, idle: bool) -> dict[str, float]:
        now = time.monotonic()
        if not idle and now - self._gauges_sent < GAUGE_SECONDS:
            return {}
        self._gauges_sent = now
        return {
            **self._required_stage().gauges(),
            "open_requests": len(self._tickets),
            "early_chunks": self._streams.num_early,
            "late_chunks": self._streams.discarded,
            "computed_seconds": self._computed,
            **self._endpoint.stats(),
        }


def merge(parts: Sequence[Emitted]) -> Emitted:
    """Payloads of one stream as one: texts and ids joined, tensors of a name joined by rows."""
    payloads = [part.payload for part in parts]
    names = dict.fromkeys(name for payload in payloads for name in payload.tensors)
    tensors = {
        name: _join([payload.tensors[name] for payload in payloads if name in payload.tensors])
        for name in names
    }
    last = parts[-1]
    payload = Payload(
        type=payloads[0].type,
        text="".join(payload.text for payload in payloads),
        token_ids=tuple(token_id for payload in payloads for token_id in payload.token_ids),
        logprobs=tuple(entry for payload in payloads for entry in payload.logprobs),
        tensors=tensors,
        info=last.payload.info,
    )
    return Emitted(last.key, payload, is_last=last.is_last, item=last.item)


def _join(tensors: Sequence[HostTensor]) -> HostTensor:
    """[rows, ...] tensors of equal width, one below the other."""
    rows = sum(tensor.shape[0] for tensor in tensors)
    data = b"".join(bytes(tensor.data) for tensor in tensors)
    return HostTensor(tensors[0].dtype, (rows, *tensors[0].shape[1:]), data)
