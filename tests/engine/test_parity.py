"""Greedy output equals the reference's, however the engine cuts, batches, shares and repeats the work."""

from __future__ import annotations

import pytest
import torch

from omnistage.engine.engine import EmbeddingRows, Engine, EngineConfig, EngineRequest, TokenRows
from omnistage.models.decoder import load_decoder
from omnistage.types import SamplingParams

MIXED = [1, 2, 3, 15, 16, 17, 31, 32, 33, 5, 60, 8, 100, 47, 64, 23]  # rows around block boundaries


def test_alone(tiny, collected) -> None:
    request = tiny.request(*tiny.prompts([37]))
    engine = tiny.engine()
    engine.add_request(request)
    tokens = collected.drain(engine).token_ids[request.request_id]
    assert len(tokens) == 64
    tiny.assert_greedy(request, tokens)


def test_equals_generate(llama, collected) -> None:
    """The shortcut of the other tests (one teacher-forced pass) stands on the reference's own loop."""
    (prompt,) = llama.prompts([20], seed=3)
    request = llama.request(prompt)
    engine = llama.engine()
    engine.add_request(request)
    generated = llama.reference.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=64,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert collected.drain(engine).token_ids[request.request_id] == generated[0, len(prompt) :].tolist()


@pytest.mark.parametrize("prefill", [1, 7, 64])
def test_mixed_batch_in_chunks(tiny, collected, prefill: int) -> None:
    requests = [tiny.request(prompt) for prompt in tiny.prompts(MIXED)]
    engine = tiny.engine(max_prefill_tokens_per_request=prefill)
    for request in requests:
        engine.add_request(request)
    collected.drain(engine)
    for request in requests:
        assert len(collected.token_ids[request.request_id]) == 64
        tiny.assert_greedy(request, collected.token_ids[request.request_id])


def test_step_budget_smaller_than_batch(llama, collected) -> None:
    requests = [llama.request(prompt, max_tokens=20) for prompt in llama.prompts(MIXED)]
    engine = llama.engine(max_num_batched_tokens=5, max_num_seqs=3)
    for request in requests:
        engine.add_request(request)
    collected.drain(engine)
    for request in requests:
        llama.assert_greedy(request, collected.token_ids[request.request_id])


def test_prefix_hits(tiny, collected) -> None:
    engine = tiny.engine()
    shared, tail = tiny.prompts([50, 30])
    requests = [tiny.request(shared), tiny.request(shared), tiny.request((*shared[:40], *tail))]
    for request in requests:
        engine.add_request(request)
        collected.drain(engine)
        tiny.assert_greedy(request, collected.token_ids[request.request_id])
    cached = [collected.last(request.request_id).usage.cached_tokens for request in requests]
    assert cached == [0, 48, 32]
    assert engine.stats().prefix_hit_tokens == 80


def test_whole_prompt_cached(llama, collected) -> None:
    """A prompt of whole blocks still computes its last row, and the answer's blocks are shared too."""
    (prompt,) = llama.prompts([48])
    engine = llama.engine()
    first = llama.request(prompt)
    engine.add_request(first)
    answer = collected.drain(engine).token_ids[first.request_id]
    again = llama.request(prompt)
    longer = llama.request((*prompt, *answer))  # as the next turn of a conversation
    for request in (again, longer):
        engine.add_request(request)
        collected.drain(engine)
        llama.assert_greedy(request, collected.token_ids[request.request_id])
    assert collected.last(again.request_id).usage.cached_tokens == 32
    assert collected.last(longer.request_id).usage.cached_tokens == 96


def test_identical_requests_at_once_share_blocks(llama, collected) -> None:
    (prompt,) = llama.prompts([200])
    requests = [llama.request(prompt, max_tokens=8) for _ in range(4)]
    engine = llama.engine(max_prefill_tokens_per_request=32, max_num_batched_tokens=32)
    for request in requests:
        engine.add_request(request)
    collected.drain(engine)
    for request in requests:
        llama.assert_greedy(request, collected.token_ids[request.request_id])
    assert engine.stats().prefix_hit_tokens >= 3 * 160


