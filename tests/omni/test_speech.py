"""When speech starts, how it ends, and what its seed decides."""

from __future__ import annotations

import asyncio
import dataclasses
import time

import msgspec
import numpy as np
import pytest

from omnistage.errors import InvalidRequest, NotFound
from omnistage.serving.launch import LaunchOptions
from omnistage.stages.factory import build_stage
from omnistage.types import FinishReason
from tests.models.qwen3_reference import load, omni_answer, processor
from tests.omni.asking import ask, assert_equals_reference, omni_graph, question, reference_wave, running

SAMPLED = {"temperature": 0.9, "top_k": 50, "max_tokens": 24}


class Slowed:
    """A stage each of whose steps takes longer."""

    def __init__(self, stage, seconds):
        self._stage, self._seconds = stage, seconds

    def __getattr__(self, name):
        return getattr(self._stage, name)

    def step(self, outbox):
        time.sleep(self._seconds)
        self._stage.step(outbox)


def slowed(name, seconds):
    def build(context):
        stage = build_stage(context)
        return Slowed(stage, seconds) if context.spec.name == name else stage

    return LaunchOptions(mode="threads", build=build, drain_seconds=2.0)


def alone(directory, request, **graph):
    async def scenario():
        async with running(omni_graph(directory, **graph)) as pipeline:
            return await ask(pipeline, request)

    return asyncio.run(scenario())


def test_sound_leaves_before_the_thinker_has_finished(qwen3_omni_dir):
    async def scenario():
        async with running(omni_graph(qwen3_omni_dir), slowed("thinker", 0.02)) as pipeline:
            return await ask(pipeline, question(qwen3_omni_dir, "image"))

    heard = asyncio.run(scenario())
    assert_equals_reference(heard, qwen3_omni_dir, "image")
    first = heard.order.index("audio")
    assert heard.order[first:].count("text") > 1
    hop = load(qwen3_omni_dir).code2wav.total_upsample
    assert len(heard.pieces[0]) <= 4 * hop


def test_a_starved_talker_waits_and_loses_nothing(qwen3_omni_dir):
    """Text comes more slowly than frames could: the talker of one request must not hold up another's."""

    async def scenario():
        async with running(omni_graph(qwen3_omni_dir), slowed("thinker", 0.03)) as pipeline:
            return await asyncio.gather(
                *(ask(pipeline, question(qwen3_omni_dir, case)) for case in ("text", "image", "audio"))
            )

    for case, heard in zip(("text", "image", "audio"), asyncio.run(scenario()), strict=True):
        assert_equals_reference(heard, qwen3_omni_dir, case)


@pytest.mark.parametrize("case", ["text", "image"])
def test_speech_at_its_limit_is_cut_and_said_so(case, qwen3_omni_dir):
    """N steps make N - 1 frames, as in the reference; the text goes on to its end."""
    heard = alone(qwen3_omni_dir, question(qwen3_omni_dir, case, talker={"max_tokens": 6}))
    assert heard.token_ids == omni_answer(qwen3_omni_dir, case).tokens
    wave = reference_wave(qwen3_omni_dir, case).numpy()
    hop = load(qwen3_omni_dir).code2wav.total_upsample
    trim = len(omni_answer(qwen3_omni_dir, case).codes) * hop - len(wave)
    assert len(heard.sound) == 5 * hop - trim
    np.testing.assert_allclose(heard.sound, wave[: len(heard.sound)], atol=1e-4, rtol=0)
    assert heard.done.truncated == ("talker",)


def test_an_empty_answer_is_silent(qwen3_omni_dir):
    end = processor(qwen3_omni_dir).tokenizer.convert_tokens_to_ids("<|im_end|>")
    request = question(qwen3_omni_dir, "image")
    request = dataclasses.replace(
        request, sampling=msgspec.structs.replace(request.sampling, logit_bias={end: 1000.0})
    )
    heard = alone(qwen3_omni_dir, request)
    assert heard.token_ids == [end]
    assert heard.text == ""
    assert len(heard.sound) == 0
    assert heard.done.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_short_answers_are_spoken(max_tokens, qwen3_omni_dir):
    """One token cut off by the limit is spoken; the reference, which fails then, speaks all but the last."""
    heard = alone(qwen3_omni_dir, question(qwen3_omni_dir, "text", max_tokens=max_tokens))
    assert heard.token_ids == omni_answer(qwen3_omni_dir, "text").tokens[:max_tokens]
    assert heard.done.finish_reason is FinishReason.LENGTH
    assert len(heard.sound) > 0


def test_a_stop_string_ends_the_speech_too(qwen3_omni_dir):
    whole = alone(qwen3_omni_dir, question(qwen3_omni_dir, "image"))
    request = question(qwen3_omni_dir, "image")
    stop = whole.text[len(whole.text) // 2 :][:3]
    request = dataclasses.replace(request, sampling=msgspec.structs.replace(request.sampling, stop=(stop,)))
    heard = alone(qwen3_omni_dir, request)
    assert heard.text == whole.text[: whole.text.index(stop)]
    assert len(heard.sound) > 0


def test_seeds_make_speech_reproducible_in_any_batch(qwen3_omni_dir):
    cases = ("text", "image", "audio", "text")

    def request(index, seed):
        return question(qwen3_omni_dir, cases[index], name=f"q{index}-{seed}", talker=SAMPLED, seed=seed)

    async def scenario():
        async with running(omni_graph(qwen3_omni_dir)) as pipeline:
            apart = [await ask(pipeline, request(index, 7 + index)) for index in range(4)]
            together = await asyncio.gather(*(ask(pipeline, request(index, 7 + index)) for index in range(4)))
            other = await ask(pipeline, request(0, 99))
            return apart, together, other

    apart, together, other = asyncio.run(scenario())
    for first, second in zip(apart, together, strict=True):
        assert first.sound.shape == second.sound.shape
        np.testing.assert_allclose(first.sound, second.sound, atol=1e-5, rtol=0)
    assert other.sound.shape != apart[0].sound.shape or np.abs(other.sound - apart[0].sound).max() > 0.01
    # one question, two seeds
    assert (
        apart[0].sound.shape != apart[3].sound.shape or np.abs(apart[0].sound - apart[3].sound).max() > 0.01
    )


def test_voices_differ(qwen3_omni_dir):
    ethan = alone(qwen3_omni_dir, question(qwen3_omni_dir, "text"))
    other = alone(qwen3_omni_dir, question(qwen3_omni_dir, "text", options={"voice": "Chelsie"}))
    assert ethan.token_ids == other.token_ids
    assert ethan.sound.shape != other.sound.shape or np.abs(ethan.sound - other.sound).max() > 0.01


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"options": {"voice": "nobody"}}, NotFound, "voice 'nobody' is not one of"),
        ({"talker": {"temperature": -1.0}}, InvalidRequest, "temperature.* is -1.0; it must be"),
        ({"talker": {"top_q": 1}}, InvalidRequest, "'stage_params.talker.top_q' is no setting"),
        ({"talker": {"top_k": 1.5}}, InvalidRequest, "must be a whole number"),
    ],
)
def test_what_the_talker_refuses(fields, error, message, qwen3_omni_dir):
    with pytest.raises(error, match=message):
        alone(qwen3_omni_dir, question(qwen3_omni_dir, "text", **fields))
