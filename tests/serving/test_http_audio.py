"""/v1/audio/speech and /v1/audio/transcriptions through OpenAI's own client."""

from __future__ import annotations

import base64
import io
import json

import httpx
import numpy as np
import pytest
from fake_backend import SAMPLE_RATE, TRANSCRIPT, FakeBackend, tone
from live_server import LiveServer
from openai import InternalServerError

from omnistage.audio.containers import decode, encode
from omnistage.audio.pcm import Pcm
from omnistage.errors import RequestFailed
from omnistage.serving.requests import AudioDelta

INPUT = "Two cats sleep."
TEXT = "".join(TRANSCRIPT).strip()
CLIP = encode(Pcm(tone(0), SAMPLE_RATE), "wav")


def pcm16() -> np.ndarray:
    samples = np.concatenate([tone(position) for position in range(3)])
    return np.clip(np.rint(samples * 32768), -32768, 32767).astype(np.int16)


@pytest.mark.parametrize(
    ("response_format", "content_type"),
    [
        ("mp3", "audio/mpeg"),
        ("opus", "audio/ogg"),
        ("aac", "audio/aac"),
        ("flac", "audio/flac"),
        ("wav", "audio/wav"),
        ("pcm", f"audio/pcm;rate={SAMPLE_RATE}"),
    ],
)
def test_speech_formats(server: LiveServer, backend: FakeBackend, response_format: str, content_type: str):
    reply = server.client.audio.speech.create(
        model="starter", voice="joe", input=INPUT, response_format=response_format
    )
    assert reply.response.headers["content-type"] == content_type
    data = reply.content
    if response_format == "pcm":
        np.testing.assert_array_equal(np.frombuffer(data, "<i2"), pcm16())
    else:
        assert decode(data, max_seconds=60).duration == pytest.approx(0.3, abs=0.12)
    [request] = backend.requests
    assert (request.entry, request.text, request.outputs) == ("talker", INPUT, ("audio",))
    assert request.options == {"voice": "joe", "speed": 1.0}


def test_speech_defaults_to_mp3(server: LiveServer):
    reply = server.client.audio.speech.create(model="starter", voice="joe", input=INPUT)
    assert reply.response.headers["content-type"] == "audio/mpeg"


def test_speech_speed_and_custom_voice(server: LiveServer, backend: FakeBackend):
    server.client.audio.speech.create(model="starter", voice={"id": "amy"}, input=INPUT, speed=2)
    assert backend.requests[0].options == {"voice": "amy", "speed": 2.0}


def test_speech_streams_in_chunks(server: LiveServer):
    with server.client.audio.speech.with_streaming_response.create(
        model="starter", voice="joe", input=INPUT, response_format="pcm"
    ) as reply:
        assert "content-length" not in reply.headers
        data = b"".join(reply.iter_bytes())
    np.testing.assert_array_equal(np.frombuffer(data, "<i2"), pcm16())


def sse(text: str) -> list[dict]:
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line]


def test_speech_as_events(server: LiveServer):
    body = {
        "model": "starter",
        "voice": "joe",
        "input": INPUT,
        "response_format": "pcm",
        "stream_format": "sse",
    }
    reply = httpx.post(f"{server.url}/v1/audio/speech", json=body)
    assert reply.headers["content-type"].startswith("text/event-stream")
    *deltas, last = sse(reply.text)
    assert {delta["type"] for delta in deltas} == {"speech.audio.delta"}
    data = b"".join(base64.b64decode(delta["audio"]) for delta in deltas)
    np.testing.assert_array_equal(np.frombuffer(data, "<i2"), pcm16())
    assert last["type"] == "speech.audio.done"
    usage = last["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] > 20


def test_speech_failure_in_mid_stream(server: LiveServer, backend: FakeBackend):
    backend.script = lambda request: [AudioDelta(tone(0), SAMPLE_RATE), RequestFailed("vocoder died")]
    body = {"model": "starter", "voice": "joe", "input": INPUT, "response_format": "pcm"}
    with pytest.raises(httpx.RemoteProtocolError):  # a cut body, which no client takes for a whole one
        httpx.post(f"{server.url}/v1/audio/speech", json=body)
    events = sse(httpx.post(f"{server.url}/v1/audio/speech", json={**body, "stream_format": "sse"}).text)
    assert events[-1]["error"]["message"] == "vocoder died"


def test_speech_failure_at_once_keeps_its_status(server: LiveServer, backend: FakeBackend):
    backend.script = lambda request: [RequestFailed("talker died")]
    with pytest.raises(InternalServerError, match="talker died"):
        server.client.audio.speech.create(model="starter", voice="joe", input=INPUT)


def test_transcription_json(server: LiveServer, backend: FakeBackend):
    reply = server.client.audio.transcriptions.create(
        model="starter", file=("q.wav", CLIP), language="en", temperature=0, prompt=""
    )
    assert reply.text == TEXT
    assert reply.usage.type == "duration"
    [request] = backend.requests
    assert request.outputs == ("hearing",)
    assert request.media["hearing"][0].data == CLIP
    assert request.media["hearing"][0].mime == "audio/wav"


def test_transcription_text(server: LiveServer):
    reply = server.client.audio.transcriptions.create(
        model="starter", file=io.BytesIO(CLIP), response_format="text"
    )
    assert reply == TEXT + "\n"


def test_transcription_verbose(server: LiveServer):
    reply = server.client.audio.transcriptions.create(
        model="starter", file=("q.wav", CLIP), response_format="verbose_json"
    )
    assert reply.text == TEXT
    assert reply.language == "en"
    assert reply.duration == pytest.approx(0.1, abs=0.001)


def test_transcription_as_events(server: LiveServer):
    events = list(
        server.client.audio.transcriptions.create(model="starter", file=("q.wav", CLIP), stream=True)
    )
    assert [event.type for event in events] == ["transcript.text.delta"] * 3 + ["transcript.text.done"]
    assert "".join(event.delta for event in events[:-1]) == events[-1].text == TEXT
