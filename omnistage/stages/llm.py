"""The llm stage: an engine, the prompts it is fed and the text that comes out.

Joins the prompt's pieces as encoders deliver them, turns sampled ids into text and stop strings
into endings.  Knows no scheduling: that is the engine's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from tokenizers import Tokenizer

from omnistage.engine.detokenizer import IncrementalDetokenizer
from omnistage.engine.engine import EmbeddingRows, Engine, EngineOutput, EngineRequest, TokenRows
from omnistage.errors import InvalidRequest, StreamError
from omnistage.ops.tensors import to_torch
from omnistage.stages.stage import Outbox, StageContext
from omnistage.transport.messages import Chunk, RequestKey, Submit
from omnistage.types import FinishReason, MediaSegment, Payload, PortType, Scalar, TokenSegment, Usage

INTER_TOKEN_SECONDS = 0.1  # a reader is content with this; speech in hand below it goes first
PREFIX_SECONDS = 0.5  # the part of a prompt before pending media is not urgent: the encoder goes first
Rows = TokenRows | EmbeddingRows


class _Answer:
    """One request's prompt on its way in and text on its way out."""

    def __init__(self, message: Submit, detokenizer: IncrementalDetokenizer) -> None:
        self.message = message
        self.detokenizer = detokenizer
        # The prompt's pieces; None where an encoder has not delivered yet.
        self.pieces: list[Rows | None] = [
            TokenRows(segment.token_ids) if isinstance(segment, TokenSegment) else None
            for segment in message.segments
        ]
        self.num_fed = 0  # pieces the engine has
        self.usage = Usage()
        self.deadline = time.monotonic()

    @property
    def is_prompt_complete(self) -> bool:
        return None not in self.pieces

    def take_ready(self) -> tuple[Rows, ...]:
        """The pieces behind those already fed, up to the first that is still pending."""
        ready: list[Rows] = []
        for piece in self.pieces[self.num_fed :]:
            if piece is None:
                break
            ready.append(piece)
        self.num_fed += len(ready)
        return tuple(row for row in ready if not (isinstance(row, TokenRows) and not row.token_ids))