def test_preemption(tiny, collected) -> None:
    requests = [tiny.request(prompt) for prompt in tiny.prompts([40, 33, 17, 60, 5, 50])]
    engine = tiny.engine(num_blocks=16)
    for request in requests:
        engine.add_request(request)
    collected.drain(engine)
    assert engine.stats().preemptions > 0
    assert engine.stats().blocks_used == 0
    for request in requests:
        assert len(collected.token_ids[request.request_id]) == 64
        tiny.assert_greedy(request, collected.token_ids[request.request_id])


def test_preemption_without_prefix_cache(llama, collected) -> None:
    requests = [llama.request(prompt) for prompt in llama.prompts([40, 33, 17, 60, 5, 50])]
    engine = llama.engine(num_blocks=16, enable_prefix_cache=False, max_prefill_tokens_per_request=7)
    for request in requests:
        engine.add_request(request)
    collected.drain(engine)
    assert engine.stats().preemptions > 0
    assert engine.stats().prefix_hit_tokens == 0
    for request in requests:
        llama.assert_greedy(request, collected.token_ids[request.request_id])


def embedding_rows(tiny, num_rows: int, seed: int, digest: str | None) -> EmbeddingRows:
    hidden = tiny.decoder.config.hidden_size
    generator = torch.Generator().manual_seed(seed)
    return EmbeddingRows(0.25 * torch.randn(num_rows, hidden, generator=generator), digest)


@pytest.mark.parametrize("prefill", [1, 7, 64])
def test_embeddings_anywhere(tiny, collected, prefill: int) -> None:
    first, second, third = tiny.prompts([13, 22, 1])
    requests = [
        tiny.request(first, embedding_rows(tiny, 20, 1, "a"), second),
        tiny.request(embedding_rows(tiny, 5, 2, None), first, embedding_rows(tiny, 1, 3, "b")),
        tiny.request(third, embedding_rows(tiny, 3, 4, "c"), embedding_rows(tiny, 40, 5, None), second),
        tiny.request(first),
    ]
    engine = tiny.engine(max_prefill_tokens_per_request=prefill)
    for request in requests:
        engine.add_request(request)
    collected.drain(engine)
    for request in requests:
        tiny.assert_greedy(request, collected.token_ids[request.request_id])


def test_prefix_hit_inside_embeddings(tiny, collected) -> None:
    """A cached prefix ends in the middle of a picture: the rest comes from the given embeddings."""
    text, other, question = tiny.prompts([10, 10, 9])
    picture = embedding_rows(tiny, 50, 1, "picture")
    engine = tiny.engine()
    requests = [
        tiny.request(text, picture, question),
        tiny.request(text, picture, other),
        tiny.request(other, picture, question),
        tiny.request(text, EmbeddingRows(-picture.embeddings, "another"), question),
        tiny.request(text, EmbeddingRows(-picture.embeddings, None), question),
    ]
    for request in requests:
        engine.add_request(request)
        collected.drain(engine)
        tiny.assert_greedy(request, collected.token_ids[request.request_id])
    cached = [collected.last(request.request_id).usage.cached_tokens for request in requests]
    assert cached == [0, 48, 0, 0, 0]


def test_rows_without_digest_are_not_shared(llama, collected) -> None:
    (text,) = llama.prompts([40])
    engine = llama.engine()
    requests = [llama.request(text, embedding_rows(llama, 40, seed, None), text) for seed in (1, 2)]
    for request in requests:
        engine.add_request(request)
        collected.drain(engine)
        llama.assert_greedy(request, collected.token_ids[request.request_id])
    assert collected.last(requests[1].request_id).usage.cached_tokens == 32  # the text in front


def test_salt_separates(llama, collected) -> None:
    (prompt,) = llama.prompts([40])
    engine = llama.engine()
    requests = [llama.request(prompt, cache_salt=salt) for salt in ("a", "b", "a")]
    for request in requests:
        engine.add_request(request)
        collected.drain(engine)
    cached = [collected.last(request.request_id).usage.cached_tokens for request in requests]
    assert cached == [0, 0, 32]


def test_embeddings_survive_preemption(llama, collected) -> None:
    texts = llama.prompts([13, 20, 9, 30])
    requests = [
        llama.request(text, embedding_rows(llama, 25, index, None), text[:5])
        for index, text in enumerate(texts)
    ]
    engine = llama.engine(num_blocks=14)
    for request in requests:
        engine.add_request(request)
    collected.drain(engine)
    assert engine.stats().preemptions > 0
    for request in requests:
        llama.assert_greedy(request, collected.token_ids[request.request_id])


