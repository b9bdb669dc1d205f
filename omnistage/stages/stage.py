"""What a worker expects of the stage it runs, and the outbox a stage fills.

A stage knows its model and its requests' inputs; it knows no socket, no address and no process.
The worker (omnistage.stages.worker) turns the outbox into messages.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from omnistage.errors import OmnistageError
from omnistage.graph import EdgeSpec, PipelineSpec, StageSpec
from omnistage.transport.messages import Chunk, RequestKey, Submit
from omnistage.types import FinishReason, HostTensor, Payload, Scalar, StageKind, Usage

# How long a prompt may take to its first token before it is as urgent as sound that is being played: on a
# shared device, streams that play go on while the prompts of others are read.
FIRST_OUTPUT_SECONDS = 1.0


@dataclass(frozen=True)
class StageContext:
    """Everything a stage is given when it is built.

    share, unshare: pin a tensor in memory that many consumers can read (an encoder's cache).
    credits: chunks this request may still send before a consumer must grant more, None: unbounded.
    progress: fraction of loading done, and what is being loaded.
    """

    pipeline: PipelineSpec
    spec: StageSpec
    model_dir: Path
    replica: int = 0
    share: Callable[[HostTensor], HostTensor] = lambda tensor: tensor
    unshare: Callable[[HostTensor], None] = lambda tensor: None
    credits: Callable[[RequestKey], int | None] = lambda key: None
    progress: Callable[[float, str], None] = lambda fraction, what: None

    def edges_in(self) -> tuple[EdgeSpec, ...]:
        return tuple(edge for edge in self.pipeline.edges if edge.consumer == self.spec.name)

    def edges_out(self) -> tuple[EdgeSpec, ...]:
        return self.pipeline.edges_out_of(self.spec.name)

    def edges_to(self, kind: StageKind) -> frozenset[str]:
        """Names of the edges from this stage to stages of a kind."""
        return frozenset(
            edge.name
            for edge in self.pipeline.edges
            if edge.producer == self.spec.name and self.pipeline.stages[edge.consumer].kind is kind
        )


@dataclass(frozen=True)
class Emitted:
    """One payload for the consumers of a request's stage: those on `edges`, or all."""

    key: RequestKey
    payload: Payload
    is_last: bool = False
    item: int = 0
    edges: frozenset[str] | None = None


@dataclass(frozen=True)
class Ended:
    """A stage is done with a request and has freed what it held."""

    key: RequestKey
    usage: Usage = field(default_factory=Usage)
    finish_reason: FinishReason = FinishReason.STOP
    error: OmnistageError | None = None


@dataclass
class Outbox:
    """What one step of a stage produced, in order.  Owned by the worker, which empties it after each step.

    worked: requests that the step computed for.  consumed: input chunks used up, whose producers
    may send one more.  cached, evicted: media keys an encoder now holds or has dropped.
    """

    emitted: list[Emitted] = field(default_factory=list)
    journal: list[tuple[RequestKey, tuple[int, ...]]] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    worked: list[RequestKey] = field(default_factory=list)
    consumed: list[tuple[RequestKey, str]] = field(default_factory=list)
    cached: list[str] = field(default_factory=list)
    evicted: list[str] = field(default_factory=list)

    def emit(
        self,
        key: RequestKey,
        payload: Payload,
        *,
        is_last: bool = False,
        item: int = 0,
        edges: frozenset[str] | None = None,
    ) -> None:
        self.emitted.append(Emitted(key, payload, is_last, item, edges))

    def end(
        self,
        key: RequestKey,
        *,
        usage: Usage | None = None,
        finish_reason: FinishReason = FinishReason.STOP,
        error: OmnistageError | None = None,
    ) -> None:
        self.ended.append(Ended(key, usage or Usage(), finish_reason, error))


class Stage(Protocol):
    """One replica's work.  Single-threaded; every call returns soon.

    An error that is one request's own goes to outbox.end(key, error=...); an exception that
    escapes `step` means the stage is broken: its process ends and is restarted.
    """

    def submit(self, message: Submit) -> None:
        """A request arrives.  Raises OmnistageError if this stage cannot serve it."""

    def receive(self, chunk: Chunk) -> None:
        """One input chunk of a submitted request, in order.  Raises OmnistageError likewise."""

    def abort(self, key: RequestKey) -> None:
        """Free all that the request holds.  Idempotent; an unknown key is fine."""

    def deadline(self) -> float | None:
        """When the most urgent work should be done, time.monotonic() seconds; None: nothing to do."""

    def step(self, outbox: Outbox) -> None:
        """One slice of work, at most about 20 ms where the model allows."""

    def info(self) -> dict[str, Scalar | list[str]]:
        """Facts for the ready handshake."""

    def gauges(self) -> dict[str, float]:
        """Numbers for metrics."""

    def close(self) -> None: ...
