"""The bookkeeping of numbered streams: order, credits, and what arrives too early or too late.

Pure logic for one worker: no sockets, no tensors.  A stream is named (RequestKey, edge).  Requests
open and end as a whole; only the newest attempt of a request is open.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from enum import Enum

from omnistage.errors import StreamError
from omnistage.transport.messages import Chunk, Credit, RequestKey

MAX_TOMBSTONES = 4096  # ended requests remembered
MAX_EARLY_CHUNKS = 1024  # chunks kept for requests whose Submit is still on its way


class StreamReceiver:
    """Checks one inbound stream: 0, 1, 2, ... up to the chunk that is the last."""

    def __init__(self, edge: str) -> None:
        self.edge = edge
        self.num_received = 0
        self.is_finished = False

    def accept(self, chunk: Chunk) -> None:
        """Raises StreamError on a gap, a repeat, a chunk after the last, or of another edge."""
        where = f"stream {self.edge} of request {chunk.key.request_id} (attempt {chunk.key.attempt})"
        if chunk.edge != self.edge:
            raise StreamError(f"{where} got a chunk of {chunk.edge}")
        if self.is_finished:
            raise StreamError(f"{where} got chunk {chunk.sequence} after its last, {self.num_received - 1}")
        if chunk.sequence != self.num_received:
            fault = "repeats" if chunk.sequence < self.num_received else "skips to"
            raise StreamError(f"{where} {fault} chunk {chunk.sequence}; {self.num_received} was next")
        self.num_received += 1
        self.is_finished = chunk.is_last


class StreamSender:
    """Numbers one outbound stream.  credits: chunks that may be sent, None for no bound."""

    def __init__(self, credits: int | None = None) -> None:
        self._credits = credits
        self._next = 0
        self.is_finished = False

    @property
    def credits(self) -> int | None:
        return self._credits

    @property
    def num_sent(self) -> int:
        return self._next

    def can_send(self) -> bool:
        return not self.is_finished and self._credits != 0

    def next_sequence(self, *, is_last: bool = False) -> int:
        """The number of the chunk about to be sent.  Raises StreamError if none may be."""
        if not self.can_send():
            reason = "its last" if self.is_finished else "its credits were used up"
            raise StreamError(f"a stream was to send chunk {self._next} after {reason}; ask can_send() first")
        if self._credits is not None:
            self._credits -= 1
        self._next += 1
        self.is_finished = is_last
        return self._next - 1

    def grant(self, count: int) -> None:
        if self._credits is not None:
            self._credits += count


class Arrival(Enum):
    """What to do with a chunk: use it, nothing yet (open() will return it), or release and drop it."""

    IN_ORDER = "in order"
    EARLY = "early"
    LATE = "late"


class StreamTable:
    """All streams of one worker.  discarded: late chunks and credits, dropped without an error."""

    def __init__(
        self, *, max_tombstones: int = MAX_TOMBSTONES, max_early_chunks: int = MAX_EARLY_CHUNKS
    ) -> None:
        self._max_tombstones = max_tombstones
        self._max_early_chunks = max_early_chunks
        self._open: dict[str, RequestKey] = {}  # request id -> its open attempt
        self._receivers: dict[tuple[RequestKey, str], StreamReceiver] = {}
        self._senders: dict[tuple[RequestKey, str], StreamSender] = {}
        self._ended: OrderedDict[str, int] = OrderedDict()  # request id -> newest ended attempt
        self._early: dict[RequestKey, list[Chunk]] = {}
        self.num_early = 0
        self.discarded = 0

    def __len__(self) -> int:
        """Open requests."""
        return len(self._open)

    def is_open(self, key: RequestKey) -> bool:
        return self._open.get(key.request_id) == key

    def is_stale(self, key: RequestKey) -> bool:
        """Whether this attempt has ended or was replaced by a newer one."""
        current = self._open.get(key.request_id)
        ended = self._ended.get(key.request_id, -1)
        return key.attempt <= ended or (current is not None and key.attempt < current.attempt)

    def open(
        self,
        key: RequestKey,
        *,
        inbound: Iterable[str] = (),
        outbound: Mapping[str, int | None] | None = None,
    ) -> list[Chunk]:
        """Begin an attempt.  outbound: edge -> credits, None for no bound.

        Returns the chunks that arrived early, to be passed to accept() now, in order.  An older open
        attempt must be ended first.  Raises StreamError if this attempt is stale or open already.
        """
        current = self._open.get(key.request_id)
        if current is not None or self.is_stale(key):
            state = "stale" if self.is_stale(key) else f"open as attempt {current.attempt if current else 0}"
            raise StreamError(f"request {key.request_id} (attempt {key.attempt}) cannot begin: it is {state}")
        self._open[key.request_id] = key
        for edge in inbound:
            self._receivers[key, edge] = StreamReceiver(edge)
        for edge, count in (outbound or {}).items():
            self._senders[key, edge] = StreamSender(count)
        return self._take_early(key)

    def accept(self, chunk: Chunk) -> Arrival:
        """Check a chunk that arrived.

        Raises StreamError on a gap, a repeat, a chunk after the last, an edge that the request does
        not have, or too many early chunks.
        """
        if self.is_stale(chunk.key):
            self.discarded += 1
            return Arrival.LATE
        if not self.is_open(chunk.key):
            self._keep_early(chunk)
            return Arrival.EARLY
        receiver = self._receivers.get((chunk.key, chunk.edge))
        if receiver is None:
            raise StreamError(f"request {chunk.key.request_id} has no inbound edge {chunk.edge!r} here")
        receiver.accept(chunk)
        return Arrival.IN_ORDER

    def grant(self, credit: Credit) -> bool:
        """Apply a credit; False (and counted) if its stream is over or unknown."""
        sender = self._senders.get((credit.key, credit.edge))
        if sender is None:
            self.discarded += 1
            return False
        sender.grant(credit.count)
        return True

    def receiver(self, key: RequestKey, edge: str) -> StreamReceiver:
        """Raises KeyError if it is not open."""
        return self._receivers[key, edge]

    def sender(self, key: RequestKey, edge: str) -> StreamSender:
        """Raises KeyError if it is not open."""
        return self._senders[key, edge]

    def end(self, key: RequestKey) -> list[Chunk]:
        """Finish or abort an attempt, and all older ones.  Idempotent, also for one never opened.

        Returns chunks that arrived early and will not be used: release them.
        """
        for table in (self._receivers, self._senders):
            for name in [name for name in table if self._is_covered(name[0], key)]:
                del table[name]
        current = self._open.get(key.request_id)
        if current is not None and current.attempt <= key.attempt:
            del self._open[key.request_id]
        self._ended[key.request_id] = max(key.attempt, self._ended.get(key.request_id, -1))
        self._ended.move_to_end(key.request_id)
        while len(self._ended) > self._max_tombstones:
            self._ended.popitem(last=False)
        early = [name for name in self._early if self._is_covered(name, key)]
        return [chunk for name in early for chunk in self._take_early(name)]

    @staticmethod
    def _is_covered(name: RequestKey, ended: RequestKey) -> bool:
        return name.request_id == ended.request_id and name.attempt <= ended.attempt

    def _keep_early(self, chunk: Chunk) -> None:
        if self.num_early >= self._max_early_chunks:
            raise StreamError(
                f"chunk {chunk.sequence} of {chunk.edge} is for the unknown request {chunk.key.request_id}, "
                f"and {self.num_early} such chunks wait already, the limit"
            )
        self._early.setdefault(chunk.key, []).append(chunk)
        self.num_early += 1

    def _take_early(self, key: RequestKey) -> list[Chunk]:
        chunks = self._early.pop(key, [])
        self.num_early -= len(chunks)
        return chunks