def test_open_prompt(tiny, collected) -> None:
    first, second, neighbour = tiny.prompts([40, 21, 12])
    picture = embedding_rows(tiny, 18, 1, "picture")
    whole = tiny.request(first, picture, second)
    request = tiny.request(first, request_id=whole.request_id, prompt_is_complete=False)
    other = tiny.request(neighbour, max_tokens=30)
    engine = tiny.engine()
    engine.add_request(request)
    collected.drain(engine)
    assert engine.stats().tokens == 39  # the last known row waits
    engine.add_request(other)
    collected.drain(engine)
    tiny.assert_greedy(other, collected.token_ids[other.request_id])
    engine.extend_prompt(request.request_id, (picture,), is_complete=False)
    collected.drain(engine)
    assert request.request_id not in collected.token_ids
    engine.extend_prompt(request.request_id, (TokenRows(second),), is_complete=True)
    collected.drain(engine)
    tiny.assert_greedy(whole, collected.token_ids[request.request_id])


def test_open_prompt_completed_without_rows(llama, collected) -> None:
    for length in (1, 16, 33):
        (prompt,) = llama.prompts([length])
        request = llama.request(prompt, prompt_is_complete=False, max_tokens=10)
        engine = llama.engine()
        engine.add_request(request)
        collected.drain(engine)
        engine.extend_prompt(request.request_id, (), is_complete=True)
        collected.drain(engine)
        llama.assert_greedy(request, collected.token_ids[request.request_id])


def test_cached_rows_behind_an_open_prompt(llama, collected) -> None:
    """Rows that arrive late are found in the cache too, although the prompt stopped inside a block."""
    first, second = llama.prompts([20, 40])
    whole = llama.request(first, second)
    engine = llama.engine()
    engine.add_request(whole)
    collected.drain(engine)
    request = llama.request(first, prompt_is_complete=False)
    engine.add_request(request)
    collected.drain(engine)
    engine.extend_prompt(request.request_id, (TokenRows(second),), is_complete=True)
    collected.drain(engine)
    assert collected.token_ids[request.request_id] == collected.token_ids[whole.request_id]
    assert collected.last(request.request_id).usage.cached_tokens == 45  # all of 48 but rows 16 to 18


@pytest.mark.parametrize("num_forced", [1, 15, 40, 63])
def test_forced_tokens(tiny, collected, num_forced: int) -> None:
    (prompt,) = tiny.prompts([25])
    first = tiny.request(prompt)
    engine = tiny.engine(enable_prefix_cache=False)
    engine.add_request(first)
    tokens = collected.drain(engine).token_ids[first.request_id]
    replay = tiny.request(prompt, forced_token_ids=tuple(tokens[:num_forced]))
    engine.add_request(replay)
    collected.drain(engine)
    assert collected.token_ids[replay.request_id] == tokens[num_forced:]
    assert collected.last(replay.request_id).usage == collected.last(first.request_id).usage


@pytest.mark.starter
def test_starter_equals_reference(starter_dir, collected) -> None:
    directory = starter_dir / "thinker"
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    texts = [
        "The capital of France is",
        "<|im_start|>user\nTell me a story about a cat.<|im_end|>\n<|im_start|>assistant\n",
        "1 2 3 5 8",
    ]
    prompts = [tuple(tokenizer.encode(text).ids) for text in texts]
    engine = Engine(
        load_decoder(directory, dtype=torch.float32),
        EngineConfig(num_blocks=64, max_model_len=1024, max_prefill_tokens_per_request=7),
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add_request(EngineRequest(request_id=str(index), rows=(TokenRows(prompt),), sampling=sampling))
    collected.drain(engine)
    reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for index, prompt in enumerate(prompts):
        tokens = collected.token_ids[str(index)]
        with torch.no_grad():
            logits = reference(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, len(prompt) - 1 :]
        best = logits.topk(2).values
        matches = logits.argmax(-1) == torch.tensor(tokens)
        assert bool((matches | (best[:, 0] - best[:, 1] < 1e-4)).all())
