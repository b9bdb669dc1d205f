"""A real uvicorn server on a free port of 127.0.0.1, in a thread of its own."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn
from openai import OpenAI

from omnistage.serving.app import create_app
from omnistage.serving.requests import Backend
from omnistage.serving.settings import ServerSettings


@dataclass(frozen=True)
class LiveServer:
    url: str
    client: OpenAI

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Leave no transport behind: a client that does not read would keep one open past the loop's end."""
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        for _ in range(3):  # a transport tells its protocol in the loop's next turns
            await asyncio.sleep(0)


@contextmanager
def serve(backend: Backend, settings: ServerSettings | None = None) -> Iterator[LiveServer]:
    app = create_app(backend, settings)
    config = uvicorn.Config(app, log_level="critical", ws="none", timeout_graceful_shutdown=5)
    listener = socket.create_server(("127.0.0.1", 0))
    server = _Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        assert server.is_up.wait(20), "the server did not start"
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=20) as client:
            yield LiveServer(url, client)
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()
        assert not thread.is_alive()
