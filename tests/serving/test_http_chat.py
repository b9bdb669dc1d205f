"""/v1/chat/completions through OpenAI's own client."""

from __future__ import annotations

import base64
import io
import time
import wave

import numpy as np
import pytest
from fake_backend import ANSWER, SAMPLE_RATE, FakeBackend, Hold, done, tone
from live_server import LiveServer
from openai import APIError, InternalServerError

from omnistage.errors import RequestFailed
from omnistage.serving.requests import AudioDelta, TextDelta
from omnistage.types import FinishReason, MediaSegment, TokenSegment

QUESTION = [{"role": "user", "content": "What is in this picture?"}]
TEXT = "".join(ANSWER)
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"\0" * 40).decode()
WAV = base64.b64encode(b"RIFF\x24\0\0\0WAVEfmt " + b"\0" * 40).decode()


def expected_samples(num_pieces: int = len(ANSWER)) -> np.ndarray:
    samples = np.concatenate([tone(position) for position in range(num_pieces)])
    return np.clip(np.rint(samples * 32768), -32768, 32767).astype(np.int16)


def test_whole_text_answer_has_openai_shape(server: LiveServer, backend: FakeBackend):
    answer = server.client.chat.completions.create(
        model="starter", messages=QUESTION, seed=7, temperature=0.5, metadata={"run": "1"}, user="ann"
    )
    assert answer.object == "chat.completion"
    assert answer.model == "starter"
    assert abs(answer.created - time.time()) < 60
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == TEXT
    assert choice.message.audio is None
    assert choice.finish_reason == "stop"
    assert choice.logprobs is None
    assert answer.metadata == {"run": "1"}
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 20
    assert answer.usage.total_tokens == 20 + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 16
    assert answer.usage.completion_tokens_details.audio_tokens == 0
    assert answer._request_id == answer.id == backend.requests[0].request_id
    assert "omnistage" not in answer.model_extra
    assert backend.num_open == 0
    assert not backend.aborted


def test_request_reaches_the_backend(server: LiveServer, backend: FakeBackend):
    server.client.chat.completions.create(
        model="starter",
        messages=QUESTION,
        seed=7,
        stop=["\n\n", "END"],
        max_completion_tokens=9,
        temperature=0.25,
        top_p=0.5,
        presence_penalty=0.1,
        frequency_penalty=-0.2,
        logit_bias={"5": -100, "6": 1.5},
        extra_body={
            "top_k": 40,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop_token_ids": [2],
            "cache_salt": "tenant-1",
        },
    )
    [request] = backend.requests
    assert request.outputs == ("text",)
    assert request.seed == request.sampling.seed == 7
    assert request.cache_salt == "tenant-1"
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.ignore_eos) == (9, 2, True)
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.25, 0.5, 40, 0.05)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.1, -0.2)
    assert sampling.repetition_penalty == 1.1
    assert sampling.logit_bias == {5: -100.0, 6: 1.5}
    assert sampling.stop == ("\n\n", "END")
    assert sampling.stop_token_ids == (2,)
    assert sampling.logprobs is None


def test_defaults(server: LiveServer, backend: FakeBackend):
    for _ in range(2):
        server.client.chat.completions.create(model="starter", messages=QUESTION)
    first, second = backend.requests
    [segment] = first.segments
    assert first.sampling.max_tokens == backend.info.max_model_len - len(segment.token_ids)
    assert first.sampling.temperature == 1.0
    assert first.seed != second.seed, "a seed is drawn for each request"


