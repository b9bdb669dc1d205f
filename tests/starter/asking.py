"""Sends requests of every kind to a pipeline in this process, alone or together, and watches its stages."""

from __future__ import annotations

import asyncio
import base64
import time
from collections import Counter
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from omnistage import Omni
from omnistage.errors import OmnistageError
from omnistage.serving.audio_protocol import SpeechRequest, TranscriptionRequest
from omnistage.serving.chat_protocol import ChatCompletionRequest
from omnistage.serving.chat_request import prepare_chat
from omnistage.serving.events import run
from omnistage.serving.launch import LaunchOptions
from omnistage.serving.protocol import parse_body
from omnistage.serving.requests import AudioDelta, Done, TextDelta
from omnistage.serving.service import Service
from omnistage.serving.settings import MediaSettings, ServerSettings
from omnistage.serving.speech import prepare_speech
from omnistage.serving.transcriptions import prepare_transcription
from omnistage.transport import MemoryNetwork
from omnistage.transport.messages import Chunk, Heartbeat, Submit
from omnistage.types import FinishReason, StageTiming, Usage

ROOT = Path(__file__).parents[2]
MEDIA = ROOT / "examples" / "media"
DATA = ROOT / "tests" / "data"

SETTLE_SECONDS = 20.0
PATIENCE = 180.0  # seconds; what takes longer hangs
ORCHESTRATOR_COUNTS = ("active_requests", "waiting_requests")  # of what is under way
STAGE_COUNTS = ("assigned_requests", "open_requests", "requests", "running", "queued", "tensors_held")

AUDIO = {"modalities": ["text", "audio"], "audio": {"format": "wav"}}


def chat(*parts, **fields):
    """A greedy chat completion of one user message.  parts: texts, and what image() and sound() return."""
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    if len(parts) == 1 and isinstance(parts[0], str):
        content = parts[0]
    return {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 16} | fields


def speech(text, **fields):
    """A request that enters at the talker."""
    return {"input": text, "voice": "joe", "seed": 7} | fields


def clip(data):
    """A transcription."""
    return {"file": data}


def image(data):
    return {"type": "image_url", "image_url": {"url": data_url(data, "image/png")}}


def sound(data):
    return {"type": "audio_url", "audio_url": {"url": data_url(data, "audio/wav")}}


def data_url(data, mime):
    return f"data:{mime};base64,{base64.b64encode(data).decode()}"


def relabelled(data, label):
    """The same picture or clip to a decoder, but other bytes, so that no cache knows it."""
    return data + b"\0" + label.encode()


@dataclass(frozen=True, eq=False)
class Reply:
    """Everything one request brought.  pcm: [num_samples], empty if no speech was asked for."""

    text: str
    token_ids: tuple[int, ...]
    pcm: np.ndarray
    sample_rate: int
    usage: Usage
    finish_reason: FinishReason
    timings: tuple[StageTiming, ...]
    events: tuple[object, ...]

    def assert_same(self, other):
        assert (self.text, self.token_ids) == (other.text, other.token_ids)
        assert self.finish_reason == other.finish_reason
        assert self.pcm.shape == other.pcm.shape
        np.testing.assert_allclose(self.pcm, other.pcm, rtol=0, atol=1e-5)


def reply_of(events):
    """events: all of one request."""
    deltas = [event for event in events if isinstance(event, TextDelta)]
    sounds = [event for event in events if isinstance(event, AudioDelta)]
    done = events[-1]
    assert isinstance(done, Done)
    return Reply(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        pcm=np.concatenate([event.pcm for event in sounds] or [np.zeros(0, np.float32)]),
        sample_rate=sounds[0].sample_rate if sounds else 0,
        usage=done.usage,
        finish_reason=done.finish_reason,
        timings=done.timings,
        events=tuple(events),
    )


