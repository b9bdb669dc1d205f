"""The engine's contract with its caller: limits, endings, fairness, and that nothing is left behind."""

from __future__ import annotations

import random

import pytest
import torch

from omnistage.engine.engine import EmbeddingRows, Engine, EngineConfig, TokenRows
from omnistage.errors import ContextOverflow, InvalidRequest, PipelineError, RequestFailed
from omnistage.types import FinishReason, SamplingParams, Usage


def greedy(**kwargs: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 20, **kwargs})


def run(tiny, collected, request, **limits: object):
    engine = tiny.engine(**limits)
    engine.add_request(request)
    collected.drain(engine)
    return collected.last(request.request_id)


def test_max_tokens(llama, collected) -> None:
    request = llama.request(*llama.prompts([9]), max_tokens=5)
    last = run(llama, collected, request)
    assert last.finish_reason is FinishReason.LENGTH
    assert last.usage == Usage(prompt_tokens=9, completion_tokens=5, cached_tokens=0)
    assert [len(output.token_ids) for output in collected.outputs[request.request_id]] == [1] * 5


def test_end_of_sequence_and_stop_tokens(llama, collected) -> None:
    (prompt,) = llama.prompts([9])
    free = llama.request(prompt, max_tokens=20)
    run(llama, collected, free)
    tokens = collected.token_ids[free.request_id]
    ending = tokens[6]
    first = tokens.index(ending)
    for kwargs in (
        {"eos_token_ids": (ending,), "sampling": greedy()},
        {"sampling": greedy(stop_token_ids=(ending,), ignore_eos=True)},
    ):
        request = llama.request(prompt, **kwargs)
        last = run(llama, collected, request)
        assert last.finish_reason is FinishReason.STOP
        assert collected.token_ids[request.request_id] == tokens[: first + 1]
    ignoring = llama.request(prompt, eos_token_ids=(ending,), sampling=greedy(ignore_eos=True))
    run(llama, collected, ignoring)
    assert collected.token_ids[ignoring.request_id] == tokens


def test_min_tokens_forbids_an_early_end(llama, collected) -> None:
    (prompt,) = llama.prompts([9])
    free = llama.request(prompt, max_tokens=20)
    run(llama, collected, free)
    ending = collected.token_ids[free.request_id][0]
    request = llama.request(prompt, eos_token_ids=(ending,), sampling=greedy(min_tokens=8))
    run(llama, collected, request)
    tokens = collected.token_ids[request.request_id]
    assert ending not in tokens[:8]
    assert len(tokens) > 8


def test_ends_at_the_context_limit(llama, collected) -> None:
    request = llama.request(*llama.prompts([30]), max_tokens=1000)
    last = run(llama, collected, request, max_model_len=40)
    assert last.finish_reason is FinishReason.LENGTH
    assert last.usage.completion_tokens == 10
    request = llama.request(*llama.prompts([30]), max_tokens=1000)
    assert run(llama, collected, request, num_blocks=3).usage.completion_tokens == 18


@pytest.mark.parametrize("limits", [{"max_model_len": 30}, {"num_blocks": 1}])
def test_context_overflow(llama, limits: dict[str, int]) -> None:
    engine = llama.engine(**limits)
    (prompt,) = llama.prompts([30])
    with pytest.raises(ContextOverflow, match="30 tokens"):
        engine.add_request(llama.request(prompt))
    opened = llama.request(prompt[:10], prompt_is_complete=False)
    engine.add_request(opened)
    with pytest.raises(ContextOverflow):
        engine.extend_prompt(opened.request_id, (TokenRows(prompt[:20]),), is_complete=True)
    engine.abort(opened.request_id)
    assert engine.stats().num_waiting == 0
    assert not engine.has_work


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"min_p": 2.0},
        {"repetition_penalty": 0.0},
        {"presence_penalty": 3.0},
        {"frequency_penalty": float("inf")},
        {"max_tokens": 0},
        {"min_tokens": 30},
        {"logprobs": -1},
        {"logit_bias": {99999: 1.0}},
        {"logit_bias": {1: float("nan")}},
        {"stop_token_ids": (-1,)},
    ],
)
def test_invalid_sampling(llama, bad: dict[str, object]) -> None:
    engine = llama.engine()
    with pytest.raises(InvalidRequest, match=next(iter(bad))) as caught:
        engine.add_request(llama.request((1, 2), sampling=greedy(**bad)))
    assert caught.value.param == next(iter(bad))
    assert not engine.has_work


