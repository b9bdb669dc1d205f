"""What happens around every request: the size limit and the counters.  Pure ASGI, streams untouched."""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omnistage.errors import InvalidRequest, Overloaded
from omnistage.serving.http_errors import STATUS_CLIENT_GONE, error_response
from omnistage.serving.metrics import Metrics


class BodyTooLarge(InvalidRequest):
    code = "request_too_large"
    status = 413


class BodyLimit:
    """Refuses bodies over `max_bytes`, by their declared length or as they arrive.

    What a client still sends after that is read and thrown away, up to as much again, so that it
    gets to read its answer instead of a reset connection.
    A request's media live as long as it does, so its body counts against `max_total_bytes` until its
    answer ends: many large requests at once get 429 instead of all the memory there is.
    """

    def __init__(self, app: ASGIApp, *, max_bytes: int, max_total_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self.max_total_bytes = max_total_bytes
        self.total_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"")
        if declared.isdigit() and int(declared) > self.max_bytes:
            await self._drain(receive)
            await error_response(self._error(int(declared)))(scope, receive, send)
            return
        num_bytes = 0

        async def limited_receive() -> Message:
            nonlocal num_bytes
            message = await receive()
            size = len(message.get("body", b""))
            num_bytes += size
            self.total_bytes += size
            if num_bytes > self.max_bytes or self.total_bytes > self.max_total_bytes:
                if message.get("more_body", False):
                    await self._drain(receive)
                raise self._error(num_bytes) if num_bytes > self.max_bytes else self._overloaded()
            return message

        try:
            await self.app(scope, limited_receive, send)
        finally:
            self.total_bytes -= num_bytes

    def _overloaded(self) -> Overloaded:
        return Overloaded(
            f"the bodies of the requests under way have {self.total_bytes} bytes together, the limit is "
            f"{self.max_total_bytes}; try again when some have ended"
        )

    async def _drain(self, receive: Receive) -> None:
        num_bytes = 0
        while num_bytes <= self.max_bytes:
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if message["type"] == "http.disconnect" or not message.get("more_body", False):
                return

    def _error(self, num_bytes: int) -> BodyTooLarge:
        return BodyTooLarge(
            f"the request body has {num_bytes} bytes or more, the limit is {self.max_bytes}; "
            "send smaller media or links to it"
        )


class CountRequests:
    """Counts requests by route, method and status, and times them until the last byte."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status = STATUS_CLIENT_GONE
        started = time.monotonic()

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self.metrics.requests_in_progress.inc()
        try:
            await self.app(scope, receive, watched_send)
        except Exception:
            status = 500
            raise
        finally:
            self.metrics.requests_in_progress.dec()
            route = getattr(scope.get("route"), "path", "unmatched")
            self.metrics.observe_request(
                route=route, method=scope["method"], status=status, seconds=time.monotonic() - started
            )
