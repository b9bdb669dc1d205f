"""Omni: a pipeline from Python, without a server.

    with Omni("starter") as omni:
        question = {"role": "user", "content": "Say hello."}
        [answer] = omni.generate([{"messages": [question], "modalities": ["text", "audio"]}])
        answer.save_audio("hello.wav")

Requests have the form of POST /v1/chat/completions bodies ("model" may be left out; file:// URLs are
read).  The pipeline's event loop runs in a thread of its own; calls may come from any thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import queue
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from omnistage.audio.containers import encode
from omnistage.audio.pcm import Pcm
from omnistage.errors import Draining, InvalidRequest, RequestFailed
from omnistage.graph import Graph, PipelineSpec
from omnistage.serving.chat_protocol import ChatCompletionRequest
from omnistage.serving.chat_request import prepare_chat
from omnistage.serving.choose import choose_pipeline
from omnistage.serving.launch import LaunchOptions, Pipeline, ensure_weights, fetch_model, start_pipeline
from omnistage.serving.protocol import parse_body
from omnistage.serving.requests import AudioDelta, Done, Event, GenerateRequest, RequestStream, TextDelta
from omnistage.serving.service import Service
from omnistage.serving.settings import MediaSettings, ServerSettings
from omnistage.types import FinishReason, StageTiming, Usage

logger = logging.getLogger(__name__)

T = TypeVar("T")
Request = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Answer:
    """A whole answer.  audio: None if none was asked for, empty if there is nothing to say aloud.

    usage: of the text; audio_tokens: frames of speech that a talker sampled.  is_audio_cut: whether the
    speech ended at the talker's limit, before all was said.  seed: what makes it reproducible.
    """

    text: str
    audio: Pcm | None
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timings: tuple[StageTiming, ...]
    seed: int
    audio_tokens: int = 0
    is_audio_cut: bool = False

    def save_audio(self, path: str | Path, file_format: str = "wav") -> None:
        """Write the speech to a file.  Raises RequestFailed if the answer has none."""
        if self.audio is None:
            raise RequestFailed('the answer has no speech; ask with "modalities": ["text", "audio"]')
        Path(path).write_bytes(encode(self.audio, file_format))


class Omni:
    """A running pipeline.  Close it, or use it as a context manager.

    pipeline: a built-in name, a YAML file's path, a model's directory or its name on the hub, a Graph or a
    PipelineSpec.
    Raises PipelineError, FetchError or WeightsError, with the remedy, if it cannot start.
    """

    def __init__(
        self,
        pipeline: str | Path | Graph | PipelineSpec = "starter",
        *,
        options: LaunchOptions | None = None,
        settings: ServerSettings | None = None,
    ) -> None:
        self.spec = _spec(pipeline)
        ensure_weights(self.spec)
        self._options = options or LaunchOptions()
        self._settings = settings or ServerSettings(
            media=MediaSettings(root=Path("/"), allow_private_hosts=True)
        )
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._started: queue.SimpleQueue[Pipeline | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run_loop, name="omnistage", daemon=True)
        self._thread.start()
        started = self._started.get()
        if isinstance(started, BaseException):
            self._thread.join()
            raise started
        self.pipeline = started

    def generate(self, requests: Sequence[Request]) -> list[Answer]:
        """Answer all requests, concurrently; the answers stand in the requests' order.

        Raises the first request's error once all have ended.
        """
        return self._call(self._generate(requests))

    def stream(self, request: Request) -> Iterator[Event]:
        """The events of one request as they are made; leaving the loop early aborts it.

        A loop that takes its time slows the request's speech, and no other request.
        Raises the request's error.
        """
        stream, _ = self._call(self._submit(request))
        try:
            events = aiter(stream)
            while (event := self._call(_next(events))) is not None:
                yield event
        finally:
            with contextlib.suppress(Draining):  # the pipeline was closed meanwhile: nothing to abort
                self._call(stream.aclose())

    def close(self) -> None:
        """End every worker and free everything.  Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def __enter__(self) -> Omni:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the pipeline's loop; an interrupt of the caller cancels it.

        Raises what it raises, and Draining once the pipeline is closed.
        """
        closed = Draining("this pipeline has been closed; start another one")
        if not self._thread.is_alive():
            work.close()
            raise closed
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise closed from None
        finally:
            future.cancel()

    def _run_loop(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            try:
                runner.run(self._serve())
            except BaseException as error:  # handed to the thread that waits for the start
                self._started.put(error)

    async def _serve(self) -> None:
        async with start_pipeline(self.spec, self._options) as pipeline:
            await pipeline.wait_ready()
            self._service = Service(pipeline.orchestrator, self._settings)
            self._started.put(pipeline)
            await self._stop.wait()
        await self._service.media.aclose()  # requests under way may still load media until here

    async def _submit(self, request: Request) -> tuple[RequestStream, GenerateRequest]:
        fields = {"model": self.spec.name, **request}
        if "audio" in (fields.get("modalities") or ()):
            fields.setdefault("audio", {"format": "wav"})  # events carry samples, whatever the format
        body = parse_body(ChatCompletionRequest, fields)
        job = await prepare_chat(self._service, body)
        if len(job.requests) > 1:
            raise InvalidRequest(
                f"'n' is {body.n}, but a request has one answer here; send it {body.n} times", param="n"
            )
        return self._service.backend.submit(job.requests[0]), job.requests[0]

    async def _generate(self, requests: Sequence[Request]) -> list[Answer]:
        results = await asyncio.gather(*map(self._collect, requests), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [result for result in results if isinstance(result, Answer)]

    async def _collect(self, request: Request) -> Answer:
        stream, submitted = await self._submit(request)
        text = ""
        token_ids: list[int] = []
        pcm: list[NDArray[np.float32]] = [np.zeros(0, np.float32)]
        done: Done | None = None
        async with contextlib.aclosing(stream):
            async for event in stream:
                match event:
                    case TextDelta():
                        text += event.text
                        token_ids.extend(event.token_ids)
                    case AudioDelta():
                        pcm.append(event.pcm)
                    case Done():
                        done = event
        assert done is not None, "a stream that raises nothing ends with Done"
        wants_audio = "audio" in submitted.outputs
        sample_rate = self.pipeline.orchestrator.info.sample_rate
        return Answer(
            text=text,
            audio=Pcm(np.concatenate(pcm), sample_rate) if wants_audio else None,
            token_ids=tuple(token_ids),
            finish_reason=done.finish_reason,
            usage=done.usage,
            timings=done.timings,
            seed=submitted.seed,
            audio_tokens=done.audio_tokens,
            is_audio_cut=wants_audio and bool(done.truncated),
        )


async def _next(events: AsyncIterator[Event]) -> Event | None:
    """None once they have ended."""
    return await anext(events, None)


def _spec(pipeline: str | Path | Graph | PipelineSpec) -> PipelineSpec:
    if isinstance(pipeline, PipelineSpec):
        return pipeline
    if isinstance(pipeline, Graph):
        return pipeline.build()
    choice = choose_pipeline(pipeline, obtain=fetch_model)
    for note in choice.notes:
        logger.warning("%s", note)
    return choice.spec
