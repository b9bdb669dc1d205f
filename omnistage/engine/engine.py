"""The paged-KV language model engine: requests in, tokens out, one step at a time.

Knows models only through `embed / forward / logits`.  It knows no text (the caller detokenises and
looks for stop strings), no stage and no transport, and starts no thread.
"""

from __future__ import annotations

from collections.abc import Sequence as Ids
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from omnistage.engine.block_manager import BlockManager
from omnistage.engine.checks import (
    SizedModel,
    check_rows,
    check_sampling,
    check_tensor,
    check_token_id,
    num_kv_blocks,
)
from omnistage.engine.request import (
    EmbeddingRows,
    EngineConfig,
    EngineOutput,
    EngineRequest,
    EngineStats,
    Rows,
    TokenRows,
)
from omnistage.engine.runner import FrameModel, Runner
from omnistage.engine.sampler import Sample, sample
from omnistage.engine.scheduler import ScheduledChunk, Scheduler, SchedulerLimits
from omnistage.engine.sequence import Sequence
from omnistage.errors import ContextOverflow, InvalidRequest, PipelineError, RequestFailed
from omnistage.models.qwen3_residual_codes import CodeSampling
from omnistage.ops.attention import PagedKVCache
from omnistage.types import FinishReason, Usage

__all__ = [
    "EmbeddingRows",
    "Engine",
    "EngineConfig",
    "EngineOutput",
    "EngineRequest",
    "EngineStats",
    "TokenRows",
]


class EngineModel(SizedModel, Protocol):
    """What an engine can serve: Decoder, TextModel and their likes."""

    @property
    def weight_bytes(self) -> int: ...

    def new_kv_cache(self, num_blocks: int, block_size: int) -> PagedKVCache: ...


