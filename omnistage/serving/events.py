"""Runs backend requests: several at once, merged in order of arrival, always closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing

from omnistage.errors import RequestFailed
from omnistage.serving.requests import Backend, Done, Event, GenerateRequest
from omnistage.types import FinishReason


async def run(backend: Backend, request: GenerateRequest) -> AsyncGenerator[Event, None]:
    """The events of one request.  Closing this generator aborts it.

    Raises what the backend raises, and RequestFailed if it was aborted from the other side.
    """
    stream = backend.submit(request)
    try:
        async for event in stream:
            if isinstance(event, Done) and event.finish_reason is FinishReason.ABORT:
                raise RequestFailed("the request was aborted by the server", code="aborted")
            yield event
    finally:
        await stream.aclose()


async def run_all(
    backend: Backend, requests: Sequence[GenerateRequest]
) -> AsyncGenerator[tuple[int, Event], None]:
    """Events of several requests with the index of theirs.  One failure ends and aborts them all.

    Each request is asked for its next event only after the last one was taken, so a slow reader
    slows them all.
    """
    if len(requests) == 1:
        async with aclosing(run(backend, requests[0])) as events:
            async for event in events:
                yield 0, event
        return
    async with AsyncExitStack() as stack:
        sources = [run(backend, request) for request in requests]
        for source in sources:
            stack.push_async_callback(source.aclose)
        pending = {asyncio.ensure_future(anext(source)): index for index, source in enumerate(sources)}
        stack.push_async_callback(_cancel_all, pending)
        while pending:
            await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in pending if task.done()]:
                index = pending.pop(task)
                try:
                    event = task.result()
                except StopAsyncIteration:
                    continue
                pending[asyncio.ensure_future(anext(sources[index]))] = index
                yield index, event


async def _cancel_all(tasks: dict[asyncio.Task[Event], int]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
