"""Answers that end when their reader does: a disconnect cancels the work, streaming or not.

Knows ASGI only.  A stream is pulled no faster than the client reads: every chunk waits for the
server's `send`, which waits for the socket.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from omnistage.errors import OmnistageError
from omnistage.serving.http_errors import ClientGone, error_body, unexpected_error

T = TypeVar("T")

EVENT_STREAM = "text/event-stream"
SSE_END = b"data: [DONE]\n\n"


def server_sent_event(data: Mapping[str, Any]) -> bytes:
    """One `data:` event holding a JSON object."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


async def with_error_event(source: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Events of `source`; an error after the first one becomes the last event, an earlier one is raised."""
    is_started = False
    async with aclosing(source):
        try:
            async for event in source:
                is_started = True
                yield event
        except Exception as error:
            if not is_started:
                raise
            known = error if isinstance(error, OmnistageError) else unexpected_error(error)
            yield server_sent_event(error_body(known))


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` until it is done or the client leaves; then it is cancelled and has ended on return.

    The request's body must have been read.  Raises ClientGone, or what `work` raises.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_until_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


class StreamReply(Response):
    """A streamed body.  The status line waits for the first chunk, so an early error keeps its status.

    source: owned by the reply, closed when the stream ends, fails or loses its client.
    """

    def __init__(
        self,
        source: AsyncGenerator[bytes, None],
        *,
        media_type: str,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.source = source
        self.status_code = 200
        self.media_type = media_type
        self.background = None
        self.body = b""
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no", **(headers or {})})
        if "content-length" in self.headers:
            del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_started = False

        async def pump() -> None:
            nonlocal is_started
            try:
                async for chunk in self.source:
                    if not is_started:
                        is_started = True
                        await self._start(send)
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                if not is_started:
                    is_started = True
                    await self._start(send)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            finally:
                await self.source.aclose()

        try:
            await while_connected(receive, pump())
        except ClientGone:
            if not is_started:
                raise

    async def _start(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
