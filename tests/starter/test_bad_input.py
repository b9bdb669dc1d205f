"""What is wrong is refused by its name, whoever finds it; and nothing of it stays behind."""

from __future__ import annotations

import asyncio
import io
import random
import struct
import wave
from contextlib import aclosing

import pytest
from PIL import Image

from omnistage.errors import ContextOverflow, InvalidRequest, MediaError, MediaTooLarge, NotFound
from omnistage.serving.events import run
from tests.starter.asking import (
    AUDIO,
    DATA,
    MEDIA,
    chat,
    clip,
    data_url,
    error_of,
    image,
    relabelled,
    sound,
    speech,
)

JPEG = (DATA / "cat.jpg").read_bytes()
QUESTION = (MEDIA / "question.wav").read_bytes()
CONTEXT = 512  # see conftest
WORD = " word"  # one token


def picture(url):
    return {"type": "image_url", "image_url": {"url": url}}


def huge_png():
    """10,000 by 10,000 pixels in about 12 kB."""
    buffer = io.BytesIO()
    Image.new("1", (10_000, 10_000)).save(buffer, "PNG", optimize=True)
    assert len(buffer.getvalue()) < 20_000
    return buffer.getvalue()


def empty_wav():
    """A proper file of no samples."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
    return buffer.getvalue()


def riff(body):
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WAVE" + body


def long_text(num_tokens):
    return "Say" + WORD * num_tokens


TRUNCATED = JPEG[: len(JPEG) // 2]
NO_SOUND = riff(b"this is a letter to my grandmother, not sound ")
INPUT_AUDIO = {"type": "input_audio", "input_audio": {"data": "UklGR?==", "format": "wav"}}
TEXT_AS_WAV = {"type": "input_audio", "input_audio": {"data": "SGVsbG8gd29ybGQ=", "format": "wav"}}

# name -> (body, class of the error, words of its message, field to blame)
BAD = {
    "truncated JPEG": (chat(image(TRUNCATED), "?"), MediaError, "truncated", None),
    "100-megapixel PNG": (chat(image(huge_png()), "?"), MediaTooLarge, "100,000,000 pixels", None),
    "text as a picture": (
        chat(picture(data_url(b"hello", "image/png")), "?"),
        MediaError,
        "no known format",
        "messages[0].content[0].image_url.url",
    ),
    "sound as a picture": (chat(image(QUESTION), "?"), MediaError, "looks like audio/wav", None),
    "wrong base64 in a URL": (
        chat("?", picture("data:image/png;base64,@@@@")),
        MediaError,
        "not valid base64",
        "messages[0].content[1].image_url.url",
    ),
    "wrong base64 in input_audio": (
        chat(INPUT_AUDIO),
        MediaError,
        "not valid base64",
        "messages[0].content[0].input_audio.data",
    ),
    "text declared as WAV": (chat(TEXT_AS_WAV), MediaError, "no known format", None),
    "WAV of no bytes": (chat(sound(b"")), MediaError, "0 bytes", None),
    "WAV of no samples": (chat(sound(empty_wav())), MediaError, "no samples", None),
    "WAV that is a letter": (chat(sound(NO_SOUND)), MediaError, "sound", None),
    "WAV cut short": (chat(sound(QUESTION[:3000])), MediaError, "cut short|truncated|complete", None),
    "transcription of a letter": (clip(NO_SOUND), MediaError, "sound", None),
    "transcription of no samples": (clip(empty_wav()), MediaError, "no samples", None),
    "unknown model": (chat("?", model="gpt-5"), NotFound, "gpt-5", "model"),
    "unknown voice": (
        chat("?", modalities=["text", "audio"], audio={"format": "wav", "voice": "alloy"}),
        NotFound,
        "alloy",
        "audio.voice",
    ),
    "unknown voice of speech": (speech("Hello.", voice="alloy"), NotFound, "alloy", "voice"),
    "text over the context": (chat(long_text(600)), ContextOverflow, "512", "messages"),
    "answer over the context": (
        chat("Hello.", max_tokens=500),
        ContextOverflow,
        "500",
        "max_completion_tokens",
    ),
    "transcript over the context": (
        chat(long_text(474), sound(QUESTION), max_tokens=1),
        ContextOverflow,
        "512",
        "messages",
    ),
    "pictures over the context": (
        chat(long_text(370), *[image(JPEG)] * 16, max_tokens=1),
        ContextOverflow,
        "512",
        "messages",
    ),
    "unknown field": (chat("?", temprature=1), InvalidRequest, "temperature", "temprature"),
    "no messages": (chat("?") | {"messages": []}, InvalidRequest, "messages", "messages"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_fault_is_named(starter, name):
    body, kind, words, param = BAD[name]
    [outcome] = starter.outcomes(body)
    error = error_of(outcome)
    assert type(error) is kind
    assert 400 <= error.status < 500
    with pytest.raises(kind, match=words):
        raise error
    if param is not None:
        assert error.param == param


def test_omni_raises_the_same_errors(starter):
    body, kind, words, _ = BAD["truncated JPEG"]
    with pytest.raises(kind, match=words):
        starter.omni.generate([chat("Hi."), body])
    with pytest.raises(kind, match=words):
        list(starter.omni.stream(body))
    with pytest.raises(NotFound, match="gpt-5"):
        starter.omni.generate([BAD["unknown model"][0]])
    with pytest.raises(InvalidRequest, match="'n' is 2"):
        starter.omni.generate([chat("Hi.", n=2)])


def test_context_is_full_to_the_last_token(starter):
    """What is refused above by a hair is answered by a hair, until the context is full."""
    [empty] = starter.ask(chat(long_text(0), max_tokens=1))
    room = CONTEXT - empty.usage.prompt_tokens
    [reply] = starter.ask(chat(long_text(room - 1), ignore_eos=True, max_tokens=1))
    assert reply.usage.prompt_tokens == CONTEXT - 1
    [outcome] = starter.outcomes(chat(long_text(room), max_tokens=1))
    assert isinstance(outcome, ContextOverflow)


STORM = 200
STORM_SECONDS = 4.0  # within which its requests arrive


def storm_body(dice, index):
    """A request that will be left early: any kind, with media of its own or shared."""
    label = f"storm {index if dice.random() < 0.3 else 0}"
    cat, asked = image(relabelled(JPEG, label)), sound(relabelled(QUESTION, label))
    return dice.choice(
        [
            chat("Tell me a long story.", max_tokens=200),
            chat("Tell me a long story.", max_tokens=200, **AUDIO),
            chat(cat, "Describe it at length.", max_tokens=100),
            chat(cat, asked, max_tokens=100, **AUDIO),
            speech("A sentence that takes a while to be said. " * 5),
            clip(relabelled(QUESTION, label)),
        ]
    )


async def bad(starter, name):
    body, kind, *_ = BAD[name]
    with pytest.raises(kind):
        await starter.reply(body)


async def left_early(starter, body, seconds):
    """Read a request's events for so long, then go away.  True if that was in the middle of them."""
    async with aclosing(run(starter.orchestrator, await starter.prepare(body))) as events:
        try:
            async with asyncio.timeout(seconds):
                async for _ in events:
                    pass
        except TimeoutError:
            return True
    return False


