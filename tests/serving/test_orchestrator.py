"""Orchestrator, workers and stages together, in one process over the memory network."""

from __future__ import annotations

import asyncio
import dataclasses
import io

import numpy as np
import pytest
from PIL import Image

from omnistage.errors import Draining, InvalidRequest, MediaError, Overloaded, ReplayExhausted, StreamError
from omnistage.serving.launch import LaunchOptions, start_pipeline
from omnistage.serving.requests import AudioDelta, Done, GenerateRequest, TextDelta
from omnistage.transport import MemoryNetwork
from omnistage.transport.messages import Chunk
from omnistage.types import Media, MediaSegment, SamplingParams, TokenSegment
from tests.serving.toy_models import ToyEye, toy_builder, toy_graph


def start(spec=None, *, network=None, **builder):
    options = LaunchOptions(mode="threads", build=toy_builder(**builder), network=network, drain_seconds=2.0)
    return start_pipeline(spec or toy_graph(), options)


def picture(brightness=100):
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (brightness,) * 3).save(buffer, "PNG")
    return Media(key=f"picture-{brightness}", data=buffer.getvalue())


def request(name, *, outputs=("text",), tokens=8, **fields):
    return GenerateRequest(
        request_id=name,
        outputs=outputs,
        segments=fields.pop("segments", (TokenSegment((1, 2, 3)),)),
        sampling=SamplingParams(max_tokens=tokens),
        **fields,
    )


async def collect(pipeline, generate):
    async with asyncio.timeout(20):
        return await _collect(pipeline, generate)


async def _collect(pipeline, generate):
    stream = pipeline.orchestrator.submit(generate)
    text, ids, pcm, done = "", [], [np.zeros(0, np.float32)], None
    try:
        async for event in stream:
            if isinstance(event, TextDelta):
                text += event.text
                ids += event.token_ids
            elif isinstance(event, AudioDelta):
                pcm.append(event.pcm)
            else:
                done = event
    finally:
        await stream.aclose()
    assert isinstance(done, Done)
    return text, ids, np.concatenate(pcm), done


def expected_text(tokens, heard=""):
    return heard + "".join(f"W{i}" + (". " if i % 4 == 3 else " ") for i in range(tokens))


async def settled(pipeline):
    """Wait until no replica holds anything, as the orchestrator sees it."""
    for _ in range(400):
        if not any(replica.held for replica in pipeline.orchestrator.replicas.all()):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("a replica still holds a request")


async def gauge(pipeline, stage, name):
    """A stage's gauge, once its worker has reported for the first time."""
    for _ in range(400):
        gauges = pipeline.orchestrator.gauges()[stage]
        if name in gauges:
            return gauges[name]
        await asyncio.sleep(0.01)
    raise AssertionError(f"{stage} reported no {name}")


async def test_text_alone_never_wakes_talker_and_vocoder():
    async with start() as pipeline:
        await pipeline.wait_ready()
        text, ids, pcm, done = await collect(pipeline, request("a"))
        assert text == expected_text(8)
        assert ids == list(range(8))
        assert len(pcm) == 0
        assert [timing.stage for timing in done.timings] == ["thinker"]
        assert await gauge(pipeline, "talker", "sentences") == 0
        assert await gauge(pipeline, "vocoder", "samples") == 0


async def test_speech_follows_text():
    async with start() as pipeline:
        await pipeline.wait_ready()
        text, _, pcm, done = await collect(pipeline, request("a", outputs=("text", "audio"), tokens=12))
        assert text == expected_text(12)
        spoken = sum(map(len, ["W0 W1 W2 W3.", "W4 W5 W6 W7.", "W8 W9 W10 W11."]))
        assert len(pcm) == spoken * 10
        assert [timing.stage for timing in done.timings] == ["thinker", "talker", "vocoder"]
        assert done.usage.completion_tokens == 12


async def test_speech_is_the_same_alone_and_among_others():
    async with start() as pipeline:
        await pipeline.wait_ready()
        wanted = [
            request(f"r{index}", outputs=("text", "audio"), tokens=3 + index, seed=index)
            for index in range(16)
        ]
        together = await asyncio.gather(*(collect(pipeline, each) for each in wanted))
        for each, (text, ids, pcm, _) in zip(wanted, together, strict=True):
            alone = await collect(pipeline, each)
            assert (text, ids) == (alone[0], alone[1])
            np.testing.assert_array_equal(pcm, alone[2])
        await settled(pipeline)


