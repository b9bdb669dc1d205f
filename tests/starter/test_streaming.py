"""Answers as they are made: sound before the text ends, deltas that add up, readers that take their time."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import numpy as np
import pytest

from omnistage.errors import Draining, RequestFailed
from omnistage.serving import dispatch
from omnistage.serving.requests import AudioDelta, TextDelta
from tests.starter.asking import AUDIO, chat, reply_of, speech, until

TWO_SENTENCES = "Tell me about the sea in two long sentences."
LONG = "Paris is the capital of France. It lies on the river Seine, and many people visit it. " * 4


def test_speech_begins_before_the_text_ends(starter):
    events = list(starter.omni.stream(chat(TWO_SENTENCES, max_tokens=64, seed=3, **AUDIO)))
    reply = reply_of(events)
    _, second = reply.text.split(". ")
    assert second.endswith(".")
    said = [index for index, event in enumerate(events) if isinstance(event, TextDelta) and event.text]
    sounds = [index for index, event in enumerate(events) if isinstance(event, AudioDelta)]
    assert sounds[0] < said[-1]
    spoken = next(timing for timing in reply.timings if timing.stage == "talker")
    written = next(timing for timing in reply.timings if timing.stage == "thinker")
    assert spoken.first_output < written.finished


def test_deltas_add_up_to_the_whole(starter):
    body = chat(TWO_SENTENCES, max_tokens=48, seed=3, temperature=0.7, **AUDIO)
    streamed = reply_of(list(starter.omni.stream(body)))
    [whole] = starter.omni.generate([body])
    assert streamed.text == whole.text
    assert streamed.token_ids == whole.token_ids
    assert streamed.finish_reason == whole.finish_reason
    assert streamed.usage.completion_tokens == whole.usage.completion_tokens
    np.testing.assert_array_equal(streamed.pcm, whole.audio.samples)
    assert streamed.sample_rate == whole.audio.sample_rate


@pytest.mark.parametrize("max_tokens", [9, 10, 11, 64])
def test_deltas_are_whole_characters(starter, reference, max_tokens):
    """An emoji is three tokens; only an answer that ends inside one shows a replacement character."""
    [reply] = starter.ask(chat("Repeat: 🌞 naïve 東京", max_tokens=max_tokens))
    assert reply.text == reference.tokenizer.decode(reply.token_ids, skip_special_tokens=True)
    deltas = [event.text for event in reply.events if isinstance(event, TextDelta)]
    assert "🌞" in deltas
    assert "\ufffd" not in "".join(deltas[:-1])


@pytest.fixture
def few_credits(monkeypatch):
    """A client may leave three chunks unread, about 1.8 s of sound."""
    monkeypatch.setattr(dispatch, "AUDIO_CREDITS", 3)


def test_a_slow_listener_delays_nobody_and_loses_nothing(starter, few_credits):
    body = speech(LONG)
    [whole] = starter.ask(body)

    async def listen_late():
        async with aclosing(starter.orchestrator.submit(await starter.prepare(body))) as stream:
            others = [starter.reply(chat("Count to ten.", max_tokens=24)) for _ in range(3)]
            others = await asyncio.gather(*others)
            other_voice = await starter.reply(chat("Say hello.", seed=1, **AUDIO))
            unheard = starter.orchestrator.gauges()["vocoder"]["assigned_requests"]
            return others, other_voice, unheard, reply_of([event async for event in stream])

    made_before = starter.gauges()["vocoder"]["samples"]
    others, other_voice, unheard, late = starter.run(listen_late())
    assert unheard == 1  # still held back when all others had been answered
    assert len({reply.text for reply in others}) == 1
    assert other_voice.pcm.size
    late.assert_same(whole)
    made = starter.gauges()["vocoder"]["samples"] - made_before
    assert made == whole.pcm.size + other_voice.pcm.size  # nothing was made twice


def test_unread_speech_holds_back_the_vocoder_and_not_the_text(starter, few_credits):
    """The thinker finishes although nobody listens; what the vocoder has made stays small."""
    body = chat("Tell me a story about a cat.", max_tokens=48, ignore_eos=True, seed=2, **AUDIO)

    async def read_text_only():
        prepared = await starter.prepare(body)
        before = starter.orchestrator.gauges()["vocoder"]["samples"]
        async with aclosing(starter.orchestrator.submit(prepared)) as stream:
            await until(lambda: not starter.orchestrator.gauges()["thinker"]["assigned_requests"])
            assert starter.orchestrator.gauges()["vocoder"]["assigned_requests"] == 1
            made = starter.orchestrator.gauges()["vocoder"]["samples"] - before
            return made, reply_of([event async for event in stream])

    starter.gauges()
    made, reply = starter.run(read_text_only())
    assert len(reply.token_ids) == 48
    assert made <= (24 + 64 + 64) * 256 < reply.pcm.size  # three chunks of frames of 256 samples


def test_an_answer_of_nothing_speakable_is_silent(starter, tmp_path):
    """The first token of an emoji is no character yet."""
    [answer] = starter.omni.generate([chat("Repeat: 🌞", max_tokens=1, **AUDIO)])
    assert answer.text == "\ufffd"
    assert answer.audio.samples.size == 0
    answer.save_audio(tmp_path / "silence.wav")
    assert (tmp_path / "silence.wav").read_bytes()[:4] == b"RIFF"
    [silent] = starter.omni.generate([chat("Hello.", max_tokens=4)])
    assert silent.audio is None
    with pytest.raises(RequestFailed, match="modalities"):
        silent.save_audio(tmp_path / "none.wav")


def test_leaving_a_stream_early_aborts_it(starter):
    before = starter.gauges()["thinker"]["tokens"]
    for event in starter.omni.stream(chat("Tell me a story.", max_tokens=400, **AUDIO)):
        if isinstance(event, AudioDelta):
            break
    after = starter.gauges()
    assert after["thinker"]["tokens"] - before < 300
    assert after["thinker"]["kv_blocks_used"] == 0


def test_a_closed_pipeline_says_so(thinker_alone):
    pipeline = thinker_alone(kv_cache="20MiB")
    stream = pipeline.omni.stream(chat("Tell me a story.", max_tokens=400))
    next(stream)
    pipeline.omni.close()
    with pytest.raises(Draining):
        list(stream)
    with pytest.raises(Draining, match="closed"):
        pipeline.omni.generate([chat("Hello?")])
    pipeline.omni.close()