def test_streamed_text(server: LiveServer):
    chunks = list(
        server.client.chat.completions.create(
            model="starter", messages=QUESTION, stream=True, stream_options={"include_usage": True}
        )
    )
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == len({chunk.created for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    assert [chunk.choices[0].delta.content for chunk in chunks[1:-2]] == list(ANSWER)
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-2].choices[0].delta.content is None
    assert chunks[-1].choices == []
    assert chunks[-1].usage.prompt_tokens == 20
    assert all(chunk.usage is None and "usage" in chunk.model_fields_set for chunk in chunks[:-1])


def test_stream_without_usage_has_none(server: LiveServer):
    chunks = list(server.client.chat.completions.create(model="starter", messages=QUESTION, stream=True))
    assert all("usage" not in chunk.model_fields_set for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_length_limit(server: LiveServer):
    answer = server.client.chat.completions.create(model="starter", messages=QUESTION, max_tokens=3)
    assert answer.choices[0].message.content == "".join(ANSWER[:3])
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(server: LiveServer, backend: FakeBackend, stream: bool):
    reply = server.client.chat.completions.create(
        model="starter", messages=QUESTION, logprobs=True, top_logprobs=2, stream=stream
    )
    assert backend.requests[0].sampling.logprobs == 2
    if stream:
        contents = [chunk.choices[0].logprobs for chunk in reply if chunk.choices[0].delta.content]
        entries = [entry for logprobs in contents for entry in logprobs.content]
    else:
        entries = reply.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries) == TEXT.encode()
    assert "".join(entry.token for entry in entries) == TEXT
    assert all(entry.logprob == -0.5 and len(entry.top_logprobs) == 2 for entry in entries)
    assert entries[0].top_logprobs[0].token == entries[0].token


@pytest.mark.parametrize("stream", [False, True])
def test_extensions(server: LiveServer, backend: FakeBackend, stream: bool):
    reply = server.client.chat.completions.create(
        model="starter",
        messages=QUESTION,
        seed=5,
        stream=stream,
        extra_body={"return_timings": True, "return_token_ids": True},
    )
    if stream:
        chunks = list(reply)
        extra = chunks[-1].model_extra["omnistage"]
        token_ids = [
            token_id
            for chunk in chunks[:-1]
            for token_id in chunk.choices[0].model_extra.get("token_ids", [])
        ]
    else:
        extra = reply.model_extra["omnistage"]
        token_ids = reply.choices[0].model_extra["token_ids"]
    assert tuple(token_ids) == sum((backend.tokenizer.encode(word) for word in ANSWER), ())
    assert [row["stage"] for row in extra["timings"]] == ["thinker", "vocoder"], "in order of arrival"
    assert extra["timings"][0]["queued"] == pytest.approx(0.1)
    assert extra["timings"][0]["transferred"] == pytest.approx(0.01)
    assert extra["seed"] == 5
    assert extra["time_to_first_token"] >= 0
    assert extra["time_to_first_audio"] is None
    assert extra["real_time_factor"] is None


def test_whole_spoken_answer(server: LiveServer, backend: FakeBackend):
    answer = server.client.chat.completions.create(
        model="starter",
        messages=QUESTION,
        modalities=["text", "audio"],
        audio={"voice": "amy", "format": "wav"},
        extra_body={"return_timings": True},
    )
    assert backend.requests[0].outputs == ("text", "audio")
    assert backend.requests[0].options == {"voice": "amy"}
    message = answer.choices[0].message
    assert message.content is None
    assert message.audio.transcript == TEXT
    assert message.audio.expires_at > time.time()
    with wave.open(io.BytesIO(base64.b64decode(message.audio.data))) as file:
        assert (file.getnchannels(), file.getframerate()) == (1, SAMPLE_RATE)
        samples = np.frombuffer(file.readframes(file.getnframes()), dtype="<i2")
    np.testing.assert_array_equal(samples, expected_samples())
    extra = answer.model_extra["omnistage"]
    assert extra["audio_seconds"] == pytest.approx(len(ANSWER) / 10)
    assert extra["real_time_factor"] > 0


def test_streamed_spoken_answer(server: LiveServer):
    chunks = list(
        server.client.chat.completions.create(
            model="starter",
            messages=QUESTION,
            modalities=["text", "audio"],
            audio={"voice": "joe", "format": "pcm16"},
            stream=True,
        )
    )
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    assert deltas[0].audio.id.startswith("audio_")
    assert all(delta.content is None for delta in deltas)
    transcripts = [delta.audio.transcript for delta in deltas if delta.audio and delta.audio.transcript]
    assert transcripts == list(ANSWER)
    pieces = [base64.b64decode(delta.audio.data) for delta in deltas if delta.audio and delta.audio.data]
    assert len(pieces) == len(ANSWER), "every piece of sound is sent as it is made"
    np.testing.assert_array_equal(np.frombuffer(b"".join(pieces), dtype="<i2"), expected_samples())
    assert deltas[-2].audio.expires_at > time.time()
    assert deltas[-2].audio.data is None
    assert deltas[-1].audio is None
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("sound_format", ["wav", "pcm16", "mp3", "flac", "opus", "aac"])
@pytest.mark.parametrize("stream", [False, True])
def test_every_format_decodes(server: LiveServer, sound_format: str, stream: bool):
    from omnistage.audio.containers import decode

    reply = server.client.chat.completions.create(
        model="starter",
        messages=QUESTION,
        modalities=["text", "audio"],
        audio={"voice": "joe", "format": sound_format},
        stream=stream,
    )
    if stream:
        audio = [chunk.choices[0].delta.audio for chunk in reply]
        data = b"".join(base64.b64decode(piece.data) for piece in audio if piece and piece.data)
    else:
        data = base64.b64decode(reply.choices[0].message.audio.data)
    if sound_format == "pcm16":
        seconds = len(data) / 2 / SAMPLE_RATE
    else:
        seconds = decode(data, max_seconds=60).duration
    assert seconds == pytest.approx(len(ANSWER) / 10, abs=0.12)


def test_history_may_refer_to_a_spoken_answer(server: LiveServer, backend: FakeBackend):
    ask = {"modalities": ["text", "audio"], "audio": {"voice": "joe", "format": "wav"}}
    first = server.client.chat.completions.create(model="starter", messages=QUESTION, **ask)
    by_id = [*QUESTION, {"role": "assistant", "audio": {"id": first.choices[0].message.audio.id}}, *QUESTION]
    by_text = [*QUESTION, {"role": "assistant", "content": TEXT}, *QUESTION]
    server.client.chat.completions.create(model="starter", messages=by_id)
    server.client.chat.completions.create(model="starter", messages=by_text)
    assert backend.requests[1].segments == backend.requests[2].segments


def test_media_become_segments_and_bytes(server: LiveServer, backend: FakeBackend):
    content = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}", "detail": "auto"}},
        {"type": "input_audio", "input_audio": {"data": WAV, "format": "wav"}},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PNG}"}},
        {"type": "text", "text": "What is it?"},
    ]
    server.client.chat.completions.create(model="starter", messages=[{"role": "user", "content": content}])
    [request] = backend.requests
    places = [segment for segment in request.segments if isinstance(segment, MediaSegment)]
    assert places == [MediaSegment("vision", 0), MediaSegment("hearing", 0), MediaSegment("vision", 1)]
    assert [media.data for media in request.media["vision"]] == [base64.b64decode(PNG)] * 2
    assert request.media["vision"][0].key == request.media["vision"][1].key
    assert request.media["vision"][0].mime == "image/png"
    assert request.media["hearing"][0].mime == "audio/wav"
    assert request.media["hearing"][0].key != request.media["vision"][0].key
    assert isinstance(request.segments[-1], TokenSegment)


