"""The llm stage: an engine, the prompts it is fed and the text that comes out.

Joins the prompt's pieces as encoders deliver them, turns sampled ids into text and stop strings
into endings.  Knows no scheduling: that is the engine's.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import msgspec
from tokenizers import Tokenizer
from torch import Tensor

from omnistage.engine.detokenizer import IncrementalDetokenizer
from omnistage.engine.engine import Engine, EngineOutput, EngineRequest
from omnistage.errors import InvalidRequest
from omnistage.ops.tensors import to_host
from omnistage.stages.engine_names import engine_gauges, engine_id
from omnistage.stages.prompts import PlainPrompts, Prompt, PromptAdapter
from omnistage.stages.qwen3_handover import HIDDEN
from omnistage.stages.stage import FIRST_OUTPUT_SECONDS, Outbox, StageContext
from omnistage.transport.messages import Chunk, RequestKey, Submit
from omnistage.types import FinishReason, Payload, PortType, Scalar, StageKind, Usage

INTER_TOKEN_SECONDS = 0.1  # a reader is content with this; speech in hand below it goes first
PREFIX_SECONDS = 0.5  # the part of a prompt before pending media is not urgent: the encoder goes first


class _Answer:
    """One request's prompt on its way in and text on its way out.

    listeners: edges to llms that hear the prompt and every token id; readers: the others.
    unheard: ids the listeners do not have yet.  awaits_export: whether rows for them are still missing.
    ending: how the answer is known to end, from an earlier attempt; what the engine adds is not wanted.
    """

    def __init__(
        self, message: Submit, prompt: Prompt, detokenizer: IncrementalDetokenizer, listeners: frozenset[str]
    ) -> None:
        self.message = message
        self.prompt = prompt
        self.detokenizer = detokenizer
        self.listeners = listeners
        self.readers = frozenset(message.consumers) - listeners
        self.unheard: list[int] = []
        self.has_handed_over = False
        self.awaits_export = prompt.has_exports
        reason = message.options.get("forced_finish")
        self.ending = FinishReason(str(reason)) if reason else None
        self.deadline = time.monotonic() + FIRST_OUTPUT_SECONDS

    @property
    def is_computed(self) -> bool:
        """Whether the engine has work for it: not if all that is asked of it is in the journal."""
        return self.ending is None or self.awaits_export


class LlmStage:
    """See omnistage.stages.stage.Stage."""

    def __init__(
        self,
        context: StageContext,
        engine: Engine,
        tokenizer: Tokenizer,
        eos: tuple[int, ...],
        prompts: PromptAdapter | None = None,
    ) -> None:
        """prompts: the model's adapter, None for one that wants nothing special."""
        self._context = context
        self._engine = engine
        self._tokenizer = tokenizer
        self._eos_token_ids = eos
        self._prompts = prompts or PlainPrompts(tokenizer)
        self._listeners = context.edges_to(StageKind.LLM)
        self._open: dict[RequestKey, _Answer] = {}
        self._by_id: dict[str, RequestKey] = {}
        self._replayed: list[RequestKey] = []  # submitted with a journal that is still to be emitted

    def submit(self, message: Submit) -> None:
        if not message.segments:
            raise InvalidRequest("the prompt is empty; send at least one token")
        detokenizer = IncrementalDetokenizer(self._tokenizer, message.sampling.stop)
        listeners = self._listeners & message.consumers.keys()
        prompt = self._prompts.open(message.segments, is_heard=bool(listeners))
        answer = _Answer(message, prompt, detokenizer, listeners)
        if answer.is_computed:
            self._engine.add_request(self._engine_request(answer))
        self._open[message.key] = answer
        self._by_id[engine_id(message.key)] = message.key
        if message.forced_token_ids or answer.ending:
            self._replayed.append(message.key)

    def receive(self, chunk: Chunk) -> None:
        answer = self._open[chunk.key]
        producer = chunk.edge.split("->", 1)[0]
        answer.prompt.deliver(producer, chunk.item, chunk.payload)
        if answer.is_computed:
            self._engine.extend_prompt(
                engine_id(chunk.key), answer.prompt.take_ready(), is_complete=answer.prompt.is_complete
            )

    def abort(self, key: RequestKey) -> None:
        if self._open.pop(key, None) is not None:
            del self._by_id[engine_id(key)]
            self._engine.abort(engine_id(key))
        if key in self._replayed:
            self._replayed.remove(key)

    def deadline(self) -> float | None:
        if not self._engine.has_work and not self._replayable():
            return None
        return min(
            (answer.deadline for answer in self._open.values() if answer.prompt.is_complete),
            default=time.monotonic() + FIRST_OUTPUT_SECONDS + PREFIX_SECONDS,
        )

    def step(self, outbox: Outbox) -> None:
        replayable = self._replayable()
        if replayable:
            self._replayed.remove(replayable[0])
            self._emit_journal(replayable[0], outbox)
            return
        outputs = self._engine.step()
        outbox.worked.extend(key for name in self._engine.last_scheduled if (key := self._by_id.get(name)))
        for output in outputs:
            self._emit(output, outbox)

    def info(self) -> dict[str, Scalar | list[str]]:
        return {
            "kv_blocks": self._engine.stats().blocks_total,
            "max_model_len": self._engine.max_rows,
            "weight_bytes": self._engine.weight_bytes,
        }

    def gauges(self) -> dict[str, float]:
        return {"requests": len(self._open), **engine_gauges(self._engine)}

    def close(self) -> None:
        for key in list(self._open):
            self.abort(key)

    def _replayable(self) -> list[RequestKey]:
        """Journals that can be emitted; one that listeners hear begins with the whole prompt."""
        return [
            key
            for key in self._replayed
            if not self._open[key].listeners or self._open[key].prompt.is_complete
        ]

    def _engine_request(self, answer: _Answer) -> EngineRequest:
        message = answer.message
        return EngineRequest(
            request_id=engine_id(message.key),
            rows=answer.prompt.take_ready(),
            sampling=message.sampling,
            prompt_is_complete=answer.prompt.is_complete,
            forced_token_ids=message.forced_token_ids,
            cache_salt=message.cache_salt,
            seed_stage=self._context.spec.name,
            eos_token_ids=self._eos_token_ids,
        )

    def _emit_journal(self, key: RequestKey, outbox: Outbox) -> None:
        """Send what an earlier attempt had already sampled to this attempt's consumers."""
        answer = self._open[key]
        forced = answer.message.forced_token_ids
        text = answer.detokenizer.push(forced)
        if answer.detokenizer.stopped and not answer.ending:
            answer.ending = FinishReason.STOP
        finish = answer.ending
        if finish and not answer.detokenizer.stopped:
            text += answer.detokenizer.flush()
        payload = Payload(type=PortType.TEXT, text=text, token_ids=forced)
        outbox.emit(key, payload, is_last=finish is not None, edges=answer.readers)
        self._hear(key, answer, forced, finish, outbox)
        if finish and not answer.awaits_export:
            self._end(key, finish, None, outbox)

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
        if answer.ending:  # only the exported rows were missing
            self._hear(key, answer, (), answer.ending, outbox, output.exported)
            self._end(key, answer.ending, output.usage, outbox)
            return
        if output.token_ids:
            outbox.journal.append((key, output.token_ids))
        visible = output.token_ids
        if output.finish_reason is FinishReason.STOP and visible and self._is_end(visible[-1], answer):
            visible = visible[:-1]
        text = answer.detokenizer.push(visible)
        reason = output.finish_reason
        if answer.detokenizer.stopped:
            reason = FinishReason.STOP
        elif reason is not None:
            text += answer.detokenizer.flush()
        payload = Payload(type=PortType.TEXT, text=text, token_ids=output.token_ids, logprobs=output.logprobs)
        outbox.emit(key, payload, is_last=reason is not None, edges=answer.readers)
        self._hear(key, answer, output.token_ids, reason, outbox, output.exported)
        if reason is not None:
            self._end(key, reason, output.usage, outbox)

    def _hear(
        self,
        key: RequestKey,
        answer: _Answer,
        token_ids: tuple[int, ...],
        finish: FinishReason | None,
        outbox: Outbox,
        exported: Tensor | None = None,
    ) -> None:
        """Tell the listeners new token ids, behind the prompt and its exported rows.

        finish: how the answer ends with these ids; its info "finish_reason" on the last chunk.
        """
        if not answer.listeners:
            return
        answer.unheard.extend(token_ids)
        if answer.awaits_export and exported is None:
            return
        answer.awaits_export = False
        payload = Payload(type=PortType.TOKENS)
        if not answer.has_handed_over:
            answer.has_handed_over = True
            payload = answer.prompt.handover()
            if exported is not None:
                tensors = {**payload.tensors, HIDDEN: to_host(exported)}
                payload = msgspec.structs.replace(payload, tensors=tensors)
        ids, answer.unheard = tuple(answer.unheard), []
        info: dict[str, Scalar] = {"finish_reason": finish.value} if finish else {}
        payload = msgspec.structs.replace(payload, token_ids=ids, info=info)
        outbox.emit(key, payload, is_last=finish is not None, edges=answer.listeners)

    def _is_end(self, token_id: int, answer: _Answer) -> bool:
        sampling = answer.message.sampling
        return token_id in self._eos_token_ids or token_id in sampling.stop_token_ids

    def _end(self, key: RequestKey, reason: FinishReason, usage: Usage | None, outbox: Outbox) -> None:
        """usage: None if the engine may still have the request."""
        if usage is None:
            usage = self._engine.finish(engine_id(key), reason)
        self._forget(key)
        outbox.end(key, usage=usage or Usage(), finish_reason=reason)

    def _forget(self, key: RequestKey) -> None:
        del self._open[key]
        del self._by_id[engine_id(key)]


def eos_ids(values: Mapping[str, object]) -> tuple[int, ...]:
    """End-of-sequence ids that a checkpoint's configuration names; empty if it names none."""
    found = values.get("eos_token_id")
    if found is None:
        return ()
    ids: Sequence[object] = found if isinstance(found, list) else [found]
    return tuple(int(str(token_id)) for token_id in ids)