class LlmStage:
    """See omnistage.stages.stage.Stage."""

    def __init__(
        self, context: StageContext, engine: Engine, tokenizer: Tokenizer, eos: tuple[int, ...]
    ) -> None:
        self._context = context
        self._engine = engine
        self._tokenizer = tokenizer
        self._eos_token_ids = eos
        self._open: dict[RequestKey, _Answer] = {}
        self._by_id: dict[str, RequestKey] = {}
        self._replayed: list[RequestKey] = []  # submitted with a journal that is still to be emitted

    def submit(self, message: Submit) -> None:
        if not message.segments:
            raise InvalidRequest("the prompt is empty; send at least one token")
        detokenizer = IncrementalDetokenizer(self._tokenizer, message.sampling.stop)
        answer = _Answer(message, detokenizer)
        if not message.options.get("forced_finish"):
            self._engine.add_request(self._engine_request(answer))
        self._open[message.key] = answer
        self._by_id[_engine_id(message.key)] = message.key
        if message.forced_token_ids or message.options.get("forced_finish"):
            self._replayed.append(message.key)

    def receive(self, chunk: Chunk) -> None:
        answer = self._open[chunk.key]
        if answer.message.options.get("forced_finish"):
            return
        producer = chunk.edge.split("->", 1)[0]
        wanted = [
            index
            for index, segment in enumerate(answer.message.segments)
            if isinstance(segment, MediaSegment) and segment.stage == producer and segment.item == chunk.item
        ]
        if not wanted:
            raise StreamError(
                f"edge {chunk.edge!r} brought item {chunk.item}, which the prompt does not name"
            )
        for index in wanted:
            answer.pieces[index] = self._rows(chunk.payload)
        self._engine.extend_prompt(
            _engine_id(chunk.key), answer.take_ready(), is_complete=answer.is_prompt_complete
        )

    def abort(self, key: RequestKey) -> None:
        if self._open.pop(key, None) is not None:
            del self._by_id[_engine_id(key)]
            self._engine.abort(_engine_id(key))
        if key in self._replayed:
            self._replayed.remove(key)

    def deadline(self) -> float | None:
        if not self._engine.has_work and not self._replayed:
            return None
        return min(
            (answer.deadline for answer in self._open.values() if answer.is_prompt_complete),
            default=time.monotonic() + PREFIX_SECONDS,
        )

    def step(self, outbox: Outbox) -> None:
        if self._replayed:
            self._emit_journal(self._replayed.pop(0), outbox)
            return
        outputs = self._engine.step()
        outbox.worked.extend(key for name in self._engine.last_scheduled if (key := self._by_id.get(name)))
        for output in outputs:
            self._emit(output, outbox)

    def info(self) -> dict[str, Scalar | list[str]]:
        stats = self._engine.stats()
        return {
            "kv_blocks": stats.blocks_total,
            "max_model_len": self._engine.config.max_model_len,
            "weight_bytes": self._engine.weight_bytes,
        }

    def gauges(self) -> dict[str, float]:
        stats = self._engine.stats()
        return {
            "requests": len(self._open),
            "running": stats.num_running,
            "queued": stats.num_waiting,
            "kv_blocks_total": stats.blocks_total,
            "kv_blocks_used": stats.blocks_used,
            "kv_blocks_cached": stats.blocks_cached,
            "prefix_hit_tokens": stats.prefix_hit_tokens,
            "preemptions": stats.preemptions,
            "steps": stats.steps,
            "tokens": stats.tokens,
        }

    def close(self) -> None:
        for key in list(self._open):
            self.abort(key)

    def _engine_request(self, answer: _Answer) -> EngineRequest:
        message = answer.message
        return EngineRequest(
            request_id=_engine_id(message.key),
            rows=answer.take_ready(),
            sampling=message.sampling,
            prompt_is_complete=answer.is_prompt_complete,
            forced_token_ids=message.forced_token_ids,
            cache_salt=message.cache_salt,
            seed_stage=self._context.spec.name,
            eos_token_ids=self._eos_token_ids,
        )

    def _rows(self, payload: Payload) -> Rows:
        if payload.type is PortType.TEXT:
            return TokenRows(
                tuple(self._tokenizer.encode(payload.text.strip(), add_special_tokens=False).ids)
            )
        embeddings = payload.tensors.get("embeddings")
        if embeddings is None:
            raise StreamError(f"an llm stage takes text or embeddings, not {payload.type.value}")
        digest = payload.info.get("digest")
        # Copied, so that rows can be recomputed after a preemption whatever becomes of the encoder.
        rows = to_torch(embeddings).clone()
        return EmbeddingRows(rows, digest=str(digest) if digest else None)

    def _emit_journal(self, key: RequestKey, outbox: Outbox) -> None:
        """Send what an earlier attempt had already sampled to this attempt's consumers."""
        answer = self._open[key]
        forced = answer.message.forced_token_ids
        text = answer.detokenizer.push(forced)
        finish = answer.message.options.get("forced_finish")
        if answer.detokenizer.stopped and not finish:
            self._engine.abort(_engine_id(key))
            finish = FinishReason.STOP.value
        if finish:
            text += "" if answer.detokenizer.stopped else answer.detokenizer.flush()
            outbox.emit(key, Payload(type=PortType.TEXT, text=text, token_ids=forced), is_last=True)
            self._end(key, FinishReason(str(finish)), Usage(), outbox)
        else:
            outbox.emit(key, Payload(type=PortType.TEXT, text=text, token_ids=forced))

    def _emit(self, output: EngineOutput, outbox: Outbox) -> None:
        key = self._by_id.get(output.request_id)
        if key is None:
            return
        answer = self._open[key]
        if output.error is not None:
            self._forget(key)
            outbox.end(key, error=output.error)
            return
        answer.deadline = time.monotonic() + INTER_TOKEN_SECONDS
        if output.token_ids:
            outbox.journal.append((key, output.token_ids))
        visible = output.token_ids
        if output.finish_reason is FinishReason.STOP and visible and self._is_end(visible[-1], answer):
            visible = visible[:-1]
        text = answer.detokenizer.push(visible)
        reason = output.finish_reason
        usage = output.usage
        if answer.detokenizer.stopped:
            usage = usage or self._engine.finish(output.request_id, FinishReason.STOP)
            reason = FinishReason.STOP
        elif reason is not None:
            text += answer.detokenizer.flush()
        payload = Payload(type=PortType.TEXT, text=text, token_ids=output.token_ids, logprobs=output.logprobs)
        outbox.emit(key, payload, is_last=reason is not None)
        if reason is not None:
            self._end(key, reason, usage or Usage(), outbox)

    def _is_end(self, token_id: int, answer: _Answer) -> bool:
        sampling = answer.message.sampling
        return token_id in self._eos_token_ids or token_id in sampling.stop_token_ids

    def _end(self, key: RequestKey, reason: FinishReason, usage: Usage, outbox: Outbox) -> None:
        self._forget(key)
        outbox.end(key, usage=usage, finish_reason=reason)

    def _forget(self, key: RequestKey) -> None:
        del self._open[key]
        del self._by_id[_engine_id(key)]


def _engine_id(key: RequestKey) -> str:
    return f"{key.request_id}#{key.attempt}"


def eos_ids(config: dict[str, object], generation: dict[str, object]) -> tuple[int, ...]:
    """End-of-sequence ids of a checkpoint; generation_config.json wins over config.json."""
    found = generation.get("eos_token_id", config.get("eos_token_id"))
    if found is None:
        return ()
    ids: Sequence[object] = found if isinstance(found, list) else [found]
    return tuple(int(str(token_id)) for token_id in ids)