def test_several_choices_have_seeds_of_their_own(server: LiveServer, backend: FakeBackend):
    answer = server.client.chat.completions.create(model="starter", messages=QUESTION, n=3, seed=11)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [choice.message.content for choice in answer.choices] == [TEXT] * 3
    assert answer.usage.prompt_tokens == 20, "the prompt is shared"
    seeds = [request.seed for request in backend.requests]
    assert seeds[0] == 11
    assert len(set(seeds)) == len({request.request_id for request in backend.requests}) == 3
    server.client.chat.completions.create(model="starter", messages=QUESTION, n=3, seed=11)
    assert [request.seed for request in backend.requests[3:]] == seeds


def test_streamed_choices_interleave(server: LiveServer):
    chunks = list(server.client.chat.completions.create(model="starter", messages=QUESTION, n=2, stream=True))
    for index in range(2):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert own[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in own) == TEXT
        assert own[-1].finish_reason == "stop"
    order = [chunk.choices[0].index for chunk in chunks]
    assert order != sorted(order), "neither waits for the other to end"


def test_one_failing_choice_fails_and_aborts_all(server: LiveServer, backend: FakeBackend):
    def script(request):
        yield TextDelta("a")
        yield RequestFailed("stage thinker died") if request.request_id.endswith("-1") else TextDelta("b")
        yield Hold()

    backend.script = script
    with pytest.raises(InternalServerError) as caught:
        server.client.chat.completions.create(model="starter", messages=QUESTION, n=3)
    assert caught.value.code == "stage_failed"
    assert len(backend.aborted) == 2
    assert backend.num_open == 0