async def test_picture_and_voice_reach_the_prompt_and_are_encoded_once():
    eye = ToyEye()
    async with start(eye=eye) as pipeline:
        await pipeline.wait_ready()
        asks = [
            request(
                f"r{index}",
                segments=(MediaSegment("vision", 0), TokenSegment((1,))),
                media={"vision": (picture(100),)},
            )
            for index in range(5)
        ]
        for text, _, _, _ in await asyncio.gather(*(collect(pipeline, each) for each in asks)):
            assert text == expected_text(8, heard="[100.0]")
        assert eye.num_encoded == 1
        await collect(pipeline, asks[0])
        assert eye.num_encoded == 1
        assert pipeline.orchestrator.gauges()["vision"]["cache_hits"] >= 5


async def test_bad_picture_fails_its_own_request_alone():
    async with start() as pipeline:
        await pipeline.wait_ready()
        segments = (MediaSegment("vision", 0), TokenSegment((1,)))
        bad = request("bad", segments=segments, media={"vision": (picture(0),)})
        torn = request(
            "torn", segments=segments, media={"vision": (Media(key="torn", data=picture(7).data[:40]),)}
        )
        good = request("good", segments=segments, media={"vision": (picture(9),)})
        results = await asyncio.gather(
            *(collect(pipeline, each) for each in (bad, good, torn)), return_exceptions=True
        )
        assert isinstance(results[0], MediaError)
        assert "black" in str(results[0])
        assert results[1][0] == expected_text(8, heard="[9.0]")
        assert isinstance(results[2], MediaError)
        await settled(pipeline)


async def test_speech_and_transcription_run_only_their_stages():
    async with start() as pipeline:
        await pipeline.wait_ready()
        spoken = request("s", outputs=("audio",), segments=(), entry="talker", text="Hello there.")
        _, _, pcm, done = await collect(pipeline, spoken)
        assert len(pcm) == len("Hello there.") * 10
        assert [timing.stage for timing in done.timings] == ["talker", "vocoder"]


def shout(text):
    return text.upper()


async def test_function_stage_changes_text_and_speech():
    spec = toy_graph(function=f"{__file__}:shout")
    async with start(spec) as pipeline:
        await pipeline.wait_ready()
        text, _, pcm, _ = await collect(pipeline, request("a", outputs=("text", "audio"), tokens=6))
        assert text == expected_text(6).upper()
        assert len(pcm) > 0


async def test_an_edge_that_does_not_stream_carries_one_message():
    spec = toy_graph(function=f"{__file__}:shout", granularity="delta")
    edges = tuple(
        dataclasses.replace(edge, stream=False) if edge.name == "thinker->change" else edge
        for edge in spec.edges
    )
    seen = []

    def intercept(source, to, message):
        if isinstance(message, Chunk) and message.edge == "thinker->change":
            seen.append(message.payload.text)
        return [message]

    async with start(
        dataclasses.replace(spec, edges=edges), network=MemoryNetwork(intercept=intercept)
    ) as pipeline:
        await pipeline.wait_ready()
        text, _, _, _ = await collect(pipeline, request("a", tokens=6))
    assert seen == [expected_text(6)]
    assert text == expected_text(6).upper()


def explode(text):
    raise ZeroDivisionError("boom")


async def test_a_failing_function_ends_its_request_with_its_own_error():
    spec = toy_graph(function=f"{__file__}:explode")
    async with start(spec) as pipeline:
        await pipeline.wait_ready()
        with pytest.raises(Exception, match=r"explode.*ZeroDivisionError: boom"):
            await collect(pipeline, request("a"))
        await settled(pipeline)


async def test_leaving_early_frees_every_stage():
    async with start(llm={"delay": 0.002}) as pipeline:
        await pipeline.wait_ready()
        for index in range(10):
            stream = pipeline.orchestrator.submit(
                request(f"r{index}", outputs=("text", "audio"), tokens=10_000)
            )
            async for event in stream:
                if isinstance(event, AudioDelta):
                    break
            await stream.aclose()
        await settled(pipeline)
        await collect(pipeline, request("last"))  # brings fresh gauges
        assert pipeline.orchestrator.gauges()["orchestrator"]["active_requests"] == 0


