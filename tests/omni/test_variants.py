"""The same answers however the work is cut, shared, repeated or placed."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch

from omnistage.models.qwen3_omni_talker import load_talker
from omnistage.models.qwen3_omni_thinker import load_thinker
from omnistage.types import TokenSegment
from tests.faults.starter import until
from tests.models.qwen3_reference import MAX_CODES, MAX_TOKENS, OMNI_CASES, omni_answer
from tests.omni.asking import ask, assert_equals_reference, omni_graph, question, running

CASES = ("image", "audio", "all", "audio_in_video")
LLMS = ("thinker", "talker")


async def ask_all(spec, directory, cases, *, counted=None, **fields):
    """Each case once, all at the same time; then what the pipeline counted.

    counted: (stage, gauge) to wait for until it is above zero.
    """
    async with running(spec) as pipeline:
        heard = await asyncio.gather(
            *(
                ask(pipeline, question(directory, case, name=f"{case}-{index}", **fields))
                for index, case in enumerate(cases)
            )
        )
        if counted is not None:
            stage, name = counted
            await until(
                lambda: pipeline.orchestrator.gauges()[stage].get(name, 0) > 0,
                lambda: f"{stage} counts no {name}",
            )
        return heard, pipeline.orchestrator.gauges()


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_prefill_in_chunks(rows, qwen3_omni_dir):
    limits = {"max_num_batched_tokens": rows, "max_num_seqs": min(rows, 8)}
    changes = dict.fromkeys(LLMS, limits)
    cases = CASES if rows > 1 else ("image", "audio")
    heard, _ = asyncio.run(ask_all(omni_graph(qwen3_omni_dir, changes=changes), qwen3_omni_dir, cases))
    for case, answer in zip(cases, heard, strict=True):
        assert_equals_reference(answer, qwen3_omni_dir, case)


def test_sixteen_at_once_in_random_order(qwen3_omni_dir):
    cases = [*OMNI_CASES, *OMNI_CASES]
    random.Random(5).shuffle(cases)
    # every medium comes twice and is encoded once
    asked = ask_all(omni_graph(qwen3_omni_dir), qwen3_omni_dir, cases, counted=("vision", "cache_hits"))
    heard, _ = asyncio.run(asked)
    for case, answer in zip(cases, heard, strict=True):
        assert_equals_reference(answer, qwen3_omni_dir, case)


def test_prefix_found_again(qwen3_omni_dir):
    """The second answer's rows, and those the talker hears, come out of the cache."""

    async def scenario():
        async with running(omni_graph(qwen3_omni_dir)) as pipeline:
            for turn in range(2):
                for case in CASES:
                    heard = await ask(pipeline, question(qwen3_omni_dir, case, name=f"{case}-{turn}"))
                    assert_equals_reference(heard, qwen3_omni_dir, case)
                    assert turn == 0 or heard.done.usage.cached_tokens > 0

    asyncio.run(scenario())


def test_prefix_that_ends_inside_a_picture(qwen3_omni_dir):
    """Blocks of 16 rows end in the middle of the picture that two prompts share."""

    async def scenario():
        async with running(omni_graph(qwen3_omni_dir)) as pipeline:
            first = await ask(pipeline, question(qwen3_omni_dir, "image"))
            second = await ask(pipeline, question(qwen3_omni_dir, "two_images"))
            return first, second

    first, second = asyncio.run(scenario())
    assert_equals_reference(first, qwen3_omni_dir, "image")
    assert_equals_reference(second, qwen3_omni_dir, "two_images")
    assert second.done.usage.cached_tokens > 0


@pytest.mark.parametrize("stage", ["thinker", "talker"])
def test_preemption(stage, qwen3_omni_dir):
    """One KV pool holds little more than the longest request: others give way and start over."""
    cases = ("text", "text", "text", "image", "text", "audio", "text")
    longest = max(len(omni_answer(qwen3_omni_dir, case).prompt_ids) for case in cases)
    rows = longest + (MAX_TOKENS if stage == "thinker" else MAX_CODES) + 16
    changes = {stage: {"kv_cache": kv_bytes(qwen3_omni_dir, stage, rows)}}
    spec = omni_graph(qwen3_omni_dir, changes=changes)
    heard, _ = asyncio.run(ask_all(spec, qwen3_omni_dir, cases, counted=(stage, "preemptions")))
    for case, answer in zip(cases, heard, strict=True):
        assert_equals_reference(answer, qwen3_omni_dir, case)


