"""What the caller hands to the engine and gets back.  Plain data; knows no stage and no transport."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
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


@dataclass(frozen=True)
class TokenRows:
    """Prompt rows known as token ids."""

    token_ids: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class EmbeddingRows:
    """Prompt rows given as embeddings [num_rows, hidden], kept until the request ends.

    digest: names the content (equal digests must mean equal rows); None is never cached.
    """

    embeddings: Tensor
    digest: str | None


Rows = TokenRows | EmbeddingRows


@dataclass(frozen=True, kw_only=True, eq=False)
class EngineRequest:
    """One request.

    prompt_is_complete: False if `Engine.extend_prompt` will add rows.
    forced_token_ids: output that an earlier attempt has delivered; it counts as output (limits,
    penalties, noise positions) and is not returned again.
    cache_salt: requests share cached prefixes only if their salts are equal.
    seed_stage: mixed into the noise key, so that two stages with one seed draw differently.
    priority: lower goes first.  deadline: time.monotonic() seconds, earlier goes first among equals.
    """

    request_id: str
    rows: tuple[Rows, ...] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    prompt_is_complete: bool = True
    forced_token_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    seed_stage: str = ""
    priority: int = 0
    deadline: float | None = None
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class EngineOutput:
    """What one step brought for one request.

    token_ids: new ones, including a stop or end-of-sequence token, which is always the last.
    finish_reason, usage: set on the request's last output only.
    error: the request has failed and is forgotten; nothing else is set then.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    error: OmnistageError | None = None


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
