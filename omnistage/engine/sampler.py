"""Picks one token per sequence from logits, for the whole batch at once.

Noise is a function of (seed, stage, output position) alone, so a request draws the same numbers in
any batch and after a replay.  Knows sampling parameters and output so far, neither blocks nor steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Batch
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from omnistage.engine.sequence import EMBEDDING_ROW, Sequence
from omnistage.types import SamplingParams, TokenLogprob

_NUCLEUS_WIDTH = 256  # sorted candidates tried first for top-p; a flat distribution is sorted whole


@dataclass(frozen=True)
class Sample:
    token_id: int
    logprob: TokenLogprob | None = None


def keyed_uniform(seed: int, stage: str, position: int, lane: int = 0) -> float:
    """A number in [0, 1) that depends on its key alone.  lane: for several draws at one position."""
    key = f"{seed}/{stage}/{position}/{lane}".encode()
    return (int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) >> 11) * 2.0**-53


def sample(sequences: Batch[Sequence], logits: Tensor) -> list[Sample | None]:
    """logits: [len(sequences), vocab].  None for a row that holds NaN.

    Order of the steps as in transformers: repetition penalty (over prompt and output), presence and
    frequency penalties (over the output, as OpenAI defines them), logit bias, minimum length,
    temperature, top-k, top-p, min-p.  Temperature 0 takes the first largest.  Log-probabilities are
    of the model's own distribution, before any of these steps.
    """
    scores = logits.float()
    # numpy's argmax is several times faster than torch's on a CPU
    best = scores.numpy().argmax(axis=-1)  # the first of equals, and any NaN before all numbers
    is_valid = ~np.isnan(np.take_along_axis(scores.numpy(), best[:, None], axis=1)[:, 0])
    if all(_is_plain(sequence) for sequence in sequences):
        samples = [Sample(token_id) for token_id in best.tolist()]
    else:
        samples = _sample_adjusted(sequences, scores)
    return [item if valid else None for item, valid in zip(samples, is_valid.tolist(), strict=True)]


def _sample_adjusted(sequences: Batch[Sequence], scores: Tensor) -> list[Sample]:
    logprobs = _LogprobReader(sequences, scores)
    scores = _adjust(sequences, scores)
    token_ids: list[int] = scores.numpy().argmax(axis=-1).tolist()
    rows = [row for row, sequence in enumerate(sequences) if sequence.request.sampling.temperature > 0]
    if rows:
        drawn = _draw([sequences[row] for row in rows], scores[rows])
        for row, token_id in zip(rows, drawn, strict=True):
            token_ids[row] = token_id
    return logprobs.read(token_ids)


def _is_plain(sequence: Sequence) -> bool:
    """Whether the token is simply the most probable one."""
    params = sequence.request.sampling
    return (
        params.temperature == 0
        and params.logprobs is None
        and not params.logit_bias
        and params.repetition_penalty == 1
        and params.presence_penalty == 0
        and params.frequency_penalty == 0
        and sequence.num_output_tokens >= params.min_tokens
    )


class _LogprobReader:
    """Holds the distributions of the rows that want log-probabilities until their tokens are known."""

    def __init__(self, sequences: Batch[Sequence], scores: Tensor) -> None:
        self._wanted = [sequence.request.sampling.logprobs for sequence in sequences]
        self._rows = [row for row, count in enumerate(self._wanted) if count is not None]
        self._logprobs = scores[self._rows].log_softmax(-1) if self._rows else scores[:0]

    def read(self, token_ids: list[int]) -> list[Sample]:
        samples = [Sample(token_id) for token_id in token_ids]
        if not self._rows:
            return samples
        width = max(count or 0 for count in self._wanted)
        values, ids = self._logprobs.topk(width, dim=-1)
        for index, row in enumerate(self._rows):
            count = self._wanted[row] or 0
            top = tuple(zip(ids[index, :count].tolist(), values[index, :count].tolist(), strict=True))
            chosen = float(self._logprobs[index, token_ids[row]])
            samples[row] = Sample(token_ids[row], TokenLogprob(token_ids[row], chosen, top))
        return samples


def _adjust(sequences: Batch[Sequence], scores: Tensor) -> Tensor:
    """Penalties, bias and minimum length.  Returns new scores [num_rows, vocab]."""
    scores = scores.clone()
    repeated: list[tuple[int, int, float]] = []  # row, token, factor
    added: list[tuple[int, int, float]] = []  # row, token, amount
    for row, sequence in enumerate(sequences):
        params = sequence.request.sampling
        if params.repetition_penalty != 1:
            seen = set(sequence.token_ids) - {EMBEDDING_ROW}
            repeated += [(row, token_id, params.repetition_penalty) for token_id in seen]
        if params.presence_penalty or params.frequency_penalty:
            added += [
                (row, token_id, -params.presence_penalty - count * params.frequency_penalty)
                for token_id, count in sequence.output_counts.items()
            ]
        added += [(row, token_id, bias) for token_id, bias in params.logit_bias.items()]
        if sequence.num_output_tokens < params.min_tokens:
            ends = {*sequence.request.eos_token_ids, *params.stop_token_ids}
            added += [(row, token_id, -np.inf) for token_id in ends]
    if repeated:
        where, factor = _coordinates(repeated)
        picked = scores[where]
        scores[where] = torch.where(picked < 0, picked * factor, picked / factor)
    if added:
        where, amount = _coordinates(added)
        scores.index_put_(where, amount, accumulate=True)
    return scores


def _coordinates(entries: list[tuple[int, int, float]]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    rows, token_ids, values = zip(*entries, strict=True)
    return (torch.tensor(rows), torch.tensor(token_ids)), torch.tensor(values, dtype=torch.float32)


def _draw(sequences: Batch[Sequence], scores: Tensor) -> list[int]:
    """Inverse-transform sampling with one keyed number per row.  scores: [num_rows, vocab].

    Candidates are cut by a threshold on the score, never by rank, and the distribution is summed in
    the order of ids: the outcome depends on the row alone, also where scores are equal.
    """
    params = [sequence.request.sampling for sequence in sequences]
    scores = scores / torch.tensor([[item.temperature] for item in params])
    threshold = _thresholds(params, scores)
    if threshold is not None:
        scores = scores.masked_fill(scores < threshold, -torch.inf)
    cumulative = scores.softmax(-1).cumsum(-1)
    uniform = [
        keyed_uniform(sequence.request.sampling.seed, sequence.request.seed_stage, sequence.num_output_tokens)
        for sequence in sequences
    ]
    total = cumulative[:, -1:]
    target = torch.tensor(uniform, dtype=torch.float32).unsqueeze(1) * total
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))  # rounding up to total
    token_ids: list[int] = torch.searchsorted(cumulative, target, right=True).squeeze(1).tolist()
    return token_ids


def _thresholds(params: list[SamplingParams], scores: Tensor) -> Tensor | None:
    """Lowest score that each row keeps, [num_rows, 1]; None if no row cuts anything."""
    vocab = scores.shape[1]
    top_k = torch.tensor([[min(item.top_k, vocab) or vocab] for item in params])
    top_p = torch.tensor([[item.top_p] for item in params])
    min_p = torch.tensor([[item.min_p] for item in params])
    threshold = scores.amax(-1, keepdim=True) + min_p.log()  # -inf where min_p is 0
    if bool((top_k < vocab).any() | (top_p < 1).any()):
        width = int(torch.where(top_k < vocab, top_k, min(_NUCLEUS_WIDTH, vocab)).max())
        best = scores.topk(width, dim=-1).values
        lowest, is_enough = _nucleus(scores, best, top_k, top_p)
        if not bool(is_enough.all()):
            rest = ~is_enough.squeeze(1)
            best = scores[rest].sort(-1, descending=True).values
            lowest[rest], _ = _nucleus(scores[rest], best, top_k[rest], top_p[rest])
        threshold = torch.maximum(threshold, lowest)
    elif not bool((min_p > 0).any()):
        return None
    return threshold


def _nucleus(scores: Tensor, best: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Lowest score within top-k and, of what that leaves, within top-p (arXiv 1904.09751).

    best: the highest scores in descending order, [num_rows, width].  Returns the score and whether
    `best` reached far enough to know it, both [num_rows, 1].
    """
    width = best.shape[1]
    cuts_k = top_k < scores.shape[1]
    kth = best.gather(1, (top_k - 1).clamp_(max=width - 1))
    kth = torch.where(cuts_k, kth, -torch.inf)
    normaliser = scores.masked_fill(scores < kth, -torch.inf).logsumexp(-1, keepdim=True)
    mass = (best - normaliser).exp()
    before = mass.cumsum(-1) - mass  # of the strictly better candidates
    is_kept = (before < top_p) & (best >= kth)
    last = is_kept.sum(-1, keepdim=True).clamp_(min=1) - 1
    lowest = torch.where(top_p < 1, best.gather(1, last), kth)
    reaches_end = (last < width - 1) | (best[:, -1:] <= kth) | (top_p >= 1)
    return lowest, reaches_end | (width == scores.shape[1])
