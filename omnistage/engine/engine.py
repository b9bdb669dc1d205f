"""The paged-KV language model engine: requests in, tokens out, one step at a time.

Knows models only through `embed / forward / logits`.  It knows no text (the caller detokenises and
looks for stop strings), no stage and no transport, and starts no thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Ids
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from omnistage.engine.block_manager import BlockManager
from omnistage.engine.positions import NUM_AXES
from omnistage.engine.request import (
    EmbeddingRows,
    EngineConfig,
    EngineOutput,
    EngineRequest,
    EngineStats,
    Rows,
    TokenRows,
)
from omnistage.engine.runner import FlatTokenModel, Runner
from omnistage.engine.sampler import Sample, sample
from omnistage.engine.scheduler import ScheduledChunk, Scheduler, SchedulerLimits
from omnistage.engine.sequence import Sequence
from omnistage.errors import ContextOverflow, InvalidRequest, PipelineError, RequestFailed
from omnistage.ops.attention import PagedKVCache
from omnistage.types import FinishReason, SamplingParams, Usage

__all__ = [
    "EmbeddingRows",
    "Engine",
    "EngineConfig",
    "EngineOutput",
    "EngineRequest",
    "EngineStats",
    "TokenRows",
]


class ModelSizes(Protocol):
    """What the engine reads of a model's configuration."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def max_position_embeddings(self) -> int: ...


class EngineModel(FlatTokenModel, Protocol):
    """What an engine can serve: Decoder, TextModel and their likes."""

    @property
    def config(self) -> ModelSizes: ...

    @property
    def weight_bytes(self) -> int: ...

    def new_kv_cache(self, num_blocks: int, block_size: int) -> PagedKVCache: ...

    def kv_bytes_per_block(self, block_size: int) -> int: ...


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
        num_blocks = _num_blocks(model, config)
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
            _check_token_id(token_id, vocab_size, "forced_token_ids")
        sequence = Sequence(request, self._num_arrivals, self.config.block_size)
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
            _check_token_id(token_id, self._model.config.vocab_size, "token_ids")
        return self._model.embed(torch.tensor(token_ids, dtype=torch.int64))

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
                sequences, logits = self._runner.execute(plan)
                samples = sample(sequences, logits) if sequences else []
            outputs += self._update(plan, sequences, samples)
        return outputs

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
            sequence.request_id, (sampled.token_id,), logprobs, reason, usage, exported=exported
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

    # --- checks -------------------------------------------------------------------------------

    def _extend(self, sequence: Sequence, rows: tuple[Rows, ...], *, is_complete: bool) -> None:
        """Check everything, then append."""
        total = len(sequence.token_ids) + sum(self._check_rows(piece) for piece in rows)
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

    def _check_rows(self, piece: Rows) -> int:
        """Number of rows.  Raises InvalidRequest."""
        if isinstance(piece, EmbeddingRows):
            _check_tensor("embeddings", piece.embeddings, ("num_rows", self._model.config.hidden_size))
            num_rows = piece.embeddings.shape[0]
            if piece.deepstack is not None:
                expected = ("num_layers", num_rows, self._model.config.hidden_size)
                _check_tensor("deepstack rows", piece.deepstack, expected)
                if piece.deepstack.shape[0] > self._model.num_open_layers:
                    raise InvalidRequest(
                        f"deepstack rows are for {piece.deepstack.shape[0]} layers; this model takes "
                        f"them after {self._model.num_open_layers}"
                    )
        else:
            for token_id in piece.token_ids:
                _check_token_id(token_id, self._model.config.vocab_size, "prompt")
            num_rows = len(piece.token_ids)
        if piece.positions is not None:
            self._check_positions(piece.positions, num_rows)
        if piece.is_exported and self.config.capture_layer is None:
            raise InvalidRequest("rows are to be exported, but the engine has no capture_layer; set one")
        return num_rows

    def _check_positions(self, positions: NDArray[Any], num_rows: int) -> None:
        shapes: list[tuple[int, ...]] = [(num_rows,)]
        if self._model.num_position_axes == NUM_AXES:
            shapes.append((NUM_AXES, num_rows))
        if positions.shape not in shapes:
            raise InvalidRequest(
                f"positions have shape {list(positions.shape)}, not "
                + " or ".join(str(list(shape)) for shape in shapes)
            )
        if not bool(np.isfinite(positions).all()):
            raise InvalidRequest("positions hold NaN or infinite values")

    def _finish_if_forced_to(self, sequence: Sequence) -> None:
        """End a request whose forced output is already complete; the next step reports it.

        One with rows to export ends once its prompt is computed.
        """
        is_over = sequence.prompt_is_complete and not sequence.export_ranges
        reason = self._finish_reason(sequence) if is_over else None
        if reason is not None:
            usage = self.finish(sequence.request_id, reason)
            self._finished.append(EngineOutput(sequence.request_id, finish_reason=reason, usage=usage))


