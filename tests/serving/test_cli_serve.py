"""`omnistage serve` over a scripted pipeline: readiness, failing to load, and stopping by signals."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from fake_backend import FakeBackend, Hold

from omnistage.errors import Draining, WeightsError
from omnistage.serving import cli_serve
from omnistage.serving.cli import main
from omnistage.serving.requests import TextDelta

CHAT = {"model": "starter", "messages": [{"role": "user", "content": "Hi"}], "stream": True}


@dataclass
class FakePipeline:
    """Loads until `load` is set; fails to load if there is a failure."""

    orchestrator: FakeBackend
    failure: Exception | None = None
    is_closed: bool = False
    load: threading.Event = field(default_factory=threading.Event)

    async def drain(self, seconds: float) -> None:
        self.orchestrator.is_ready = False
        self.orchestrator.refusal = Draining("the server is stopping")
        await asyncio.to_thread(self.wait_until_idle, seconds)

    def wait_until_idle(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.orchestrator.num_open and time.monotonic() < deadline:
            time.sleep(0.01)

    async def wait_ready(self) -> None:
        await asyncio.to_thread(self.load.wait, 20)
        if self.failure is not None:
            raise self.failure
        self.orchestrator.is_ready = True


@pytest.fixture
def pipeline(backend: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> FakePipeline:
    backend.is_ready = False
    pipeline = FakePipeline(backend)

    @contextlib.asynccontextmanager
    async def start(spec: Any, options: Any) -> AsyncIterator[FakePipeline]:
        try:
            yield pipeline
        finally:
            pipeline.is_closed = True

    monkeypatch.setattr(cli_serve, "start_pipeline", start)
    monkeypatch.setattr(cli_serve, "ensure_weights", lambda spec: None)
    return pipeline


def serve_while(monkeypatch: pytest.MonkeyPatch, client: Callable[[str], None]) -> int:
    """Run `omnistage serve` here, where signals arrive, and a client beside it.  Returns the exit status."""
    failures: list[BaseException] = []
    listen = cli_serve.listen

    def listen_and_start_client(host: str, port: int) -> Any:
        listener = listen(host, port)
        thread.start_at(f"http://127.0.0.1:{listener.getsockname()[1]}")
        return listener

    class Client(threading.Thread):
        def start_at(self, url: str) -> None:
            self.url = url
            self.start()

        def run(self) -> None:
            try:
                client(self.url)
            except BaseException as error:
                failures.append(error)
                os.kill(os.getpid(), signal.SIGTERM)

    thread = Client()
    monkeypatch.setattr(cli_serve, "listen", listen_and_start_client)
    status = main(["serve", "--port", "0", "--log-level", "error"])
    thread.join(20)
    if failures:
        raise failures[0]
    return status


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serves_while_loading_and_stops_on_a_signal(
    pipeline: FakePipeline, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
):
    def client(url: str) -> None:
        assert httpx.get(f"{url}/health").status_code == 200
        assert httpx.get(f"{url}/ready").status_code == 503
        pipeline.load.set()
        while httpx.get(f"{url}/ready").status_code != 200:
            pass
        os.kill(os.getpid(), number)

    assert serve_while(monkeypatch, client) == 0
    assert pipeline.is_closed


def test_a_failure_to_load_stops_the_server(
    pipeline: FakePipeline, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    pipeline.failure = WeightsError("thinker/model.safetensors is truncated; run `omnistage fetch starter`")
    assert serve_while(monkeypatch, lambda url: pipeline.load.set()) == 1
    assert "is truncated" in capsys.readouterr().err
    assert pipeline.is_closed


def test_running_answers_may_finish(pipeline: FakePipeline, monkeypatch: pytest.MonkeyPatch):
    """A signal in the middle of an answer: the answer still ends, then the server does."""
    backend = pipeline.orchestrator
    may_go_on = threading.Event()

    def script(request: Any):
        yield TextDelta("Two")
        while not may_go_on.is_set():
            yield TextDelta(".")
        yield from backend.say(request)

    backend.script = script

    def client(url: str) -> None:
        pipeline.load.set()
        while httpx.get(f"{url}/ready").status_code != 200:
            pass
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=CHAT, timeout=20) as reply:
            lines = reply.iter_lines()
            next(lines)
            os.kill(os.getpid(), signal.SIGTERM)
            while httpx.post(f"{url}/v1/chat/completions", json=CHAT).status_code == 200:
                pass  # until the signal has arrived; then the server says that it stops
            assert httpx.post(f"{url}/v1/chat/completions", json=CHAT).status_code == 503
            may_go_on.set()
            assert [line for line in lines if line][-1] == "data: [DONE]"

    assert serve_while(monkeypatch, client) == 0
    assert backend.aborted == []


def test_a_second_signal_cuts_answers_short(pipeline: FakePipeline, monkeypatch: pytest.MonkeyPatch):
    backend = pipeline.orchestrator
    backend.script = lambda request: [TextDelta("Two"), Hold()]

    def client(url: str) -> None:
        pipeline.load.set()
        while httpx.get(f"{url}/ready").status_code != 200:
            pass
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=CHAT, timeout=20) as reply:
            lines = reply.iter_lines()
            next(lines)
            os.kill(os.getpid(), signal.SIGINT)
            # Two signals at once may arrive as one.
            while httpx.get(f"{url}/ready").status_code != 503:
                pass
            os.kill(os.getpid(), signal.SIGINT)
            with pytest.raises(httpx.RemoteProtocolError):
                list(lines)

    assert serve_while(monkeypatch, client) == 0
    assert backend.num_open == 0
    assert pipeline.is_closed
