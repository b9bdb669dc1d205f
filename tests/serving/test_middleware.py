"""Memory that requests may take together."""

from __future__ import annotations

import asyncio
import json

import pytest

from omnistage.errors import InvalidRequest, Overloaded
from omnistage.serving.middleware import BodyLimit, BodyTooLarge
from omnistage.serving.protocol import MAX_JSON_VALUES, decode_json

SCOPE = {"type": "http", "headers": []}


def body_of(size, parts=4):
    messages = [
        {"type": "http.request", "body": b"x" * (size // parts), "more_body": part < parts - 1}
        for part in range(parts)
    ]

    async def receive():
        return messages.pop(0)

    return receive


async def unsent(message):
    raise AssertionError(f"nothing was to be sent, not {message}")


class Reader:
    """An app that reads its body and then answers for as long as it is told."""

    def __init__(self):
        self.has_read = asyncio.Event()
        self.is_released = asyncio.Event()

    async def __call__(self, scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        self.has_read.set()
        await self.is_released.wait()


async def test_bodies_count_until_their_answers_end():
    app = Reader()
    limit = BodyLimit(app, max_bytes=1000, max_total_bytes=1500)
    first = asyncio.create_task(limit(SCOPE, body_of(900), unsent))
    await app.has_read.wait()
    with pytest.raises(Overloaded, match="limit is 1500"):
        await limit(SCOPE, body_of(900), unsent)
    assert limit.total_bytes == 900
    app.is_released.set()
    await first
    await limit(SCOPE, body_of(900), unsent)
    assert limit.total_bytes == 0


async def test_one_body_over_its_own_limit_is_refused_and_counts_no_more():
    limit = BodyLimit(Reader(), max_bytes=1000, max_total_bytes=10_000)
    with pytest.raises(BodyTooLarge):
        await limit(SCOPE, body_of(2000), unsent)
    assert limit.total_bytes == 0


def test_a_body_of_nothing_but_brackets_is_refused():
    with pytest.raises(InvalidRequest, match=str(MAX_JSON_VALUES)):
        decode_json(b"[" + b"[]," * MAX_JSON_VALUES + b"[]]")
    picture = {"image_url": "data:image/png;base64," + "A" * (4 * MAX_JSON_VALUES)}
    assert decode_json(json.dumps(picture).encode()) == picture