def _num_blocks(model: EngineModel, config: EngineConfig) -> int:
    if (config.num_blocks is None) == (config.kv_bytes is None):
        raise PipelineError("give exactly one of num_blocks and kv_bytes")
    if config.dtype not in (None, model.dtype):
        raise PipelineError(f"a KV cache in {config.dtype} does not fit weights in {model.dtype}")
    for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "max_prefill_tokens_per_request"):
        if getattr(config, name) < 1:
            raise PipelineError(f"{name} is {getattr(config, name)}; it must be at least 1")
    per_block = model.kv_bytes_per_block(config.block_size)
    if config.capture_layer is not None:
        if not 0 <= config.capture_layer <= model.num_open_layers or not model.num_open_layers:
            raise PipelineError(
                f"capture_layer is {config.capture_layer}, but the model has {model.num_open_layers} layers "
                "that give hidden states; unset it or lower it"
            )
        per_block += config.block_size * model.config.hidden_size * model.dtype.itemsize
    num_blocks = config.num_blocks if config.kv_bytes is None else config.kv_bytes // per_block
    if not num_blocks or num_blocks < 1:
        raise PipelineError(
            f"{config.kv_bytes} bytes of KV cache hold no block; one takes {per_block} bytes: give more"
        )
    return num_blocks


def _check_tensor(name: str, tensor: Tensor, shape: tuple[int | str, ...]) -> None:
    """shape: numbers that are given, and names of those that are not.  Raises InvalidRequest."""
    fits = tensor.ndim == len(shape) and all(
        isinstance(wanted, str) or size == wanted for size, wanted in zip(tensor.shape, shape, strict=True)
    )
    if not fits:
        expected = ", ".join(str(size) for size in shape)
        raise InvalidRequest(f"{name} have shape {list(tensor.shape)}, not [{expected}]")
    if not bool(tensor.isfinite().all()):
        raise InvalidRequest(f"{name} hold NaN or infinite values")


def _check_token_id(token_id: int, vocab_size: int, param: str) -> None:
    if not 0 <= token_id < vocab_size:
        raise InvalidRequest(
            f"token id {token_id} in {param} is outside the vocabulary of {vocab_size}", param=param
        )


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Raises InvalidRequest naming the parameter, its value and its range."""
    infinity = math.inf
    ranges: dict[str, tuple[float, float]] = {
        "max_tokens": (1, infinity),
        "min_tokens": (0, params.max_tokens),
        "temperature": (0.0, infinity),
        "top_k": (0, infinity),
        "top_p": (0.0, 1.0),
        "min_p": (0.0, 1.0),
        "repetition_penalty": (0.0, infinity),
        "presence_penalty": (-2.0, 2.0),
        "frequency_penalty": (-2.0, 2.0),
        "logprobs": (0, vocab_size),
    }
    for name, (low, high) in ranges.items():
        value = getattr(params, name)
        if value is not None and not (low <= value <= high and value < infinity):
            raise InvalidRequest(f"{name} is {value}; it must be between {low} and {high}", param=name)
    for name in ("top_p", "repetition_penalty"):
        if getattr(params, name) == 0:
            raise InvalidRequest(f"{name} is 0; it must be greater", param=name)
    for token_id, bias in params.logit_bias.items():
        _check_token_id(token_id, vocab_size, "logit_bias")
        if not math.isfinite(bias):
            raise InvalidRequest(f"logit_bias of token {token_id} is {bias}, not finite", param="logit_bias")
    for token_id in params.stop_token_ids:
        _check_token_id(token_id, vocab_size, "stop_token_ids")
