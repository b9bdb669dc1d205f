"""OpenAI's own client against the starter: every endpoint, streaming and not, with real answers."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from omnistage.audio.containers import decode
from omnistage.audio.pcm import Pcm
from tests.starter.asking import DATA, MEDIA, chat, data_url, image, speech

SPEAK = {"modalities": ["text", "audio"], "audio": {"voice": "joe", "format": "wav"}}
SENTENCE = "The quick brown fox jumps over the lazy dog."
LOSSLESS = {"wav", "flac", "pcm"}


@pytest.fixture(scope="module")
def client(server):
    with OpenAI(base_url=server, api_key="none", max_retries=0, timeout=60) as client:
        yield client


def parts():
    """A picture and a spoken question."""
    sound = base64.b64encode((MEDIA / "question.wav").read_bytes()).decode()
    return [
        image((MEDIA / "chelsea.png").read_bytes()),
        {"type": "input_audio", "input_audio": {"data": sound, "format": "wav"}},
    ]


def ask(client, content, **fields):
    messages = [{"role": "user", "content": content}]
    fields = {
        "model": "starter",
        "messages": messages,
        "temperature": 0,
        "seed": 4,
        "max_tokens": 24,
    } | fields
    return client.chat.completions.create(**fields)


def test_models(client):
    assert [model.id for model in client.models.list().data] == ["starter"]
    assert client.models.retrieve("starter").id == "starter"


def test_chat_is_what_the_pipeline_says(client, starter):
    [expected] = starter.ask(chat("What is the capital of France?", max_tokens=24))
    reply = ask(client, "What is the capital of France?", logprobs=True)
    assert reply.choices[0].message.content == expected.text
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage.prompt_tokens == expected.usage.prompt_tokens
    assert reply.usage.completion_tokens == len(expected.token_ids)
    assert len(reply.choices[0].logprobs.content) in (len(expected.token_ids), len(expected.token_ids) - 1)


def test_picture_and_voice_to_text_and_speech(client):
    whole = ask(client, parts(), **SPEAK).choices[0].message
    assert "cat" in whole.audio.transcript.lower()
    pcm = decode(base64.b64decode(whole.audio.data), max_seconds=60)
    assert pcm.duration > 1.0
    transcript, data, usage = "", b"", None
    stream_options = {"include_usage": True}
    for chunk in ask(client, parts(), stream=True, stream_options=stream_options, **SPEAK):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            audio = choice.delta.model_dump().get("audio") or {}
            transcript += audio.get("transcript") or ""
            data += base64.b64decode(audio.get("data") or "")
    assert transcript == whole.audio.transcript
    streamed = decode(data, max_seconds=60)
    np.testing.assert_array_equal(streamed.samples, pcm.samples)
    assert usage.completion_tokens > 0


def test_choices_and_stop(client):
    reply = ask(client, "Count from one to nine in words.", n=2, temperature=0.8, stop=["four", "4"])
    assert len(reply.choices) == 2
    for choice in reply.choices:
        assert "four" not in choice.message.content
    streamed = ["", ""]
    for chunk in ask(client, "Count from one to nine in words.", n=2, temperature=0.8, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    for choice, text in zip(reply.choices, streamed, strict=True):
        assert text.startswith(choice.message.content)


@pytest.mark.parametrize("sound_format", ["wav", "flac", "pcm", "mp3", "opus", "aac"])
def test_speech(client, starter, sound_format):
    [expected] = starter.ask(speech(SENTENCE, seed=4))
    request = {"model": "starter", "voice": "joe", "input": SENTENCE, "response_format": sound_format}
    data = client.audio.speech.create(**request, extra_body={"seed": 4}).read()
    with client.audio.speech.with_streaming_response.create(**request, extra_body={"seed": 4}) as response:
        pieces = list(response.iter_bytes())
    pcm = (
        Pcm(pcm16_samples(data), expected.sample_rate)
        if sound_format == "pcm"
        else decode(data, max_seconds=60)
    )
    assert pcm.duration == pytest.approx(expected.pcm.size / expected.sample_rate, abs=0.1)
    if sound_format in LOSSLESS:
        np.testing.assert_allclose(pcm.samples, expected.pcm.clip(-1, 1), atol=1e-4)
        assert b"".join(pieces) == data
    assert len(pieces) > 1


def pcm16_samples(data):
    return np.frombuffer(data, "<i2").astype(np.float32) / 32768


def test_transcription(client, starter):
    data = (DATA / "speech_young_man.wav").read_bytes()
    whole = client.audio.transcriptions.create(model="starter", file=("clip.wav", io.BytesIO(data)))
    assert "young man" in whole.text.lower()
    events = list(
        client.audio.transcriptions.create(model="starter", file=("clip.wav", io.BytesIO(data)), stream=True)
    )
    assert "".join(event.delta for event in events[:-1]) == events[-1].text == whole.text


def test_faults(client):
    with pytest.raises(BadRequestError, match="truncated"):
        ask(client, [image((DATA / "cat.jpg").read_bytes()[:5000])])
    with pytest.raises(BadRequestError, match="no known format"):
        ask(client, [{"type": "image_url", "image_url": {"url": data_url(b"hello", "image/png")}}])
    with pytest.raises(NotFoundError, match="gpt-5"):
        ask(client, "Hello.", model="gpt-5")
    with pytest.raises(BadRequestError, match="512"):
        ask(client, "word " * 600)
    with pytest.raises(BadRequestError, match="truncated"):  # before the first event: a status, not an event
        list(ask(client, [image((DATA / "cat.jpg").read_bytes()[:5000])], stream=True))
