"""The generator stage: text in, vocoder frames out, one sentence at a time.

Knows its model through AcousticModel only.  What it computes depends on the request's whole text
and seed, never on how the text was chunked or who else is served.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator

from torch import Tensor

from omnistage.audio.sentences import SentenceSplitter
from omnistage.errors import NotFound, OmnistageError
from omnistage.models.protocols import AcousticModel
from omnistage.ops.tensors import to_host
from omnistage.stages.stage import Outbox, StageContext
from omnistage.transport.messages import Chunk, RequestKey, Submit
from omnistage.types import Payload, PortType, Scalar


class _Speech:
    """One request's text on its way to frames."""

    def __init__(self, message: Submit, voice: str) -> None:
        self.key = message.key
        self.seed = message.seed
        self.voice = voice
        self.speed = float(message.options.get("speed", 1.0))
        self.splitter = SentenceSplitter()
        self.sentences: deque[str] = deque()
        self.position = 0  # index of the next sentence to synthesise
        self.is_complete = False  # no more text will come
        self.deadline = time.monotonic()  # when the frames sent so far will have been played

    def push(self, text: str, *, is_last: bool) -> None:
        self.sentences.extend(self.splitter.push(text))
        if is_last:
            self.sentences.extend(self.splitter.flush())
            self.is_complete = True


class GeneratorStage:
    """See omnistage.stages.stage.Stage."""

    def __init__(self, context: StageContext, model: AcousticModel, *, frames_per_second: float) -> None:
        self._context = context
        self._model = model
        self._frames_per_second = frames_per_second
        self._open: dict[RequestKey, _Speech] = {}
        self._current: _Speech | None = None
        self._work: Generator[None, None, Tensor] | None = None
        self._sentences = 0
        self._frames = 0

    def submit(self, message: Submit) -> None:
        voice = str(message.options.get("voice") or self._model.voices[0])
        if voice not in self._model.voices:
            known = ", ".join(self._model.voices)
            raise NotFound(f"there is no voice {voice!r}; known: {known}", code="voice_not_found")
        speech = _Speech(message, voice)
        if message.text is not None:
            speech.push(message.text, is_last=True)
        self._open[message.key] = speech

    def receive(self, chunk: Chunk) -> None:
        self._open[chunk.key].push(chunk.payload.text, is_last=chunk.is_last)

    def abort(self, key: RequestKey) -> None:
        speech = self._open.pop(key, None)
        if speech is not None and speech is self._current:
            self._current = self._work = None

    def deadline(self) -> float | None:
        if self._current is not None:
            return self._current.deadline
        return min((speech.deadline for speech in self._runnable()), default=None)

    def step(self, outbox: Outbox) -> None:
        if self._current is None:
            speech = min(self._runnable(), key=lambda speech: speech.deadline, default=None)
            if speech is None:
                return
            if not speech.sentences:
                self._end(speech, outbox)
                return
            self._current = speech
        current = self._current
        outbox.worked.append(current.key)
        try:
            self._work = self._work or self._begin(current)
            next(self._work)
        except StopIteration as stop:
            self._current = self._work = None
            self._emit(current, stop.value, outbox)
        except OmnistageError as error:
            self.abort(current.key)
            outbox.end(current.key, error=error)

    def info(self) -> dict[str, Scalar | list[str]]:
        return {"voices": list(self._model.voices), "weight_bytes": self._model.weight_bytes}

    def gauges(self) -> dict[str, float]:
        return {
            "requests": len(self._open),
            "queued": sum(len(speech.sentences) for speech in self._open.values()),
            "running": float(self._current is not None),
            "sentences": self._sentences,
            "frames": self._frames,
        }

    def close(self) -> None:
        close = getattr(self._model, "close", None)
        if close is not None:
            close()

    def _runnable(self) -> list[_Speech]:
        """Requests with a sentence to say, or with nothing left to say; those out of credits are skipped."""
        return [
            speech
            for speech in self._open.values()
            if (speech.sentences or speech.is_complete) and self._context.credits(speech.key) != 0
        ]

    def _begin(self, speech: _Speech) -> Generator[None, None, Tensor]:
        return self._model.synthesize(
            speech.sentences.popleft(),
            voice=speech.voice,
            seed=speech.seed,
            position=speech.position,
            speed=speech.speed,
        )

    def _emit(self, speech: _Speech, frames: Tensor, outbox: Outbox) -> None:
        self._sentences += 1
        self._frames += frames.shape[0]
        speech.deadline = max(speech.deadline, time.monotonic()) + frames.shape[0] / self._frames_per_second
        payload = Payload(
            type=PortType.LATENTS,
            tensors={"latents": to_host(frames)},
            info={"sentence": speech.position},
        )
        speech.position += 1
        if speech.is_complete and not speech.sentences:
            outbox.emit(speech.key, payload, is_last=True)
            del self._open[speech.key]
            outbox.end(speech.key)
        else:
            outbox.emit(speech.key, payload)

    def _end(self, speech: _Speech, outbox: Outbox) -> None:
        """The text ended with nothing left to say: close the stream with an empty chunk."""
        outbox.emit(speech.key, Payload(type=PortType.LATENTS), is_last=True)
        del self._open[speech.key]
        outbox.end(speech.key)