def kv_bytes(directory, stage, rows):
    """Of a cache of so many rows, in whole blocks; the thinker's hold captured rows as well."""
    model = {"thinker": load_thinker, "talker": load_talker}[stage](directory, dtype=torch.float32)
    captured = 16 * 4 * model.config.hidden_size if stage == "thinker" else 0
    return -(-rows // 16) * (model.kv_bytes_per_block(16) + captured)


@pytest.mark.parametrize(("first_chunk", "chunk"), [(1, 1), (4, 4), (4, 25), (1000, 1000)])
def test_vocoder_chunks(first_chunk, chunk, qwen3_omni_dir):
    spec = omni_graph(qwen3_omni_dir, first_chunk=first_chunk, chunk=chunk)
    heard, _ = asyncio.run(ask_all(spec, qwen3_omni_dir, CASES))
    for case, answer in zip(CASES, heard, strict=True):
        assert_equals_reference(answer, qwen3_omni_dir, case)
    num_pieces = [len(answer.pieces) for answer in heard]
    assert all(number == 1 for number in num_pieces) if chunk == 1000 else max(num_pieces) > 1


def test_replicas(qwen3_omni_dir):
    changes = {stage: {"replicas": 2} for stage in ("vision", "thinker", "talker", "vocoder")}
    spec = omni_graph(qwen3_omni_dir, changes=changes)
    heard, gauges = asyncio.run(ask_all(spec, qwen3_omni_dir, OMNI_CASES))
    for case, answer in zip(OMNI_CASES, heard, strict=True):
        assert_equals_reference(answer, qwen3_omni_dir, case)
    assert gauges["talker"]["ready_replicas"] == 2


def test_text_alone_wakes_neither_talker_nor_vocoder(qwen3_omni_dir):
    heard, gauges = asyncio.run(ask_all(omni_graph(qwen3_omni_dir), qwen3_omni_dir, CASES, outputs=("text",)))
    for case, answer in zip(CASES, heard, strict=True):
        assert answer.token_ids == omni_answer(qwen3_omni_dir, case).tokens
        assert not answer.pieces
    assert gauges["talker"]["steps"] == 0
    assert gauges["vocoder"]["chunks"] == 0


def test_nothing_is_left_behind(qwen3_omni_dir):
    """After answers and aborts, no stage holds a request or a block."""

    async def scenario():
        async with running(omni_graph(qwen3_omni_dir)) as pipeline:
            await ask(pipeline, question(qwen3_omni_dir, "all"))
            for index in range(6):
                stream = pipeline.orchestrator.submit(question(qwen3_omni_dir, "image", name=f"gone-{index}"))
                if index % 2:
                    await anext(aiter(stream))
                await stream.aclose()
            held = [replica.held for replica in pipeline.orchestrator.replicas.all()]
            await until(lambda: not any(held), lambda: held)

            def left() -> dict[str, float]:
                gauges = pipeline.orchestrator.gauges()
                names = ("kv_blocks_used", "requests", "open_requests")
                return {f"{stage}.{name}": gauges[stage][name] for stage in LLMS for name in names}

            # a worker's last word about a request may precede its gauges
            await until(lambda: not any(left().values()), left)
            assert pipeline.orchestrator.gauges()["thinker"]["tokens"] > 0

    asyncio.run(scenario())


def test_a_long_prompt_leaves_room_for_a_short_one(qwen3_omni_dir):
    """Half of each step is for others: the short answer is whole before the long prompt is read."""
    changes = {"thinker": {"max_num_batched_tokens": 16, "max_num_seqs": 8}}

    async def scenario():
        async with running(omni_graph(qwen3_omni_dir, changes=changes)) as pipeline:
            long = [TokenSegment(tuple(range(3, 600)) * 8)]
            slow = question(qwen3_omni_dir, "text", name="long", outputs=("text",), segments=tuple(long))
            first = asyncio.create_task(ask(pipeline, slow))
            await until(lambda: pipeline.orchestrator.gauges()["thinker"].get("tokens", 0) > 0)
            short = await ask(pipeline, question(qwen3_omni_dir, "text", outputs=("text",)))
            was_first = not first.done()
            await first
            return short, was_first

    short, was_first = asyncio.run(scenario())
    assert short.token_ids == omni_answer(qwen3_omni_dir, "text").tokens
    assert was_first
