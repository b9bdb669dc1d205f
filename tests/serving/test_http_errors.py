"""Bad requests: each is refused with the right status, code and param, and nothing reaches the backend."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import pytest
from bad_requests import CHAT, CHAT_ROWS, FORM_ROWS, INVALID, MISSING, SPEECH_ROWS, TYPE, UNKNOWN, WAV
from fake_backend import FakeBackend
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from live_server import LiveServer, serve
from openai import APIStatusError, RateLimitError

from omnistage.errors import ContextOverflow, Draining, InvalidRequest, MediaError, Overloaded
from omnistage.serving.chat_protocol import ChatCompletionRequest
from omnistage.serving.protocol import decode_json, parse_body
from omnistage.serving.settings import MediaSettings, ServerSettings


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