def test_invalid_rows(llama) -> None:
    engine = llama.engine()
    hidden = llama.decoder.config.hidden_size
    for rows in (
        (),
        ((),),
        ((320,),),
        ((-1,),),
        (EmbeddingRows(torch.zeros(3, hidden + 1), None),),
        (EmbeddingRows(torch.full((3, hidden), float("nan")), None),),
    ):
        with pytest.raises(InvalidRequest):
            engine.add_request(llama.request(*rows))
    with pytest.raises(InvalidRequest, match="vocabulary"):
        engine.add_request(llama.request((1, 2), forced_token_ids=(4, 400)))
    request = llama.request((1, 2))
    engine.add_request(request)
    with pytest.raises(InvalidRequest, match="in use"):
        engine.add_request(request)
    with pytest.raises(InvalidRequest, match="already complete"):
        engine.extend_prompt(request.request_id, (TokenRows((1,)),), is_complete=True)


@pytest.mark.parametrize(
    "limits",
    [
        {"num_blocks": None},
        {"kv_bytes": 1 << 20},
        {"num_blocks": None, "kv_bytes": 10},
        {"num_blocks": 0},
        {"max_num_seqs": 0},
        {"max_model_len": 513},
        {"dtype": torch.bfloat16},
    ],
)
def test_contradicting_limits(llama, limits: dict[str, object]) -> None:
    with pytest.raises(PipelineError):
        llama.engine(**limits)


def test_kv_bytes(llama) -> None:
    per_block = llama.decoder.kv_bytes_per_block(16)
    assert per_block == 3 * 16 * 2 * 2 * 16 * 4  # layers, rows, key and value, heads, head size, bytes
    config = EngineConfig(kv_bytes=10 * per_block + 1, max_model_len=64)
    assert Engine(llama.decoder, config).stats().blocks_total == 10


def test_finish_ends_a_request_with_its_usage(llama, collected) -> None:
    request = llama.request(*llama.prompts([20]))
    engine = llama.engine()
    engine.add_request(request)
    for _ in range(4):
        collected.step(engine)
    usage = engine.finish(request.request_id, FinishReason.STOP)
    assert usage == Usage(prompt_tokens=20, completion_tokens=4)
    assert engine.finish(request.request_id, FinishReason.STOP) is None
    assert not engine.has_work
    assert engine.stats().blocks_used == 0


def test_forced_output_that_is_already_complete(llama, collected) -> None:
    engine = llama.engine()
    full = llama.request((1, 2, 3), max_tokens=4, forced_token_ids=(5, 6, 7, 8))
    ended = llama.request((1, 2, 3), forced_token_ids=(5, 6), eos_token_ids=(6,), sampling=greedy())
    late = llama.request((1, 2, 3), max_tokens=1, forced_token_ids=(5,), prompt_is_complete=False)
    for request in (full, ended, late):
        engine.add_request(request)
    assert engine.has_work
    collected.drain(engine)
    assert collected.last(full.request_id).finish_reason is FinishReason.LENGTH
    assert collected.last(full.request_id).usage.completion_tokens == 4
    assert collected.last(ended.request_id).finish_reason is FinishReason.STOP
    assert late.request_id not in collected.outputs
    engine.extend_prompt(late.request_id, (), is_complete=True)
    collected.drain(engine)
    assert collected.last(late.request_id).finish_reason is FinishReason.LENGTH
    assert all(not tokens for tokens in collected.token_ids.values())


def test_has_work_is_false_while_prompts_are_open(llama, collected) -> None:
    engine = llama.engine()
    assert not engine.has_work
    request = llama.request((1, 2, 3), prompt_is_complete=False)
    empty = llama.request(prompt_is_complete=False)
    engine.add_request(request)
    engine.add_request(empty)
    assert engine.has_work
    collected.step(engine)
    assert engine.last_scheduled == [request.request_id]
    assert not engine.has_work
    assert engine.step() == []
    engine.extend_prompt(request.request_id, (TokenRows((4,)),), is_complete=True)
    assert engine.has_work
    engine.abort(request.request_id)
    assert not engine.has_work
    engine.extend_prompt(request.request_id, (TokenRows((4,)),), is_complete=True)  # late: ignored


