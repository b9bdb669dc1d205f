"""What the caller hands to the engine and gets back.  Plain data; knows no stage and no transport."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from omnistage.errors import OmnistageError
from omnistage.types import FinishReason, SamplingParams, TokenLogprob, Usage


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Limits of one engine.  Give exactly one of num_blocks and kv_bytes.

    block_size: rows per KV block.  max_num_seqs: sequences in one step.
    max_num_batched_tokens: rows in one step.  max_prefill_tokens_per_request: rows one request may
    add in one step, so that a long prompt does not hold up the others.
    max_model_len: rows of prompt and answer, at most what the model was trained for.
    dtype: of the KV cache; None is the model's, which is also the only other value allowed.
    capture_layer: k keeps the hidden states after k layers of every row beside its keys and values
    (as TextModel.forward's), so that requests can have theirs exported; kv_bytes covers them.
    """

    max_model_len: int
    num_blocks: int | None = None
    kv_bytes: int | None = None
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 1024
    max_prefill_tokens_per_request: int = 512
    enable_prefix_cache: bool = True
    dtype: torch.dtype | None = None
    capture_layer: int | None = None


@dataclass(frozen=True, eq=False)
class TokenRows:
    """Prompt rows known as token ids.

    positions: rotary, [num_rows] or [3, num_rows] (time, row, column), any number type; None counts on
    from the row before, from 0 at the first.  Generated rows count on from the last prompt row.
    is_exported: whether EngineOutput.exported is to hold these rows.
    """

    token_ids: tuple[int, ...]
    positions: NDArray[Any] | None = None
    is_exported: bool = False


@dataclass(frozen=True, eq=False)
class EmbeddingRows:
    """Prompt rows given as embeddings [num_rows, hidden], kept until the request ends.

    digest: names the content (equal digests must mean equal rows and deepstack rows; positions need not
    be covered); None is never cached.
    positions, is_exported: as of TokenRows.
    deepstack: [num_layers, num_rows, hidden], added to these rows after each of the first layers; for
    models with open layers.  Kept until the request ends.
    """

    embeddings: Tensor
    digest: str | None
    positions: NDArray[Any] | None = None
    deepstack: Tensor | None = None
    is_exported: bool = False


Rows = TokenRows | EmbeddingRows


@dataclass(frozen=True, kw_only=True, eq=False)
class EngineRequest:
    """One request.

    prompt_is_complete: False if `Engine.extend_prompt` will add rows.
    forced_token_ids: output that an earlier attempt has delivered; it counts as output (limits,
    penalties, noise positions) and is not returned again.
    forced_rows: [len(forced_token_ids), hidden], of a model that makes frames: what the frames of the
    forced output contribute to the rows after them.
    cache_salt: requests share cached prefixes only if their salts are equal.
    seed_stage: mixed into the noise key, so that two stages with one seed draw differently.
    priority: lower goes first.  deadline: time.monotonic() seconds, earlier goes first among equals.
    """

    request_id: str
    rows: tuple[Rows, ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    prompt_is_complete: bool = True
    forced_token_ids: tuple[int, ...] = ()
    forced_rows: Tensor | None = None
    cache_salt: str = ""
    seed_stage: str = ""
    priority: int = 0
    deadline: float | None = None
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class EngineOutput:
    """What one step brought for one request.

    token_ids: new ones, including a stop or end-of-sequence token, which is always the last.
    frame: of a model that makes frames, all codes of the frame that token_ids' one begins; empty with the
    last output, whose code makes no frame.
    finish_reason, usage: set on the request's last output only.
    exported: [num_rows, hidden], what EngineConfig.capture_layer says of the prompt rows marked
    is_exported, in order.  Comes once, as soon as the whole prompt is computed: with the first token,
    or with the finish of a request whose forced output was complete.
    error: the request has failed and is forgotten; nothing else is set then.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    frame: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    error: OmnistageError | None = None
    exported: Tensor | None = field(default=None, compare=False)  # tensors have no single ==


@dataclass(frozen=True)
class EngineStats:
    """Gauges (num_*, blocks_*) and counters since the start (the others).

    blocks_cached: free blocks whose rows a later request may still share.
    prefix_hit_tokens: rows not computed because they were cached.  tokens: rows computed.
    """

    num_running: int
    num_waiting: int
    blocks_total: int
    blocks_used: int
    blocks_cached: int
    prefix_hit_tokens: int
    preemptions: int
    steps: int
    tokens: int
