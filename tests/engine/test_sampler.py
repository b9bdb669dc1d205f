"""Sampling against transformers' logits processors, and noise that depends on its key alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from omnistage.engine.request import EngineRequest, TokenRows
from omnistage.engine.sampler import keyed_uniform, sample
from omnistage.engine.sequence import Sequence
from omnistage.types import SamplingParams

VOCAB = 1000


def make(
    prompt: tuple[int, ...] = (1,), output: tuple[int, ...] = (), eos: tuple[int, ...] = (), **params: object
) -> Sequence:
    request = EngineRequest(
        request_id="x",
        sampling=SamplingParams(**params),
        forced_token_ids=output,
        seed_stage="thinker",
        eos_token_ids=eos,
    )
    made = Sequence(request, 0, 16)
    made.extend_prompt((TokenRows(prompt),), is_complete=True)
    return made


def random_logits(rows: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return scale * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def reference_distribution(logits: torch.Tensor, sequence: Sequence) -> torch.Tensor:
    """Probabilities of one row by transformers' processors, in the order its generate() applies them."""
    params = sequence.request.sampling
    processors = LogitsProcessorList()
    if params.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    processors.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(MinPLogitsWarper(params.min_p))
    ids = torch.tensor([sequence.token_ids])
    return processors(ids, logits.unsqueeze(0).clone())[0].softmax(-1)


PARAMS = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.9, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.5, "repetition_penalty": 1.4, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.999},
    {"temperature": 1.0, "top_p": 0.01},
    {"temperature": 1.0, "top_k": 5000},
]


def draws(logits: torch.Tensor, count: int, **params: object) -> torch.Tensor:
    sequences = [make(prompt=(1, 2, 3), output=(4, 5), seed=seed, **params) for seed in range(count)]
    samples = sample(sequences, logits.expand(count, -1))
    return torch.tensor([item.token_id for item in samples])


@pytest.mark.parametrize("scale", [0.5, 3.0])
@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_distribution(params: dict[str, object], scale: float) -> None:
    """Every candidate of the reference and no other; frequencies by a chi-square test."""
    count = 4000
    logits = random_logits(1, scale=scale)[0]
    expected = reference_distribution(logits, make(prompt=(1, 2, 3), output=(4, 5), **params)).double()
    seen = torch.bincount(draws(logits, count, **params), minlength=VOCAB).double()
    assert not bool(((expected == 0) & (seen > 0)).any())
    often = expected * count >= 5
    observed = torch.cat([seen[often], seen[~often].sum(0, keepdim=True)])
    hoped = torch.cat([expected[often], expected[~often].sum(0, keepdim=True)]) * count
    observed, hoped = observed[hoped > 0], hoped[hoped > 0]
    chi_square = float(((observed - hoped) ** 2 / hoped).sum())
    freedom = max(1, len(hoped) - 1)
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5 + 5


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_cut_is_exactly_the_references(params: dict[str, object]) -> None:
    """Inverse-transform sampling reaches the ends of the distribution: compare candidates, not counts."""
    from omnistage.engine.sampler import _adjust, _thresholds

    for seed in range(10):
        logits = random_logits(1, seed, scale=0.3 + 0.4 * seed)
        sequence = make(prompt=(1, 2, 3), output=(4, 5), **params)
        expected = reference_distribution(logits[0], sequence)
        scores = _adjust([sequence], logits) / params["temperature"]
        threshold = _thresholds([sequence.request.sampling], scores)
        kept = torch.ones(VOCAB, dtype=torch.bool) if threshold is None else (scores >= threshold)[0]
        assert torch.equal(kept, expected > 0)


def test_batch_does_not_change_a_row() -> None:
    """Mixed parameters, any order, any neighbours: the same token for the same row."""
    logits = random_logits(32).bfloat16()  # coarse: many equal scores
    sequences = [
        make(output=tuple(range(row % 7)), seed=row, **PARAMS[row % len(PARAMS)]) for row in range(31)
    ]
    sequences.append(make(temperature=0.0))
    together = [item.token_id for item in sample(sequences, logits)]
    order = list(reversed(range(32)))
    reverse = sample([sequences[row] for row in order], logits[order])
    assert [item.token_id for item in reverse][::-1] == together
    alone = [sample([sequences[row]], logits[row : row + 1])[0].token_id for row in range(32)]
    assert alone == together
    assert together[-1] == int(logits[-1].float().argmax())