def test_open_prompts_do_not_hold_blocks_against_others(llama, collected) -> None:
    """Open prompts fill the pool; complete requests run anyway, and the open ones finish later."""
    engine = llama.engine(num_blocks=8, max_num_seqs=2)
    prompts = llama.prompts([60, 60, 50])
    opened = [llama.request(prompt, prompt_is_complete=False, max_tokens=5) for prompt in prompts[:2]]
    complete = llama.request(prompts[2], max_tokens=40)
    for request in (*opened, complete):
        engine.add_request(request)
    collected.drain(engine)
    llama.assert_greedy(complete, collected.token_ids[complete.request_id])
    for request in opened:
        engine.extend_prompt(request.request_id, (), is_complete=True)
    collected.drain(engine)
    for request in opened:
        llama.assert_greedy(request, collected.token_ids[request.request_id])
    assert engine.stats().blocks_used == 0


def test_priority_and_deadline_order_admission(llama, collected) -> None:
    engine = llama.engine(max_num_seqs=1)
    late = llama.request((1, 2), max_tokens=2, request_id="late")
    soon = llama.request((1, 2), max_tokens=2, request_id="soon", deadline=5.0)
    first = llama.request((1, 2), max_tokens=2, request_id="first", priority=-1)
    for request in (late, soon, first):
        engine.add_request(request)
    collected.drain(engine)
    assert list(collected.token_ids) == ["first", "soon", "late"]


def test_a_long_prompt_does_not_stop_others(llama, collected) -> None:
    engine = llama.engine(max_num_batched_tokens=24, max_prefill_tokens_per_request=16)
    talking = llama.request(*llama.prompts([5]), max_tokens=30)
    engine.add_request(talking)
    collected.step(engine)
    engine.add_request(llama.request(*llama.prompts([400]), max_tokens=1))
    before = len(collected.token_ids[talking.request_id])
    for _ in range(10):
        collected.step(engine)
    assert len(collected.token_ids[talking.request_id]) == before + 10


def test_abort_storm_leaves_nothing(llama, collected) -> None:
    """Requests are aborted in every state: queued, in prefill, open, decoding, preempted, finished."""
    chance = random.Random(0)
    engine = llama.engine(num_blocks=24, max_num_batched_tokens=40, max_prefill_tokens_per_request=16)
    alive: list[str] = []
    for length in [chance.randint(1, 120) for _ in range(200)]:
        request = llama.request(
            *llama.prompts([length], seed=length % 5),
            max_tokens=chance.randint(1, 30),
            prompt_is_complete=chance.random() < 0.7,
        )
        engine.add_request(request)
        alive.append(request.request_id)
        for _ in range(chance.randint(0, 2)):
            collected.step(engine)
        if len(alive) > 8:
            victim = alive.pop(chance.randrange(len(alive)))
            engine.abort(victim)
            engine.abort(victim)
    for request_id in alive:
        engine.abort(request_id)
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.blocks_used) == (0, 0, 0)
    assert stats.preemptions > 0
    assert not engine.has_work
    assert engine.step() == []


def test_not_a_number_fails_only_its_request(llama, collected, monkeypatch) -> None:
    """Also later owners of the failed request's blocks, cached or not, see no NaN."""
    engine = llama.engine(num_blocks=8)
    sane, failing = (llama.request(prompt) for prompt in llama.prompts([20, 40]))
    engine.add_request(sane)
    engine.add_request(failing)
    forward = llama.decoder.forward

    def poisoned(hidden, positions, metadata):
        hidden[20:] = float("nan")  # the rows of the second prompt
        return forward(hidden, positions, metadata)

    monkeypatch.setattr(llama.decoder, "forward", poisoned)
    collected.step(engine)
    monkeypatch.undo()
    assert isinstance(collected.last(failing.request_id).error, RequestFailed)
    again = llama.request(failing.rows[0].token_ids)
    engine.add_request(again)
    collected.drain(engine)
    for request in (sane, again):
        llama.assert_greedy(request, collected.token_ids[request.request_id])
    assert engine.stats().blocks_used == 0


def test_stats(llama, collected) -> None:
    engine = llama.engine(max_num_seqs=1)
    requests = [llama.request(prompt, max_tokens=3) for prompt in llama.prompts([33, 20])]
    for request in requests:
        engine.add_request(request)
    collected.step(engine)
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.blocks_used, stats.steps) == (1, 1, 3, 1)
    collected.drain(engine)
    stats = engine.stats()
    assert stats.tokens == 33 + 20 + 2 * 2
    assert (stats.blocks_used, stats.blocks_cached, stats.blocks_total) == (0, 3, 256)
