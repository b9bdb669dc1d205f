"""The HTTP API over a Qwen3-Omni: videos, their sound, settings of single stages, cut speech."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fake_backend import SAMPLE_RATE, FakeBackend, done, tone
from live_server import LiveServer

from omnistage.serving.chat_sampling import answer_budget
from omnistage.serving.media import media_key
from omnistage.serving.requests import AudioDelta, GenerateRequest, TextDelta
from omnistage.serving.tokenizer import Tokenizer
from omnistage.types import FinishReason, MediaSegment, MergedSegment, SamplingParams, TokenSegment
from tests.encoders.video_files import SOUND_RATE, smooth_frames, video_file

CHECKPOINT = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05, "max_tokens": 99}
VIDEO_SOURCE = "messages[0].content[0].video_url.url"


@pytest.fixture
def backend(model_dir: Path, qwen3_omni_dir: Path) -> FakeBackend:
    backend = FakeBackend(model_dir)
    backend.tokenizer = Tokenizer(qwen3_omni_dir)
    backend.info = dataclasses.replace(
        backend.info,
        model="omni",
        model_dir=str(qwen3_omni_dir),
        prompt_directory=str(qwen3_omni_dir),
        architecture="qwen3_omni_moe",
        encoders={"image": "vision", "video": "vision", "audio": "hearing"},
        speech_entry=None,
        transcriber=None,
        max_model_len=4096,
        voices=("chelsie", "ethan", "aiden"),
        sampling=CHECKPOINT,
    )
    return backend


@pytest.fixture(scope="module")
def silent_video() -> bytes:
    return video_file(smooth_frames(4), muxer="mp4", codec="mpeg4", pix_fmt="yuv420p")


@pytest.fixture(scope="module")
def video() -> bytes:
    sound = (0.3 * np.sin(np.arange(SOUND_RATE) / 9)).astype(np.float32)
    return video_file(smooth_frames(4), muxer="mp4", codec="mpeg4", pix_fmt="yuv420p", sound=sound)


def part(kind: str, data: bytes, **more: Any) -> dict[str, Any]:
    url = "data:application/octet-stream;base64," + base64.b64encode(data).decode()
    return {"type": kind, kind: {"url": url, **more}}


def body(*content: Any, **fields: Any) -> dict[str, Any]:
    return {"model": "omni", "messages": [{"role": "user", "content": [*content]}], **fields}


TEXT = {"type": "text", "text": "What happens?"}


def ask(server: LiveServer, asked: dict[str, Any]) -> dict[str, Any]:
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=asked)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def refused(server: LiveServer, asked: dict[str, Any]) -> dict[str, Any]:
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=asked)
    assert reply.status_code == 400, reply.text
    error: dict[str, Any] = reply.json()["error"]
    return error


def media_of(request: GenerateRequest) -> list[MediaSegment | MergedSegment]:
    return [segment for segment in request.segments if not isinstance(segment, TokenSegment)]


def test_a_video_reaches_the_vision_stage(server: LiveServer, backend: FakeBackend, video: bytes):
    ask(server, body(part("video_url", video), TEXT))
    [request] = backend.requests
    assert media_of(request) == [MediaSegment("vision", 0)]
    [item] = request.media["vision"]
    assert (item.data, item.mime, item.options) == (video, "video/mp4", {})
    assert item.key == media_key("video", video, {})
    assert set(request.media) == {"vision"}


def test_frames_per_second(server: LiveServer, backend: FakeBackend, video: bytes):
    parts = [part("video_url", video), part("video_url", video, fps=0.5)]
    ask(server, body(*parts, mm_processor_kwargs={"fps": 2}))
    options = [item.options for item in backend.requests[0].media["vision"]]
    assert options == [{"fps": 2.0}, {"fps": 0.5}], "a video's own word goes first"
    assert len({item.key for item in backend.requests[0].media["vision"]}) == 2


def test_sound_of_videos(server: LiveServer, backend: FakeBackend, video: bytes, silent_video: bytes):
    asked = [
        part("audio_url", video),
        part("video_url", video, fps=2),
        part("video_url", silent_video),
        part("image_url", b"\x89PNG\r\n\x1a\n" + bytes(40)),
        part("video_url", video),
    ]
    ask(server, body(*asked, mm_processor_kwargs={"use_audio_in_video": True}))
    [request] = backend.requests
    assert media_of(request) == [
        MediaSegment("hearing", 0),
        MergedSegment(MediaSegment("vision", 0), MediaSegment("hearing", 1)),
        MediaSegment("vision", 1),
        MediaSegment("vision", 2),
        MergedSegment(MediaSegment("vision", 3), MediaSegment("hearing", 2)),
    ]
    assert [item.mime for item in request.media["vision"]] == [
        "video/mp4",
        "video/mp4",
        "image/png",
        "video/mp4",
    ]
    heard = request.media["hearing"]
    assert [item.data for item in heard] == [video] * 3
    assert {item.key for item in heard} == {media_key("audio", video, {})}, "one sound, whatever the fps"
    assert all(item.options == {} for item in heard)
    ask(server, body(part("video_url", video), mm_processor_kwargs={"use_audio_in_video": False}))
    assert set(backend.requests[1].media) == {"vision"}


def test_what_is_no_video(server: LiveServer, backend: FakeBackend, video: bytes):
    error = refused(server, body(part("video_url", b"RIFF\x24\0\0\0WAVEfmt " + bytes(40))))
    assert (error["code"], error["param"]) == ("invalid_media", VIDEO_SOURCE)
    assert "looks like audio/wav; send an MP4" in error["message"]
    hearing = {"mm_processor_kwargs": {"use_audio_in_video": True}}
    error = refused(server, body(part("video_url", video[:40]), **hearing))
    assert (error["code"], error["param"]) == ("invalid_media", VIDEO_SOURCE)
    assert not backend.requests


@pytest.mark.parametrize("missing", ["audio", "video"])
def test_hearing_videos_takes_both_encoders(
    server: LiveServer, backend: FakeBackend, video: bytes, missing: str
):
    encoders = {name: stage for name, stage in backend.info.encoders.items() if name != missing}
    backend.info = dataclasses.replace(backend.info, encoders=encoders)
    error = refused(server, body(TEXT, mm_processor_kwargs={"use_audio_in_video": True}))
    assert (error["code"], error["param"]) == (
        "unsupported_modality",
        "mm_processor_kwargs.use_audio_in_video",
    )
    if missing == "video":
        error = refused(server, body(part("video_url", video)))
        assert (error["code"], error["param"]) == ("unsupported_modality", VIDEO_SOURCE)
    inputs = httpx.get(f"{server.url}/v1/models").json()["data"][0]["inputs"]
    assert inputs == ["text", *encoders]


def test_sampling_defaults_are_the_checkpoint_s(server: LiveServer, backend: FakeBackend):
    ask(server, body(TEXT))
    ask(server, body(TEXT, temperature=0, top_k=-1, max_tokens=7, repetition_penalty=1, seed=3))
    first, second = (request.sampling for request in backend.requests)
    assert first == SamplingParams(**CHECKPOINT, seed=first.seed)
    assert second == SamplingParams(temperature=0.0, top_k=0, top_p=0.8, max_tokens=7, seed=3)


def test_the_context_bounds_the_usual_length():
    segments = (TokenSegment((1, 2, 3)), MediaSegment("vision", 0))
    assert answer_budget(segments, 50, asked=None, usual=99) == 46
    assert answer_budget(segments, 50, asked=None, usual=9) == 9
    assert answer_budget(segments, 50, asked=46, usual=9) == 46
    assert answer_budget(segments, 50, asked=None) == 46


def test_settings_of_single_stages(server: LiveServer, backend: FakeBackend):
    settings = {
        "thinker": {"temperature": 0, "max_tokens": 5, "top_p": None},
        "talker": {"temperature": 1, "top_k": 7, "seed": -1, "repetition_penalty": None},
    }
    ask(server, body(TEXT, temperature=1.5, max_tokens=50, seed=11, stage_params=settings))
    [request] = backend.requests
    assert request.sampling == SamplingParams(**{**CHECKPOINT, "temperature": 0.0, "max_tokens": 5}, seed=11)
    assert request.stage_params == {"talker": {"temperature": 1.0, "top_k": 7, "seed": 2**63 - 1}}
    assert request.seed == 11


def test_seeds_of_choices(server: LiveServer, backend: FakeBackend):
    ask(server, body(TEXT, seed=11, n=2, stage_params={"thinker": {"seed": 5}}))
    seeds = [(request.seed, request.sampling.seed) for request in backend.requests]
    assert seeds[0] == (11, 5)
    assert len({*seeds[0], *seeds[1]}) == 4
    backend.info = dataclasses.replace(backend.info, sampling={"seed": 8})
    backend.requests.clear()
    ask(server, body(TEXT, seed=11))
    assert backend.requests[0].sampling.seed == 11, "a request's seed goes before the pipeline's"


def test_a_pipeline_s_seed_is_the_default(server: LiveServer, backend: FakeBackend):
    backend.info = dataclasses.replace(backend.info, sampling={"seed": 8})
    ask(server, body(TEXT))
    assert backend.requests[0].sampling.seed == 8


SPOKEN = {"modalities": ["text", "audio"], "audio": {"format": "pcm16", "voice": "ETHAN"}}


def speak(backend: FakeBackend, truncated: tuple[str, ...]) -> None:
    def script(request: GenerateRequest) -> Iterator[Any]:
        yield TextDelta("Hello.", (1, 2))
        yield AudioDelta(tone(0), SAMPLE_RATE)
        yield done(finish_reason=FinishReason.STOP, completion_tokens=2, audio_tokens=40, truncated=truncated)

    backend.script = script


@pytest.mark.parametrize("truncated", [(), ("talker",)])
def test_cut_speech_is_marked(server: LiveServer, backend: FakeBackend, truncated: tuple[str, ...]):
    speak(backend, truncated)
    answer = ask(server, body(TEXT, **SPOKEN, n=2))
    for choice in answer["choices"]:
        assert choice["finish_reason"] == "stop", "the text is whole"
        assert choice["message"]["audio"].get("truncated", False) is bool(truncated)
    usage = answer["usage"]
    assert usage["completion_tokens_details"] == {"audio_tokens": 80, "reasoning_tokens": 0, "text_tokens": 4}
    assert usage["completion_tokens"] == 84
    assert usage["total_tokens"] == 84 + usage["prompt_tokens"]
    stream = server.client.chat.completions.create(**body(TEXT, **SPOKEN), stream=True)
    audio = [chunk.to_dict()["choices"][0]["delta"].get("audio") for chunk in stream]
    closing = [delta for delta in audio if delta and "expires_at" in delta]
    assert [delta.get("truncated", False) for delta in closing] == [bool(truncated)]
    assert 'omnistage_tokens_total{kind="audio"} 120.0' in httpx.get(f"{server.url}/metrics").text


def test_voices_in_any_case(server: LiveServer, backend: FakeBackend):
    ask(server, body(TEXT, **SPOKEN))
    assert backend.requests[0].options == {"voice": "ethan"}
    listed = httpx.get(f"{server.url}/v1/audio/voices").json()["data"]
    assert [voice["id"] for voice in listed] == ["chelsie", "ethan", "aiden"]
    for name, hint in (("Ehtan", "did you mean 'ethan'?"), ("Bob", "known: aiden, chelsie, ethan")):
        asked = body(TEXT, **{**SPOKEN, "audio": {"format": "wav", "voice": name}})
        reply = httpx.post(f"{server.url}/v1/chat/completions", json=asked)
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "voice_not_found")
        assert hint in reply.json()["error"]["message"]


def test_float_sound(server: LiveServer, backend: FakeBackend):
    speak(backend, ())
    answer = ask(server, body(TEXT, modalities=["text", "audio"], audio={"format": "wav_f32"}))
    data = base64.b64decode(answer["choices"][0]["message"]["audio"]["data"])
    samples = np.frombuffer(data[-4 * len(tone(0)) :], dtype="<f4")
    np.testing.assert_array_equal(samples, tone(0))


def test_a_talker_reads_nothing_aloud(server: LiveServer):
    reply = httpx.post(
        f"{server.url}/v1/audio/speech", json={"model": "omni", "input": "Hello.", "voice": "ethan"}
    )
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "unsupported_modality")
    assert "ask /v1/chat/completions" in reply.json()["error"]["message"]
