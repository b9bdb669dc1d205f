"""One frozen struct per hop.  What a message means, never how it travels.

Directions: O orchestrator, W worker.  A request is named by (request_id, attempt); attempt counts
replays after a worker's death, and everything of an older attempt is stale.
An edge is named "producer->consumer"; the edge to the orchestrator for output NAME is "@NAME".
Addresses are opaque strings an Endpoint can send to; ORCHESTRATOR names the orchestrator.
"""

from __future__ import annotations

import msgspec

from omnistage.types import (
    FinishReason,
    Media,
    Payload,
    SamplingParams,
    Scalar,
    Segment,
    StageTiming,
    Usage,
)

ORCHESTRATOR = "@orchestrator"


class RequestKey(msgspec.Struct, frozen=True, array_like=True, order=True):
    request_id: str
    attempt: int = 0


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages; the class name is the tag on the wire."""


# --- start-up -------------------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True):
    """W->O: a worker exists and wants its configuration.  host: equal hosts share memory."""

    worker: str
    stage: str
    address: str
    pid: int
    host: str


class Configure(Message, frozen=True, kw_only=True):
    """O->W: the resolved pipeline (JSON, omnistage.graph) and this worker's place in it."""

    pipeline: bytes
    stage: str
    replica: int


class Loading(Message, frozen=True, kw_only=True):
    """W->O: progress of loading, 0.0 to 1.0."""

    worker: str
    fraction: float
    what: str


class Ready(Message, frozen=True, kw_only=True):
    """W->O: loaded and serving.  info: facts such as kv_blocks, weight_bytes, sample_rate, voices."""

    worker: str
    info: dict[str, Scalar | list[str]]
    phases: dict[str, float] = {}  # seconds per start-up phase


class LoadFailed(Message, frozen=True, kw_only=True):
    """W->O: the model cannot be loaded; restarting would not help.  kind: the error's class name."""

    worker: str
    kind: str
    text: str


class Shutdown(Message, frozen=True, kw_only=True):
    """O->W: finish nothing more, free everything, exit 0."""


class PeerGone(Message, frozen=True, kw_only=True):
    """O->W: a worker died; release what it held of yours and stop sending to it."""

    address: str


class Heartbeat(Message, frozen=True, kw_only=True):
    """W->O and back, for workers on other hosts."""

    worker: str


# --- a request ------------------------------------------------------------------------------


class Submit(Message, frozen=True, kw_only=True):
    """O->W: this stage takes part in a request.

    segments: an llm's prompt.  media: an encoder's items.  text: what a generator is to say when no
    stage feeds it.  consumers: edge -> address for every edge out of this stage on the route.
    producers: edge -> address likewise for edges into it (for credits).
    stage_params: this request's own settings of this stage, by names of SamplingParams' fields.
    forced_token_ids: the journal of an earlier attempt, already delivered.
    credits: edge -> chunks this stage may send before the consumer grants more; absent: unbounded.
    """

    key: RequestKey
    seed: int
    sampling: SamplingParams = SamplingParams()
    stage_params: dict[str, Scalar] = {}
    segments: tuple[Segment, ...] = ()
    media: tuple[Media, ...] = ()
    text: str | None = None
    options: dict[str, Scalar] = {}
    consumers: dict[str, str] = {}
    producers: dict[str, str] = {}
    forced_token_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    credits: dict[str, int] = {}
    arrived: float = 0.0  # time.monotonic() of admission, on the orchestrator's host


class Abort(Message, frozen=True, kw_only=True):
    """O->W: free everything of these attempts.  Idempotent; answered by Aborted in a StepReport."""

    keys: tuple[RequestKey, ...]


class Chunk(Message, frozen=True, kw_only=True):
    """W->W and, inside a StepReport, W->O: one numbered piece of a stream.

    sequence counts from 0 per (key, edge).  is_last: the stream ends with this chunk.
    item: which media item a whole-message encoder output belongs to.
    """

    key: RequestKey
    edge: str
    sequence: int
    payload: Payload
    is_last: bool = False
    item: int = 0
    sent: float = 0.0  # time.monotonic() at the producer


class Chunks(Message, frozen=True, kw_only=True):
    """W->W: what one step has for one consumer, in order; two chunks or more."""

    chunks: tuple[Chunk, ...]


class Credit(Message, frozen=True, kw_only=True):
    """Consumer -> producer: `count` more chunks may be sent on this stream."""

    key: RequestKey
    edge: str
    count: int


class Release(Message, frozen=True, kw_only=True):
    """Consumer -> producer: these shared-memory slots are no longer read."""

    slots: tuple[int, ...]
    holder: str


class Journal(msgspec.Struct, frozen=True):
    """Token ids or codec frames a stage has sampled, in order, to survive its death."""

    key: RequestKey
    token_ids: tuple[int, ...]


class Finished(msgspec.Struct, frozen=True):
    """A stage has done all its work for a request and freed what the request held."""

    key: RequestKey
    timing: StageTiming
    usage: Usage = Usage()
    finish_reason: FinishReason = FinishReason.STOP
    error: tuple[str, str, str, str | None] | None = None  # class name, message, code, param


class StepReport(Message, frozen=True, kw_only=True):
    """W->O: everything one step of a worker has to tell, for all its requests."""

    worker: str
    chunks: tuple[Chunk, ...] = ()
    journal: tuple[Journal, ...] = ()
    finished: tuple[Finished, ...] = ()
    aborted: tuple[RequestKey, ...] = ()
    cached: tuple[str, ...] = ()  # media keys now in this encoder's cache
    evicted: tuple[str, ...] = ()
    gauges: dict[str, float] = {}


AnyMessage = (
    Hello
    | Configure
    | Loading
    | Ready
    | LoadFailed
    | Shutdown
    | PeerGone
    | Heartbeat
    | Submit
    | Abort
    | Chunk
    | Chunks
    | Credit
    | Release
    | StepReport
)
