"""Bad requests: each is refused with the right status, code and param, and nothing reaches the backend."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import pytest
from fake_backend import FakeBackend
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live_server import LiveServer, serve
from openai import APIStatusError, RateLimitError

from omnistage.errors import ContextOverflow, Draining, InvalidRequest, MediaError, Overloaded
from omnistage.serving.chat_protocol import ChatCompletionRequest
from omnistage.serving.protocol import decode_json, parse_body
from omnistage.serving.settings import MediaSettings, ServerSettings

USER = {"role": "user", "content": "Hello"}
CHAT: dict[str, Any] = {"model": "starter", "messages": [USER]}
SPEECH: dict[str, Any] = {"model": "starter", "input": "Hello.", "voice": "joe"}
SPOKEN: dict[str, Any] = {**CHAT, "modalities": ["text", "audio"], "audio": {"format": "wav", "voice": "joe"}}
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"\0" * 40).decode()
WAV = base64.b64encode(b"RIFF\x24\0\0\0WAVEfmt " + b"\0" * 40).decode()

MISSING, INVALID, TYPE = "missing_required_parameter", "invalid_value", "invalid_type"
UNSUPPORTED, UNKNOWN = "unsupported_parameter", "unknown_parameter"


def part(kind: str, value: Any, **more: Any) -> dict[str, Any]:
    return {**CHAT, "messages": [{"role": "user", "content": [{"type": kind, kind: value, **more}]}]}


def image(url: str, **more: Any) -> dict[str, Any]:
    return part("image_url", {"url": url, **more})


def data_url(data: bytes, mime: str = "image/png") -> str:
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


URL = "messages[0].content[0].image_url.url"
CLIP = "messages[0].content[0].input_audio.data"

# body, status, code, param, a word of the message
CHAT_ROWS: list[tuple[Any, int, str, str | None, str]] = [
    ({"messages": [USER]}, 400, MISSING, "model", "required"),
    ({"model": "starter"}, 400, MISSING, "messages", "required"),
    ({"model": "starter", "mesages": [USER]}, 400, UNKNOWN, "mesages", "did you mean 'messages'"),
    ({**CHAT, "temprature": 1}, 400, UNKNOWN, "temprature", "did you mean 'temperature'"),
    ({**CHAT, "model": "gpt-4o"}, 404, "model_not_found", "model", "use 'starter'"),
    ({**CHAT, "model": 3}, 400, TYPE, "model", "got 3"),
    ({**CHAT, "model": "\ud83d\ude00" * 400}, 404, "model_not_found", "model", "use 'starter'"),
    ({**CHAT, "messages": []}, 400, INVALID, "messages", "at least 1"),
    ({**CHAT, "messages": "Hello"}, 400, TYPE, "messages", "list"),
    ({**CHAT, "messages": [3]}, 400, TYPE, "messages[0]", "got 3"),
    ({**CHAT, "messages": [{"content": "x"}]}, 400, MISSING, "messages[0].role", "required"),
    ({**CHAT, "messages": [{"role": "tool", "content": "x"}]}, 400, INVALID, "messages[0].role", "'tool'"),
    ({**CHAT, "messages": [USER, {"role": "user"}]}, 400, MISSING, "messages[1].content", "required"),
    ({**CHAT, "messages": [{"role": "user", "content": 5}]}, 400, TYPE, "messages[0].content", "got 5"),
    (
        {**CHAT, "messages": [{"role": "user", "content": []}]},
        400,
        INVALID,
        "messages[0].content",
        "at least 1",
    ),
    ({**CHAT, "messages": [{**USER, "name": "Ann"}]}, 400, UNSUPPORTED, "messages[0].name", "text"),
    ({**CHAT, "messages": [{**USER, "nick": "Ann"}]}, 400, UNKNOWN, "messages[0].nick", "nick"),
    ({**CHAT, "messages": [{**USER, "audio": {"id": "a"}}]}, 400, INVALID, "messages[0].audio", "assistant"),
    (
        {**CHAT, "messages": [{"role": "assistant", "content": "a", "audio": {"id": "a"}}]},
        400,
        INVALID,
        "messages[0].audio",
        "both",
    ),
    (
        {**CHAT, "messages": [{"role": "assistant", "audio": {"id": "audio_1"}}]},
        404,
        "audio_not_found",
        "messages[0].audio.id",
        "audio_1",
    ),
    (
        {**CHAT, "messages": [USER, {"role": "system", "content": "late"}]},
        400,
        "chat_template_error",
        "messages",
        "must come first",
    ),
    (
        {
            **CHAT,
            "messages": [{"role": "system", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        },
        400,
        INVALID,
        "messages[0].content[0]",
        "system",
    ),
    (part("txt", "x"), 400, INVALID, "messages[0].content[0]", "'txt'"),
    (
        {**CHAT, "messages": [{"role": "user", "content": [{}]}]},
        400,
        MISSING,
        "messages[0].content[0]",
        "type",
    ),
    (part("text", 3), 400, TYPE, "messages[0].content[0].text", "got 3"),
    (part("video_url", {"url": "x"}), 400, UNSUPPORTED, "messages[0].content[0].video_url", "frames"),
    (part("image_url", {"url": "x"}, size=3), 400, UNKNOWN, "messages[0].content[0].size", "size"),
    (part("image_url", {"link": "x"}), 400, UNKNOWN, "messages[0].content[0].image_url.link", "url"),
    (part("image_url", {}), 400, MISSING, URL, "required"),
    (part("image_url", 3), 400, TYPE, "messages[0].content[0].image_url", "got 3"),
    (part("video_url", None), 400, INVALID, "messages[0].content[0]", "video_url"),
    (part("file", {"file_id": "x"}), 400, UNSUPPORTED, "messages[0].content[0].file", "image_url"),
    (image("x", detail="high"), 400, INVALID, "messages[0].content[0].image_url.detail", "high"),
    (image("ftp://host/a.png"), 400, "invalid_media", URL, "ftp"),
    (image("data:image/png;base64,@@@"), 400, "invalid_base64", URL, "base64"),
    (image("data:image/png;base64"), 400, "invalid_media", URL, "comma"),
    (image(data_url(b"")), 400, "invalid_media", URL, "empty"),
    (image(data_url(b"plain text")), 400, "invalid_media", URL, "no known format"),
    (image(data_url(base64.b64decode(WAV))), 400, "invalid_media", URL, "audio/wav"),
    (image(data_url(b"\x89PNG\r\n\x1a\n" + bytes(3000))), 413, "media_too_large", URL, "limit is 2000"),
    (image("http://127.0.0.1:1/a.png"), 400, "forbidden_media_host", URL, "loopback"),
    (image("http://localhost:1/a.png"), 400, "forbidden_media_host", URL, "private"),
    (image("file:///etc/passwd"), 400, "forbidden_file", URL, "file"),
    (
        {
            **CHAT,
            "messages": [
                {"role": "user", "content": [image(data_url(b"x"))["messages"][0]["content"][0]] * 5}
            ],
        },
        400,
        "invalid_media",
        "messages",
        "limit is 4",
    ),
    (
        part("input_audio", {"data": WAV}),
        400,
        MISSING,
        "messages[0].content[0].input_audio.format",
        "required",
    ),
    (
        part("input_audio", {"data": WAV, "format": "midi"}),
        400,
        INVALID,
        CLIP.replace("data", "format"),
        "midi",
    ),
    (part("input_audio", {"data": "%", "format": "wav"}), 400, "invalid_base64", CLIP, "base64"),
    (part("input_audio", {"data": WAV, "format": "mp3"}), 400, "invalid_media", CLIP, "declared as mp3"),
    (part("input_audio", {"data": PNG, "format": "wav"}), 400, "invalid_media", CLIP, "image/png"),
    ({**CHAT, "modalities": ["text", "video"]}, 400, INVALID, "modalities[1]", "video"),
    ({**CHAT, "modalities": ["text", "text"]}, 400, INVALID, "modalities", "once"),
    ({**CHAT, "modalities": []}, 400, INVALID, "modalities", "at least 1"),
    ({**CHAT, "modalities": ["text", "audio"]}, 400, MISSING, "audio", "required"),
    ({**CHAT, "audio": {"format": "wav"}}, 400, INVALID, "audio", "modalities"),
    ({**SPOKEN, "audio": {"voice": "joe"}}, 400, MISSING, "audio.format", "required"),
    ({**SPOKEN, "audio": {"voice": "joe", "format": "ogg"}}, 400, INVALID, "audio.format", "ogg"),
    ({**SPOKEN, "audio": {"voice": "jo", "format": "wav"}}, 404, "voice_not_found", "audio.voice", "'joe'"),
    ({**CHAT, "temperature": 2.5}, 400, INVALID, "temperature", "got 2.5"),
    ({**CHAT, "temperature": "0.5"}, 400, TYPE, "temperature", "number"),
    ({**CHAT, "temperature": True}, 400, TYPE, "temperature", "number"),
    ({**CHAT, "top_p": 0}, 400, INVALID, "top_p", "greater than 0"),
    ({**CHAT, "top_k": -2}, 400, INVALID, "top_k", "-1"),
    ({**CHAT, "min_p": 1.5}, 400, INVALID, "min_p", "got 1.5"),
    ({**CHAT, "presence_penalty": 3}, 400, INVALID, "presence_penalty", "got 3"),
    ({**CHAT, "frequency_penalty": -3}, 400, INVALID, "frequency_penalty", "got -3"),
    ({**CHAT, "repetition_penalty": 0}, 400, INVALID, "repetition_penalty", "got 0"),
    ({**CHAT, "max_tokens": 0}, 400, INVALID, "max_tokens", "got 0"),
    ({**CHAT, "max_tokens": 1.5}, 400, TYPE, "max_tokens", "1.5"),
    ({**CHAT, "max_tokens": 3, "max_completion_tokens": 4}, 400, INVALID, "max_tokens", "differ"),
    ({**CHAT, "min_tokens": 9, "max_tokens": 3}, 400, INVALID, "min_tokens", "3"),
    ({**CHAT, "max_tokens": 5000}, 400, "context_length_exceeded", "max_completion_tokens", "512"),
    (
        {**CHAT, "messages": [{"role": "user", "content": "x y " * 900}]},
        400,
        "context_length_exceeded",
        "messages",
        "512",
    ),
    ({**CHAT, "n": 0}, 400, INVALID, "n", "got 0"),
    ({**CHAT, "n": 9}, 400, INVALID, "n", "limit is 8"),
    ({**CHAT, "seed": 2**70}, 400, INVALID, "seed", "less than"),
    ({**CHAT, "logprobs": 3}, 400, TYPE, "logprobs", "got 3"),
    ({**CHAT, "top_logprobs": 3}, 400, INVALID, "top_logprobs", "logprobs"),
    ({**CHAT, "logprobs": True, "top_logprobs": 21}, 400, INVALID, "top_logprobs", "20"),
    ({**CHAT, "logit_bias": {"cat": 1}}, 400, INVALID, "logit_bias", "'cat'"),
    ({**CHAT, "logit_bias": {"5": 101}}, 400, INVALID, "logit_bias", "101"),
    ({**CHAT, "logit_bias": {"999999": 1}}, 400, INVALID, "logit_bias", "vocabulary"),
    ({**CHAT, "stop_token_ids": [-1]}, 400, INVALID, "stop_token_ids", "-1"),
    ({**CHAT, "stop": ["a", ""]}, 400, INVALID, "stop", "empty"),
    ({**CHAT, "stop": ["a"] * 17}, 400, INVALID, "stop", "16"),
    ({**CHAT, "stream_options": {"include_usage": True}}, 400, INVALID, "stream_options", "stream"),
    (
        {**CHAT, "stream": True, "stream_options": {"include_obfuscation": True}},
        400,
        UNSUPPORTED,
        "stream_options.include_obfuscation",
        "padded",
    ),
    ({**CHAT, "stream": "yes"}, 400, TYPE, "stream", "'yes'"),
    ({**CHAT, "tools": [{"type": "function"}]}, 400, UNSUPPORTED, "tools", "calls no tools"),
    ({**CHAT, "tool_choice": "auto"}, 400, UNSUPPORTED, "tool_choice", "calls no tools"),
    ({**CHAT, "functions": [{}]}, 400, UNSUPPORTED, "functions", "calls no tools"),
    ({**CHAT, "response_format": {"type": "json_object"}}, 400, UNSUPPORTED, "response_format", "text"),
    ({**CHAT, "reasoning_effort": "high"}, 400, UNSUPPORTED, "reasoning_effort", "reason"),
    ({**CHAT, "store": True}, 400, UNSUPPORTED, "store", "stored"),
    ({**CHAT, "service_tier": "flex"}, 400, UNSUPPORTED, "service_tier", "one tier"),
    ({**CHAT, "prediction": {"type": "content"}}, 400, UNSUPPORTED, "prediction", "leave"),
    ({**CHAT, "metadata": {"k": "v" * 600}}, 400, INVALID, "metadata", "512"),
    ({**CHAT, "metadata": {"k": 1}}, 400, TYPE, "metadata.k", "got 1"),
    ({**CHAT, "cache_salt": ""}, 400, INVALID, "cache_salt", "at least 1"),
]

SPEECH_ROWS: list[tuple[Any, int, str, str | None, str]] = [
    ({"model": "starter", "voice": "joe"}, 400, MISSING, "input", "required"),
    ({"model": "starter", "input": "a"}, 400, MISSING, "voice", "required"),
    ({**SPEECH, "model": "tts-1"}, 404, "model_not_found", "model", "use 'starter'"),
    ({**SPEECH, "voice": "alloy"}, 404, "voice_not_found", "voice", "known: amy, joe"),
    ({**SPEECH, "input": ""}, 400, INVALID, "input", "at least 1"),
    ({**SPEECH, "input": " \n"}, 400, INVALID, "input", "blank"),
    ({**SPEECH, "input": "a" * 5000}, 400, "string_above_max_length", "input", "4096"),
    ({**SPEECH, "speed": 5}, 400, INVALID, "speed", "got 5"),
    ({**SPEECH, "response_format": "pcm16"}, 400, INVALID, "response_format", "pcm16"),
    ({**SPEECH, "stream_format": "wav"}, 400, INVALID, "stream_format", "wav"),
    ({**SPEECH, "instructions": "whisper"}, 400, UNSUPPORTED, "instructions", "voice"),
    ({**SPEECH, "pitch": 2}, 400, UNKNOWN, "pitch", "pitch"),
]

FORM_ROWS: list[tuple[dict[str, Any], int, str, str | None, str]] = [
    ({}, 400, MISSING, "model", "required"),
    ({"model": "whisper-1"}, 404, "model_not_found", "model", "use 'starter'"),
    ({"model": "starter", "language": "de"}, 400, INVALID, "language", "en"),
    ({"model": "starter", "prompt": "Names: Ann"}, 400, UNSUPPORTED, "prompt", "hints"),
    ({"model": "starter", "temperature": "0.4"}, 400, INVALID, "temperature", "0.4"),
    ({"model": "starter", "temperature": "hot"}, 400, TYPE, "temperature", "hot"),
    ({"model": "starter", "response_format": "srt"}, 400, INVALID, "response_format", "srt"),
    (
        {"model": "starter", "response_format": "text", "stream": "true"},
        400,
        INVALID,
        "response_format",
        "stream",
    ),
    (
        {"model": "starter", "timestamp_granularities[]": "word"},
        400,
        UNSUPPORTED,
        "timestamp_granularities[]",
        "time",
    ),
    ({"model": "starter", "lang": "en"}, 400, UNKNOWN, "lang", "language"),
    ({"model": ["starter", "starter"]}, 400, INVALID, "model", "twice"),
]


@pytest.fixture(scope="module")
def bad_backend(model_dir) -> FakeBackend:
    return FakeBackend(model_dir)


@pytest.fixture(scope="module")
def bad_server(bad_backend):
    media = MediaSettings(max_items=4, max_image_bytes=2000)
    with serve(bad_backend, ServerSettings(media=media, max_body_bytes=100_000)) as server:
        yield server


def check(reply: httpx.Response, status: int, code: str, param: str | None, words: str) -> None:
    body = reply.json()
    assert set(body) == {"error"}, body
    error = body["error"]
    assert (reply.status_code, error["code"], error["param"]) == (status, code, param), error
    assert words in error["message"], error
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(("body", "status", "code", "param", "words"), CHAT_ROWS)
def test_bad_chat(
    bad_server: LiveServer,
    bad_backend: FakeBackend,
    body: Any,
    status: int,
    code: str,
    param: str | None,
    words: str,
):
    reply = httpx.post(f"{bad_server.url}/v1/chat/completions", content=json.dumps(body))
    check(reply, status, code, param, words)
    assert bad_backend.requests == []


@pytest.mark.parametrize(("body", "status", "code", "param", "words"), SPEECH_ROWS)
def test_bad_speech(
    bad_server: LiveServer,
    bad_backend: FakeBackend,
    body: Any,
    status: int,
    code: str,
    param: str | None,
    words: str,
):
    check(httpx.post(f"{bad_server.url}/v1/audio/speech", json=body), status, code, param, words)
    assert bad_backend.requests == []


@pytest.mark.parametrize(("fields", "status", "code", "param", "words"), FORM_ROWS)
def test_bad_transcription(
    bad_server: LiveServer,
    bad_backend: FakeBackend,
    fields: dict[str, Any],
    status: int,
    code: str,
    param: str | None,
    words: str,
):
    files = {"file": ("a.wav", base64.b64decode(WAV))}
    reply = httpx.post(f"{bad_server.url}/v1/audio/transcriptions", data=fields, files=files)
    check(reply, status, code, param, words)
    assert bad_backend.requests == []


@pytest.mark.parametrize(
    ("files", "code", "words"),
    [
        ({"other": ("a.wav", b"x")}, TYPE, "must not be a file"),
        ({"file": ("a.wav", b"")}, "invalid_media", "empty"),
        ({"file": ("a.wav", b"plain text")}, "invalid_media", "no known format"),
        ({"file": (None, b"RIFF")}, TYPE, "filename"),
        ({"note": (None, b"x")}, UNKNOWN, "note"),
    ],
)
def test_bad_transcription_files(bad_server: LiveServer, files: dict[str, Any], code: str, words: str):
    url = f"{bad_server.url}/v1/audio/transcriptions"
    reply = httpx.post(url, data={"model": "starter"}, files=files)
    check(reply, 400, code, next(iter(files)), words)


def test_transcription_without_a_file(bad_server: LiveServer):
    url = f"{bad_server.url}/v1/audio/transcriptions"
    reply = httpx.post(url, files={"model": (None, "starter")})
    check(reply, 400, MISSING, "file", "required")
    check(
        httpx.post(url, json={"model": "starter"}), 400, "invalid_content_type", None, "multipart/form-data"
    )
    broken = httpx.post(url, content=b"--x\r\nbroken", headers={"content-type": "multipart/form-data"})
    check(broken, 400, "invalid_form", None, "boundary")


@pytest.mark.parametrize(
    ("raw", "code", "words"),
    [
        (b"", "invalid_json", "not JSON"),
        (b"{", "invalid_json", "not JSON"),
        (b"[1]", TYPE, "JSON object"),
        (b'"x"', TYPE, "JSON object"),
        (b"null", TYPE, "JSON object"),
        (b'{"model": "\xff"}', "invalid_json", "0xff"),
        (b'{"model": NaN}', "invalid_json", "NaN"),
        (b'{"model": "\\ud800"}', "invalid_json", "not JSON"),
        (b'{"\\udfff": 1}', "invalid_json", "not JSON"),
        (b'{"seed": 1' + b"0" * 5000 + b"}", "invalid_json", "not JSON"),
        (
            b'{"temperature": 1e999, "model": "starter", "messages": [{"role":"user","content":"a"}]}',
            INVALID,
            "inf",
        ),
        (b"[" * 50_000, "invalid_json", "nested too deeply"),
    ],
)
def test_bad_json(bad_server: LiveServer, raw: bytes, code: str, words: str):
    reply = httpx.post(f"{bad_server.url}/v1/chat/completions", content=raw)
    check(reply, 400, code, "temperature" if code == INVALID else None, words)


def chunks(size: int):
    yield b'--x\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
    for _ in range(size // 10_000):
        yield b"x" * 10_000


@pytest.mark.parametrize("content", [b"x" * 200_000, chunks(200_000)], ids=["declared", "chunked"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/audio/transcriptions"])
def test_body_over_the_limit(bad_server: LiveServer, path: str, content: Any):
    headers = {"content-type": "multipart/form-data; boundary=x"} if "audio" in path else {}
    content = chunks(200_000) if not isinstance(content, bytes) else content
    reply = httpx.post(f"{bad_server.url}{path}", content=content, headers=headers)
    check(reply, 413, "request_too_large", None, "limit is 100000")


def test_unknown_routes_and_methods(bad_server: LiveServer):
    check(httpx.get(f"{bad_server.url}/v2/chat"), 404, "unknown_url", None, "/v2/chat")
    check(httpx.post(f"{bad_server.url}/v1/embeddings", json={}), 404, "unknown_url", None, "/v1/embeddings")
    reply = httpx.get(f"{bad_server.url}/v1/chat/completions")
    check(reply, 405, "method_not_allowed", None, "GET")
    assert reply.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("error", "status", "code", "kind", "retry_after"),
    [
        (
            Overloaded("32 requests wait, the limit is 32", retry_after=2.5),
            429,
            "overloaded",
            "rate_limit_error",
            "3",
        ),
        (Draining("the server is stopping"), 503, "draining", "service_unavailable_error", None),
        (
            MediaError("the JPEG is truncated", param="messages"),
            400,
            "invalid_media",
            "invalid_request_error",
            None,
        ),
        (ContextOverflow("too long"), 400, "context_length_exceeded", "invalid_request_error", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_backend_errors(
    server: LiveServer,
    backend: FakeBackend,
    error: Exception,
    status: int,
    code: str,
    kind: str,
    retry_after: str | None,
    stream: bool,
):
    backend.refusal = error
    with pytest.raises(APIStatusError) as caught:
        server.client.chat.completions.create(**CHAT, stream=stream)
    assert caught.value.status_code == status
    assert isinstance(caught.value, RateLimitError) == (status == 429)
    assert (caught.value.code, caught.value.type) == (code, kind)
    assert caught.value.response.headers.get("retry-after") == retry_after


def test_bug_is_a_500_without_details(server: LiveServer, backend: FakeBackend):
    backend.refusal = ZeroDivisionError("secret")
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT)
    assert reply.status_code == 500
    assert reply.json()["error"]["type"] == "server_error"
    assert "secret" not in reply.text


def test_not_ready(server: LiveServer, backend: FakeBackend):
    backend.is_ready = False
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "not_ready")
    assert reply.headers["retry-after"] == "1"


def test_neutral_values_of_unsupported_fields_pass(server: LiveServer):
    body = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "store": False,
        "service_tier": "auto",
        "prediction": None,
        "temperature": None,
        "stop": None,
        "modalities": ["text"],
    }
    assert httpx.post(f"{server.url}/v1/chat/completions", json={**CHAT, **body}).status_code == 200


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
field_names = st.sampled_from([*ChatCompletionRequest.model_fields, *ChatCompletionRequest.unsupported, "x"])


def refusal_of(parse: Callable[[Any], Any], value: Any) -> InvalidRequest | None:
    """None if the value is taken.  Any other exception than InvalidRequest fails the test."""
    try:
        parse(value)
    except InvalidRequest as error:
        return error
    return None


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(field_names, json_values, max_size=4))
def test_any_object_is_parsed_or_refused_by_name(fields: dict[str, Any]):
    refusal = refusal_of(partial(parse_body, ChatCompletionRequest), {**CHAT, **fields})
    if refusal is not None:
        assert refusal.status == 400
        assert refusal.param
        assert refusal.param.split(".")[0].split("[")[0] in fields
        json.dumps(refusal.message).encode()


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_json_or_refused(raw: bytes):
    refusal = refusal_of(decode_json, raw)
    if refusal is None:
        json.dumps(decode_json(raw), ensure_ascii=False).encode()
    else:
        assert refusal.code == "invalid_json"
