"""A client that leaves ends its request; a client that reads slowly slows its request and no other."""

from __future__ import annotations

import json
import socket

import httpx
import numpy as np
import pytest
from fake_backend import ANSWER, FakeBackend, Hold
from live_server import LiveServer

from omnistage.serving.requests import AudioDelta, TextDelta

CHAT = {"model": "starter", "messages": [{"role": "user", "content": "Hello"}]}
SPOKEN = {**CHAT, "modalities": ["text", "audio"], "audio": {"format": "pcm16"}}
SPEECH = {"model": "starter", "input": "Two cats sleep.", "voice": "joe", "response_format": "pcm"}
WAIT = 20  # seconds


def send(server: LiveServer, path: str, body: dict) -> socket.socket:
    """A raw POST, so that the test decides when to read and when to hang up."""
    payload = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\n\r\n"
    )
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=WAIT)
    connection.sendall(head.encode() + payload)
    return connection


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", {**CHAT, "stream": True}),
        ("/v1/chat/completions", {**SPOKEN, "stream": True}),
        ("/v1/chat/completions", {**CHAT, "n": 3}),
        ("/v1/chat/completions", {**CHAT, "n": 3, "stream": True}),
        ("/v1/audio/speech", SPEECH),
        ("/v1/audio/speech", {**SPEECH, "stream_format": "sse"}),
    ],
)
@pytest.mark.parametrize("num_events", [0, 2])
def test_hanging_up_aborts(server: LiveServer, backend: FakeBackend, path: str, body: dict, num_events: int):
    def script(request):
        for event, _ in zip(backend.say(request), range(num_events), strict=False):
            yield event
        yield Hold()

    backend.script = script
    connection = send(server, path, body)
    assert backend.holding.wait(WAIT)
    assert not backend.aborted
    connection.close()
    assert backend.has_aborted.wait(WAIT)
    # the server answers others, and by then every choice is closed
    assert httpx.get(f"{server.url}/health").status_code == 200
    expected = body.get("n", 1)
    metrics = httpx.get(f"{server.url}/metrics").text
    assert backend.num_open == 0
    assert len(backend.aborted) == len(backend.requests) == expected
    assert "omnistage_http_requests_in_progress 1.0" in metrics, "only the scrape itself is in progress"


def test_hanging_up_while_a_transcription_runs(server: LiveServer, backend: FakeBackend):
    backend.script = lambda request: [TextDelta(" What"), Hold()]
    wav = b"RIFF\x24\0\0\0WAVEfmt " + b"\0" * 40
    with httpx.Client(timeout=0.5) as client, pytest.raises(httpx.ReadTimeout):
        client.post(
            f"{server.url}/v1/audio/transcriptions", data={"model": "starter"}, files={"file": ("a.wav", wav)}
        )
    assert backend.has_aborted.wait(WAIT)


def test_slow_reader_holds_its_own_stream_back(server: LiveServer, backend: FakeBackend):
    """The backend offers 200 MB; a client that reads nothing gets only what socket buffers hold."""
    num_pieces = 2000
    piece = np.zeros(50_000, dtype=np.float32)  # 100 kB as pcm16

    def script(request):
        if "audio" not in request.outputs:
            yield from backend.say(request)
            return
        for _ in range(num_pieces):
            yield AudioDelta(piece, 22_050)
        yield Hold()

    backend.script = script
    with send(server, "/v1/audio/speech", SPEECH) as connection:
        connection.recv(1)
        answer = server.client.chat.completions.create(**CHAT)  # others are served meanwhile
        assert answer.choices[0].message.content == "".join(ANSWER)
        # The kernel's buffers may still grow for a while.  Each request is a round through the event loop.
        pulled, rounds_at_rest = -1, 0
        while rounds_at_rest < 10:
            httpx.get(f"{server.url}/health")
            rounds_at_rest = rounds_at_rest + 1 if backend.num_pulled == pulled else 0
            pulled = backend.num_pulled
            assert pulled < num_pieces / 10, "the stream does not wait for its reader"
    assert backend.has_aborted.wait(WAIT)


def test_finished_requests_are_not_aborts(server: LiveServer, backend: FakeBackend):
    for stream in (False, True):
        reply = server.client.chat.completions.create(**CHAT, stream=stream)
        if stream:
            list(reply)
    assert backend.aborted == []
    assert backend.num_open == 0