class Engine:
    """Serves many requests with one model.  Not thread-safe: one thread calls everything."""

    def __init__(self, model: EngineModel, config: EngineConfig) -> None:
        """Allocates the KV pages.  Raises PipelineError if the limits contradict each other.

        last_scheduled: ids of the requests that had rows in the last step.
        """
        self._model = model
        self.config = config
        self.weight_bytes = model.weight_bytes
        self.last_scheduled: list[str] = []
        num_blocks = num_kv_blocks(model, config)
        trained = model.config.max_position_embeddings
        if config.max_model_len > trained:
            raise PipelineError(
                f"max_model_len {config.max_model_len} is over the model's {trained} positions; lower it"
            )
        self._max_rows = min(config.max_model_len, num_blocks * config.block_size)
        self._blocks = BlockManager(num_blocks)
        limits = SchedulerLimits(
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_prefill_tokens_per_request=config.max_prefill_tokens_per_request,
            enable_prefix_cache=config.enable_prefix_cache,
        )
        self._scheduler = Scheduler(limits, self._blocks)
        self._cache = model.new_kv_cache(num_blocks, config.block_size)
        self._runner = Runner(
            model, self._cache, capture_layer=config.capture_layer, hidden_size=model.config.hidden_size
        )
        self._frames: FrameModel | None = model if isinstance(model, FrameModel) else None
        self._sequences: dict[str, Sequence] = {}
        self._finished: list[EngineOutput] = []  # of requests that ended without a step
        self._num_arrivals = 0
        self._num_steps = 0
        self._num_tokens = 0

    # --- requests -----------------------------------------------------------------------------

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request.

        Raises ContextOverflow if the prompt and one token can never fit, InvalidRequest if a parameter
        or a row is out of range or the id is in use.
        """
        if request.request_id in self._sequences:
            raise InvalidRequest(f"request id {request.request_id!r} is in use; choose another")
        vocab_size = self._model.config.vocab_size
        check_sampling(request.sampling, vocab_size)
        for token_id in request.forced_token_ids:
            check_token_id(token_id, vocab_size, "forced_token_ids")
        self._check_forced_rows(request)
        sequence = Sequence(
            request, self._num_arrivals, self.config.block_size, makes_frames=self._frames is not None
        )
        self._extend(sequence, request.rows, is_complete=request.prompt_is_complete)
        self._num_arrivals += 1
        self._sequences[request.request_id] = sequence
        self._scheduler.add(sequence)
        self._finish_if_forced_to(sequence)

    def extend_prompt(self, request_id: str, rows: tuple[Rows, ...], is_complete: bool) -> None:
        """Append rows to an open prompt; with is_complete, sampling may begin.

        Unknown ids are ignored: the request may have been aborted meanwhile.  Raises InvalidRequest or
        ContextOverflow like add_request, leaving the request as it was.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return
        if sequence.prompt_is_complete:
            raise InvalidRequest(f"the prompt of {request_id!r} is already complete")
        self._extend(sequence, rows, is_complete=is_complete)
        self._finish_if_forced_to(sequence)

    def feed(self, request_id: str, rows: Tensor, *, filler: Tensor | None = None) -> None:
        """Give a request of a model that makes frames the text parts of its next rows.

        rows: [num_rows, hidden], of the rows after the next frames, one each, in order.  A request that
        has none left is skipped by steps until more come.  filler: [hidden], of all rows after these.
        Unknown ids are ignored: the request may have ended.  Raises InvalidRequest for rows that do not
        fit the model, are not finite, or come after the filler.
        """
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return
        check_tensor("text rows", rows, ("num_rows", self._model.config.hidden_size))
        if not sequence.makes_frames or sequence.filler is not None:
            raise InvalidRequest(f"the request {request_id!r} takes no (more) text rows")
        sequence.text_rows.extend(rows)
        sequence.filler = filler

    def abort(self, request_id: str) -> None:
        """Forget a request and free all it holds.  Idempotent; no output follows."""
        self._finished = [output for output in self._finished if output.request_id != request_id]
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            self._scheduler.remove(sequence)

    def finish(self, request_id: str, reason: FinishReason) -> Usage | None:
        """End a request for a cause the caller found (a stop string).  No output follows.

        Returns what it used; None if the id is unknown.  reason: kept by the caller, for symmetry with
        EngineOutput.finish_reason; FinishReason.ABORT is the same as abort().
        """
        sequence = self._sequences.get(request_id)
        self.abort(request_id)
        return None if sequence is None or reason is FinishReason.ABORT else sequence.usage

    def embed(self, token_ids: Ids[int]) -> Tensor:
        """The model's input rows of token ids: [len(token_ids), hidden], own memory.

        Raises InvalidRequest for an id outside the vocabulary.
        """
        for token_id in token_ids:
            check_token_id(token_id, self._model.config.vocab_size, "token_ids")
        return self._model.embed(torch.tensor(token_ids, dtype=torch.int64))

    def _check_forced_rows(self, request: EngineRequest) -> None:
        expected = len(request.forced_token_ids) if self._frames is not None else 0
        if request.forced_rows is not None:
            check_tensor("forced rows", request.forced_rows, (expected, self._model.config.hidden_size))
        elif expected:
            raise InvalidRequest(f"{expected} forced codes need the rows their frames make; give forced_rows")

    # --- steps --------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step could do something now; requests that wait for prompt rows do not count."""
        return bool(self._finished) or self._scheduler.has_work()

    def step(self) -> list[EngineOutput]:
        """Compute one batch and return what it brought, possibly nothing."""
        outputs, self._finished = self._finished, []
        plan = self._scheduler.schedule()
        self.last_scheduled = [chunk.sequence.request_id for chunk in plan]
        if plan:
            with torch.inference_mode():
                sequences, hidden = self._runner.execute(plan)
                samples = sample(sequences, self._model.logits(hidden)) if sequences else []
                fresh = self._update(plan, sequences, samples)
                outputs += fresh if self._frames is None else self._with_frames(fresh, hidden)
        return outputs

    @property
    def max_rows(self) -> int:
        """Rows that prompt and answer of one request may have: max_model_len, or what the cache holds."""
        return self._max_rows

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting),
            blocks_total=self._blocks.num_blocks,
            blocks_used=self._blocks.num_used,
            blocks_cached=self._blocks.num_cached,
            prefix_hit_tokens=self._scheduler.num_prefix_hit_tokens,
            preemptions=self._scheduler.num_preemptions,
            steps=self._num_steps,
            tokens=self._num_tokens,
        )

    def _update(
        self, plan: list[ScheduledChunk], sequences: list[Sequence], samples: list[Sample | None]
    ) -> list[EngineOutput]:
        self._num_steps += 1
        for chunk in plan:
            chunk.sequence.num_computed_tokens = chunk.stop
            self._scheduler.publish(chunk)
            self._num_tokens += chunk.num_tokens
        outputs = []
        for sequence, sampled in zip(sequences, samples, strict=True):
            outputs.append(self._fail(sequence) if sampled is None else self._accept(sequence, sampled))
        return outputs

    def _with_frames(self, outputs: list[EngineOutput], hidden: Tensor) -> list[EngineOutput]:
        """Complete the frames of requests that go on: the codes just sampled are the first of each.

        hidden: [len(outputs), hidden], what the codes were sampled from.
        """
        rows = [
            row
            for row, output in enumerate(outputs)
            if output.token_ids and output.finish_reason is None  # the last code makes no frame
        ]
        if not rows or self._frames is None:
            return outputs
        sequences = [self._sequences[outputs[row].request_id] for row in rows]
        codes = torch.tensor([outputs[row].token_ids[0] for row in rows])
        noise = [_frame_noise(sequence) for sequence in sequences]
        if len(rows) < hidden.shape[0]:
            hidden = hidden[rows]
        frames, parts = self._frames.next_input(hidden, codes, noise)
        for row, sequence, frame, part in zip(rows, sequences, frames.tolist(), parts, strict=True):
            sequence.frame_rows.append(part)
            outputs[row] = replace(outputs[row], frame=tuple(frame))
        return outputs

    def _accept(self, sequence: Sequence, sampled: Sample) -> EngineOutput:
        exported = None
        if sequence.export_ranges:
            exported, sequence.export_ranges = self._runner.exported(sequence), []
            reason = self._finish_reason(sequence)
            if reason is not None:  # its forced output was complete; only this was missing
                usage = self.finish(sequence.request_id, reason)
                return EngineOutput(sequence.request_id, finish_reason=reason, usage=usage, exported=exported)
        sequence.append_output(sampled.token_id)
        logprobs = () if sampled.logprob is None else (sampled.logprob,)
        reason = self._finish_reason(sequence)
        usage = None if reason is None else self.finish(sequence.request_id, reason)
        return EngineOutput(
            sequence.request_id,
            (sampled.token_id,),
            logprobs,
            finish_reason=reason,
            usage=usage,
            exported=exported,
        )

    def _fail(self, sequence: Sequence) -> EngineOutput:
        """End a request whose logits are no numbers, and wipe what it wrote.

        A later owner masks stale rows, but a masked NaN is still NaN once it meets a product.
        """
        self._cache.clear(self._blocks.withdraw(sequence.block_table))
        self.abort(sequence.request_id)
        position = len(sequence.token_ids)
        message = f"the model computed NaN at position {position}; try float32 or other embeddings"
        return EngineOutput(sequence.request_id, error=RequestFailed(message))

    def _finish_reason(self, sequence: Sequence) -> FinishReason | None:
        """Whether the output so far is complete."""
        num_output = sequence.num_output_tokens
        if not num_output:
            return None
        params = sequence.request.sampling
        last = sequence.token_ids[-1]
        is_end = last in params.stop_token_ids or (
            not params.ignore_eos and last in sequence.request.eos_token_ids
        )
        if is_end:  # never before min_tokens: the sampler forbids it
            return FinishReason.STOP
        if num_output >= params.max_tokens or len(sequence.token_ids) >= self._max_rows:
            return FinishReason.LENGTH
        return None

    def _extend(self, sequence: Sequence, rows: tuple[Rows, ...], *, is_complete: bool) -> None:
        """Check everything, then append."""
        total = len(sequence.token_ids)
        total += sum(check_rows(self._model, self.config, piece) for piece in rows)
        if is_complete and not total:
            raise InvalidRequest("the prompt is empty; give at least one token", param="messages")
        if total + 1 > self._max_rows:
            limit = "max_model_len" if self._max_rows == self.config.max_model_len else "the KV cache's size"
            raise ContextOverflow(
                f"the prompt has {total} tokens; with one token of answer it exceeds {limit}, "
                f"{self._max_rows}; shorten it",
                param="messages",
            )
        sequence.extend_prompt(rows, is_complete=is_complete)

    def _finish_if_forced_to(self, sequence: Sequence) -> None:
        """End a request whose forced output is already complete; the next step reports it.

        One with rows to export ends once its prompt is computed.
        """
        is_over = sequence.prompt_is_complete and not sequence.export_ranges
        reason = self._finish_reason(sequence) if is_over else None
        if reason is not None:
            usage = self.finish(sequence.request_id, reason)
            self._finished.append(EngineOutput(sequence.request_id, finish_reason=reason, usage=usage))


def _frame_noise(sequence: Sequence) -> CodeSampling:
    """Residual codes are greedy where the first codes are, as in the reference."""
    params = sequence.request.sampling
    return CodeSampling(
        temperature=1.0 if params.temperature > 0 else 0.0,
        seed=params.seed,
        stage=sequence.request.seed_stage,
        position=sequence.num_output_tokens - 1,
    )