async def after(seconds, work):
    await asyncio.sleep(seconds)
    return await work


def test_a_storm_leaves_nothing_behind(starter, no_leaks):
    witnesses = [
        chat("What is the capital of Italy?", cache_salt="witness"),
        chat(image(JPEG), sound(QUESTION), cache_salt="witness", seed=5, **AUDIO),
    ]
    calm = starter.ask(*witnesses)
    before = starter.gauges()
    dice = random.Random(4)
    work = []
    for index in range(STORM):
        name = list(BAD)[index // 2 % len(BAD)]
        body, patience = storm_body(dice, index), dice.random() ** 2 * 2.0
        each = bad(starter, name) if index % 2 else left_early(starter, body, patience)
        work.append(after(dice.random() * STORM_SECONDS, each))

    async def storm():
        return await asyncio.gather(*work)

    assert starter.run(storm()).count(True) > STORM / 8  # left in the middle

    now = starter.gauges()
    assert now["thinker"]["kv_blocks_used"] == before["thinker"]["kv_blocks_used"] == 0
    for stage in ("hearing", "vision", "thinker", "talker", "vocoder"):
        pinned = now[stage].get("cache_entries", 0) - before[stage].get("cache_entries", 0)
        assert 0 <= now[stage]["slots_in_use"] - before[stage]["slots_in_use"] <= pinned
        assert now[stage]["early_chunks"] == 0
        assert now[stage]["restarts"] == 0
        assert now[stage]["ready_replicas"] == 1
    for reply, earlier in zip(starter.ask(*witnesses), calm, strict=True):
        reply.assert_same(earlier)
