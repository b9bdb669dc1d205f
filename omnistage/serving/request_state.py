"""One request inside the orchestrator: its route, its journal, and the events its client reads.

Pure bookkeeping: sends nothing and knows no socket.  What was delivered never changes; on a replay
the same output is produced again from the start and the part already delivered is skipped here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from omnistage.errors import OmnistageError, StreamError
from omnistage.graph import Route
from omnistage.serving.requests import AudioDelta, Done, Event, GenerateRequest, TextDelta
from omnistage.transport import StreamReceiver
from omnistage.transport.messages import Chunk, Finished, RequestKey
from omnistage.types import FinishReason, PortType, StageTiming, Usage

if TYPE_CHECKING:
    from omnistage.serving.replicas import Replica


class _Delivered:
    """How much of one output the client has, and how much of it this attempt has made again."""

    def __init__(self, edge: str) -> None:
        self.edge = edge
        self.receiver = StreamReceiver(edge)
        self.delivered = 0  # characters or samples, over all attempts
        self.delivered_tokens = 0
        self.made = 0  # of this attempt
        self.made_tokens = 0
        self.is_complete = False

    def restart(self) -> None:
        self.receiver = StreamReceiver(self.edge)
        self.made = self.made_tokens = 0
        self.is_complete = False

    def fresh(self, length: int) -> int:
        """Count `length` units made; returns how many of them, from the left, are already delivered."""
        skip = min(length, max(0, self.delivered - self.made))
        self.made += length
        self.delivered = max(self.delivered, self.made)
        return skip

    def fresh_tokens(self, count: int) -> int:
        skip = min(count, max(0, self.delivered_tokens - self.made_tokens))
        self.made_tokens += count
        self.delivered_tokens = max(self.delivered_tokens, self.made_tokens)
        return skip


class ActiveRequest:
    """A request from its admission to its last event.

    uid: names it on the wire; never used twice, whatever ids clients choose.
    llms: the llm stages of the route; the first of them reads the prompt.
    assigned: the replica of each stage in this attempt.  unfinished: stages still at work.
    journal: per llm stage, the token ids (of a talker: codes) sampled so far, over all attempts.
    """

    def __init__(
        self,
        request: GenerateRequest,
        *,
        uid: str,
        route: Route,
        outputs: dict[str, str],
        llms: tuple[str, ...] = (),
    ) -> None:
        self.request = request
        self.uid = uid
        self.route = route
        self.llms = llms
        self.outputs = outputs  # output edge ("@audio") -> stage
        self.attempt = 0
        self.arrived = time.monotonic()
        self.assigned: dict[str, Replica] = {}
        self.unfinished: set[str] = set()
        self.journal: dict[str, list[int]] = {}
        self.finish_reasons: dict[str, FinishReason] = {}  # of llm stages that are done
        self.usage: dict[str, Usage] = {}
        self.timings: dict[str, StageTiming] = {}
        self.is_over = False
        self._delivered = {edge: _Delivered(edge) for edge in outputs}
        # Bounded by max_tokens for text and by credits for sound, so it needs no limit of its own.
        self._events: asyncio.Queue[tuple[Event, str] | OmnistageError] = asyncio.Queue()

    @property
    def key(self) -> RequestKey:
        return RequestKey(self.uid, self.attempt)

    def begin_attempt(self, assigned: dict[str, Replica]) -> None:
        self.assigned = assigned
        self.unfinished = set(assigned)

    def retire_attempt(self) -> None:
        """The attempt is lost with a worker; outputs start over and skip what was delivered."""
        self.attempt += 1
        self.assigned = {}
        self.unfinished = set()
        for delivered in self._delivered.values():
            delivered.restart()

    def deliver(self, chunk: Chunk) -> bool:
        """Queue the undelivered part of an output chunk.  False if nothing of it was new.

        Raises StreamError if the chunk is out of order.
        """
        delivered = self._delivered.get(chunk.edge)
        if delivered is None:
            raise StreamError(f"request {self.request.request_id} has no output {chunk.edge!r}")
        delivered.receiver.accept(chunk)
        delivered.is_complete = delivered.is_complete or chunk.is_last
        event = self._text(chunk, delivered) if chunk.payload.type is not PortType.PCM else None
        if chunk.payload.type is PortType.PCM:
            event = self._audio(chunk, delivered)
        if event is None:
            return False
        self._events.put_nowait((event, chunk.edge))
        return True

    def _text(self, chunk: Chunk, delivered: _Delivered) -> Event | None:
        payload = chunk.payload
        skip = delivered.fresh(len(payload.text))
        skip_tokens = delivered.fresh_tokens(len(payload.token_ids))
        text, token_ids = payload.text[skip:], payload.token_ids[skip_tokens:]
        if not text and not token_ids:
            return None
        return TextDelta(text, token_ids, payload.logprobs[-len(token_ids) :] if token_ids else ())

    def _audio(self, chunk: Chunk, delivered: _Delivered) -> Event | None:
        tensor = chunk.payload.tensors.get("pcm")
        if tensor is None:
            return None
        samples = tensor.numpy()
        skip = delivered.fresh(len(samples))
        if skip == len(samples):
            return None
        # Copied: the slot goes back to the vocoder as soon as the message is released.
        return AudioDelta(samples[skip:].copy(), int(chunk.payload.info["sample_rate"]))

    def finish_stage(self, stage: str, finished: Finished) -> None:
        self.unfinished.discard(stage)
        self.timings[stage] = finished.timing
        self.usage.setdefault(stage, finished.usage)
        if stage in self.llms:
            self.finish_reasons.setdefault(stage, finished.finish_reason)

    @property
    def is_complete(self) -> bool:
        return not self.unfinished and all(output.is_complete for output in self._delivered.values())

    def complete(self) -> None:
        """Queue the last event: every stage has finished and every output has ended."""
        others = self.llms[1:]
        timings = tuple(self.timings[stage] for stage in self.route.stages if stage in self.timings)
        done = Done(
            finish_reason=self.finish_reasons[self.llms[0]] if self.llms else FinishReason.STOP,
            usage=self._usage(self.llms[:1] or self.route.stages),
            timings=timings,
            arrived=self.arrived,
            replays=self.attempt,
            audio_tokens=self._usage(others).completion_tokens,
            truncated=tuple(stage for stage in others if self.finish_reasons[stage] is FinishReason.LENGTH),
        )
        self.is_over = True
        self._events.put_nowait((done, ""))

    def _usage(self, stages: tuple[str, ...]) -> Usage:
        """The sum over these stages, all of which have finished."""
        usages = [self.usage[stage] for stage in stages]
        return Usage(
            prompt_tokens=sum(usage.prompt_tokens for usage in usages),
            completion_tokens=sum(usage.completion_tokens for usage in usages),
            cached_tokens=sum(usage.cached_tokens for usage in usages),
        )

    def fail(self, error: OmnistageError) -> None:
        self.is_over = True
        self._events.put_nowait(error)

    async def next_event(self) -> tuple[Event, str]:
        """The next event and the output edge it came over.  Raises the request's error."""
        item = await self._events.get()
        if isinstance(item, OmnistageError):
            raise item
        return item


class OrchestratedStream:
    """omnistage.serving.requests.RequestStream over an ActiveRequest.

    on_read: called when the client has taken an event (its producer may send one more).
    on_close: called once when the client stops listening; aborts if the request still runs.
    """

    def __init__(
        self,
        active: ActiveRequest,
        *,
        on_read: Callable[[ActiveRequest, str], None],
        on_close: Callable[[ActiveRequest], None],
    ) -> None:
        self._active = active
        self._on_read = on_read
        self._on_close = on_close
        self._is_closed = False
        self.request_id = active.request.request_id

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            event, edge = await self._active.next_event()
            if isinstance(event, AudioDelta):
                self._on_read(self._active, edge)
            yield event
            if isinstance(event, Done):
                return

    async def aclose(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._on_close(self._active)