def test_error_in_mid_stream_is_the_last_event(server: LiveServer, backend: FakeBackend):
    backend.script = lambda request: [TextDelta("Two"), RequestFailed("stage thinker died twice")]
    stream = server.client.chat.completions.create(model="starter", messages=QUESTION, stream=True)
    seen = []
    with pytest.raises(APIError) as caught:
        seen.extend(chunk.choices[0].delta.content for chunk in stream)
    assert "stage thinker died twice" in str(caught.value)
    assert backend.num_open == 0


def test_bug_in_mid_stream_is_reported_without_details(server: LiveServer, backend: FakeBackend):
    backend.script = lambda request: [TextDelta("Two"), ZeroDivisionError("secret detail")]
    stream = server.client.chat.completions.create(model="starter", messages=QUESTION, stream=True)
    with pytest.raises(APIError) as caught:
        list(stream)
    assert "secret" not in str(caught.value)
    assert backend.num_open == 0


@pytest.mark.parametrize("stream", [False, True])
def test_early_error_keeps_its_status(server: LiveServer, backend: FakeBackend, stream: bool):
    backend.script = lambda request: [RequestFailed("stage vision died")]
    with pytest.raises(InternalServerError) as caught:
        server.client.chat.completions.create(model="starter", messages=QUESTION, stream=stream)
    assert caught.value.status_code == 500
    assert caught.value.body["message"] == "stage vision died"


def test_server_side_abort_is_an_error(server: LiveServer, backend: FakeBackend):
    backend.script = lambda request: [done(finish_reason=FinishReason.ABORT)]
    with pytest.raises(InternalServerError, match="aborted"):
        server.client.chat.completions.create(model="starter", messages=QUESTION)


def test_spoken_answer_without_sound_is_an_empty_file(server: LiveServer, backend: FakeBackend):
    backend.script = lambda request: [TextDelta("!"), done()]
    answer = server.client.chat.completions.create(
        model="starter",
        messages=QUESTION,
        modalities=["text", "audio"],
        audio={"voice": "joe", "format": "wav"},
    )
    with wave.open(io.BytesIO(base64.b64decode(answer.choices[0].message.audio.data))) as file:
        assert file.getnframes() == 0


def test_changing_sample_rate_is_an_error(server: LiveServer, backend: FakeBackend):
    backend.script = lambda request: [AudioDelta(tone(0), 22_050), AudioDelta(tone(0), 16_000), done()]
    stream = server.client.chat.completions.create(
        model="starter",
        messages=QUESTION,
        modalities=["text", "audio"],
        audio={"voice": "joe", "format": "pcm16"},
        stream=True,
    )
    with pytest.raises(APIError, match="sample rate changed"):
        list(stream)