def test_noise_key() -> None:
    draw = keyed_uniform(1, "thinker", 5)
    assert draw == keyed_uniform(1, "thinker", 5)
    others = [
        keyed_uniform(2, "thinker", 5),
        keyed_uniform(1, "talker", 5),
        keyed_uniform(1, "thinker", 6),
        keyed_uniform(1, "thinker", 5, lane=1),
    ]
    assert draw not in others
    many = np.array([keyed_uniform(0, "", position) for position in range(10000)])
    assert many.min() >= 0
    assert many.max() < 1
    assert abs(many.mean() - 0.5) < 0.015
    assert abs(np.corrcoef(many[1:], many[:-1])[0, 1]) < 0.05


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, [7, 3, 900]] = 5.0
    assert [item.token_id for item in sample([make(temperature=0.0)] * 2, logits)] == [3, 0]


def test_presence_and_frequency_penalties() -> None:
    """OpenAI's formula: logit -= frequency * count + presence, over the output only."""
    logits = torch.zeros(1, VOCAB)
    logits[0, [10, 11, 12]] = torch.tensor([3.0, 2.9, 2.0])
    kwargs = {"temperature": 0.0, "prompt": (10, 10, 10)}
    assert sample([make(**kwargs, presence_penalty=2.0)], logits)[0].token_id == 10
    once = make(**kwargs, output=(10,), presence_penalty=0.2)
    assert sample([once], logits)[0].token_id == 11
    thrice = make(**kwargs, output=(10, 10, 10, 11, 11), frequency_penalty=0.49)
    assert sample([thrice], logits)[0].token_id == 12


def test_repetition_penalty_over_prompt_and_output() -> None:
    logits = random_logits(1)
    sequence = make(prompt=tuple(range(500)), output=(7, 900), temperature=0.0, repetition_penalty=1.8)
    expected = RepetitionPenaltyLogitsProcessor(1.8)(torch.tensor([sequence.token_ids]), logits.clone())
    assert sample([sequence], logits)[0].token_id == int(expected.argmax())
    assert int(expected.argmax()) != int(logits.argmax())


def test_logit_bias_and_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 4], logits[0, 5] = 9.0, 8.0
    assert sample([make(temperature=0.0, logit_bias={4: -100.0})], logits)[0].token_id == 5
    assert sample([make(temperature=0.0, logit_bias={6: 100.0})], logits)[0].token_id == 6
    waiting = make(temperature=0.0, min_tokens=1, stop_token_ids=(4,), eos=(5,), logit_bias={4: 50.0})
    assert sample([waiting], logits)[0].token_id not in (4, 5)
    past = make(output=(1,), temperature=0.0, min_tokens=1, stop_token_ids=(4,))
    assert sample([past], logits)[0].token_id == 4


def test_logprobs_are_the_models_own() -> None:
    logits = random_logits(3)
    expected = logits.log_softmax(-1)
    sequences = [
        make(temperature=0.5, top_k=3, logit_bias={8: 100.0}, logprobs=4),
        make(temperature=0.0),
        make(temperature=0.0, logprobs=0),
    ]
    biased, plain, bare = sample(sequences, logits)
    assert plain.logprob is None
    assert biased.token_id == biased.logprob.token_id == 8
    assert biased.logprob.logprob == pytest.approx(float(expected[0, 8]))
    values, ids = expected[0].topk(4)
    assert [token_id for token_id, _ in biased.logprob.top] == ids.tolist()
    assert [value for _, value in biased.logprob.top] == pytest.approx(values.tolist())
    assert bare.logprob.top == ()
    assert bare.logprob.logprob == pytest.approx(float(expected[2].max()))


def test_not_a_number_is_reported_per_row() -> None:
    logits = random_logits(3)
    logits[1, 17] = float("nan")
    for temperature in (0.0, 1.0):
        samples = sample([make(temperature=temperature)] * 3, logits)
        assert [item is None for item in samples] == [False, True, False]