class Traffic:
    """A MemoryNetwork's intercept that counts the requests and chunks sent to each stage."""

    def __init__(self):
        self.sent = Counter()

    def __call__(self, source, to, message):
        if isinstance(message, Submit | Chunk):
            self.sent[to.split("-")[0]] += 1  # "thinker-0-1.3@memory"
        return (message,)


class Starter:
    """An Omni, and the other ways into its pipeline that HTTP has and Omni has not."""

    def __init__(self, omni, traffic):
        self.omni = omni
        self.traffic = traffic
        self.orchestrator = omni.pipeline.orchestrator
        settings = ServerSettings(media=MediaSettings(root=ROOT))
        self.service = Service(self.orchestrator, settings)

    def start(self, work):
        """Run a coroutine where the pipeline's event loop runs; returns its future."""
        return asyncio.run_coroutine_threadsafe(work, self.omni._loop)

    def run(self, work):
        return self.start(work).result(PATIENCE)

    def ask(self, *bodies):
        """Send all requests at once; their replies in order.  Raises the first error."""
        outcomes = self.outcomes(*bodies)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes

    def outcomes(self, *bodies):
        """As `ask`, with errors in the place of replies."""

        async def work():
            return await asyncio.gather(*(self.reply(body) for body in bodies), return_exceptions=True)

        return self.run(work())

    async def reply(self, body):
        async with aclosing(run(self.orchestrator, await self.prepare(body))) as events:
            return reply_of([event async for event in events])

    async def prepare(self, body):
        """A backend request from the body of one of the three endpoints."""
        if "file" in body:
            fields = {"model": "starter"} | {name: body[name] for name in body if name != "file"}
            return await prepare_transcription(
                self.service, parse_body(TranscriptionRequest, fields), body["file"]
            )
        named = {"model": self.omni.spec.name} | body
        if "input" in body:
            return prepare_speech(self.service, parse_body(SpeechRequest, named))
        job = await prepare_chat(self.service, parse_body(ChatCompletionRequest, named))
        return job.requests[0]

    def gauges(self):
        """Per stage, as of now, once every stage is at rest."""
        give_up_at = time.monotonic() + SETTLE_SECONDS
        while busy := self.run(self._refreshed_busy()):
            assert time.monotonic() < give_up_at, f"not at rest: {busy}"
        return self.run(self._read_gauges())

    async def _refreshed_busy(self):
        """What is under way.  Every worker is asked, as often as old reports may be on their way here."""
        for _ in range(3):
            replicas = self.orchestrator.replicas.all()
            known = [replica.gauges for replica in replicas]
            for replica in replicas:
                self.orchestrator._tell(replica, Heartbeat(worker=replica.worker))
            pairs = list(zip(replicas, known, strict=True))
            await until(lambda pairs=pairs: all(replica.gauges is not old for replica, old in pairs))
        table = await self._read_gauges()
        counts = {f"orchestrator.{name}": table["orchestrator"][name] for name in ORCHESTRATOR_COUNTS}
        for stage, values in table.items():
            counts |= {f"{stage}.{name}": values.get(name, 0) for name in STAGE_COUNTS}
        return {name: value for name, value in counts.items() if value}

    async def _read_gauges(self):
        return {stage: dict(values) for stage, values in self.orchestrator.gauges().items()}


@contextmanager
def start(pipeline):
    """Run a pipeline with a thread per stage."""
    traffic = Traffic()
    network = MemoryNetwork(intercept=traffic)
    options = LaunchOptions(mode="threads", network=network, drain_seconds=0.0)
    with Omni(pipeline, options=options) as omni:
        yield Starter(omni, traffic)


async def until(condition):
    """Wait for what no event tells of."""
    give_up_at = time.monotonic() + SETTLE_SECONDS
    for _ in iter(condition, True):
        assert time.monotonic() < give_up_at
        await asyncio.sleep(0.002)


def error_of(outcome):
    """The error an outcome should be."""
    assert isinstance(outcome, OmnistageError), outcome
    return outcome