async def test_an_unread_answer_pauses_the_vocoder_and_nothing_is_lost():
    async with start() as pipeline:
        await pipeline.wait_ready()
        slow = request("slow", outputs=("text", "audio"), tokens=400)
        stream = pipeline.orchestrator.submit(slow)
        await asyncio.sleep(0.5)  # nobody reads
        samples = pipeline.orchestrator.gauges()["vocoder"].get("samples", 0)
        total = 0
        async for event in stream:
            if isinstance(event, AudioDelta):
                total += len(event.pcm)
        await stream.aclose()
        assert samples < total / 2
        _, _, pcm, _ = await collect(pipeline, request("again", outputs=("text", "audio"), tokens=400))
        assert len(pcm) == total


@pytest.mark.parametrize("crash_at", [0, 1, 5, 11])
async def test_a_crash_midway_is_replayed_and_delivery_continues(crash_at):
    async with start(llm={"crash_at": (0, crash_at)}) as pipeline:
        await pipeline.wait_ready()
        text, ids, pcm, done = await collect(pipeline, request("a", outputs=("text", "audio"), tokens=12))
        assert text == expected_text(12)
        assert ids == list(range(12))
        assert done.replays == 1
    async with start() as pipeline:
        await pipeline.wait_ready()
        undisturbed = await collect(pipeline, request("a", outputs=("text", "audio"), tokens=12))
        np.testing.assert_array_equal(pcm, undisturbed[2])


async def test_the_replay_budget_ends_in_one_clear_error():
    spec = toy_graph()

    class AlwaysCrash(tuple):
        def __eq__(self, other):
            return other[1] == 3

        __hash__ = None

    async with start(spec, llm={"crash_at": AlwaysCrash()}) as pipeline:
        await pipeline.wait_ready()
        with pytest.raises(ReplayExhausted, match="replay_budget"):
            await collect(pipeline, request("a", tokens=12))
        text, _, _, _ = await collect(pipeline, request("b", tokens=3))
        assert text == expected_text(3)


@pytest.mark.parametrize("fault", ["drop", "repeat"])
async def test_a_gap_or_a_repeat_in_a_stream_fails_loudly(fault):
    def intercept(source, to, message):
        if isinstance(message, Chunk) and message.edge == "thinker->talker" and message.sequence == 2:
            return [] if fault == "drop" else [message, message]
        return [message]

    async with start(network=MemoryNetwork(intercept=intercept)) as pipeline:
        await pipeline.wait_ready()
        with pytest.raises(StreamError, match="thinker->talker"):
            await collect(pipeline, request("a", outputs=("text", "audio"), tokens=12))
        await settled(pipeline)


async def test_a_full_queue_answers_at_once_and_says_when_to_return():
    spec = toy_graph()
    thinker = dataclasses.replace(spec.stages["thinker"], max_num_seqs=1)
    spec = dataclasses.replace(spec, max_queue=2, stages={**spec.stages, "thinker": thinker})
    async with start(spec, llm={"delay": 0.01}) as pipeline:
        await pipeline.wait_ready()
        streams = [pipeline.orchestrator.submit(request(f"r{i}", tokens=20)) for i in range(3)]
        with pytest.raises(Overloaded, match="max_queue") as caught:
            pipeline.orchestrator.submit(request("one too many"))
        assert caught.value.retry_after >= 1
        for stream in streams:
            assert [event async for event in stream][-1].finish_reason == "length"
            await stream.aclose()


async def test_draining_refuses_new_requests_and_finishes_old_ones():
    async with start(llm={"delay": 0.005}) as pipeline:
        await pipeline.wait_ready()
        answer = asyncio.create_task(collect(pipeline, request("a", tokens=20)))
        await asyncio.sleep(0.02)
        drain = asyncio.create_task(pipeline.orchestrator.drain(5.0))
        await asyncio.sleep(0)
        with pytest.raises(Draining):
            pipeline.orchestrator.submit(request("b"))
        await drain
        assert (await answer)[0] == expected_text(20)


async def test_media_for_a_stage_off_the_route_is_refused():
    async with start() as pipeline:
        await pipeline.wait_ready()
        with pytest.raises(InvalidRequest):
            pipeline.orchestrator.submit(
                request(
                    "a",
                    outputs=("audio",),
                    entry="talker",
                    text="x",
                    segments=(),
                    media={"vision": (picture(),)},
                )
            )
