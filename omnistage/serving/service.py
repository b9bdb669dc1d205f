"""What all endpoints share: the backend, the settings, media, metrics, and the memory of spoken answers."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from starlette.requests import Request

from omnistage.errors import NotFound, NotReady
from omnistage.serving.media import MediaLoader
from omnistage.serving.metrics import Metrics
from omnistage.serving.prompt import PromptFormat
from omnistage.serving.prompt_formats import prompt_format
from omnistage.serving.protocol import Body, decode_json, nearest, parse_body
from omnistage.serving.requests import Backend, BackendInfo
from omnistage.serving.settings import ServerSettings

B = TypeVar("B", bound=Body)


@dataclass(frozen=True)
class _Remembered:
    transcript: str
    expires_at: float  # unix seconds


class SpokenAnswers:
    """Transcripts of recent spoken answers by id, so that a later message may refer to one."""

    def __init__(self, *, lifetime: float, max_answers: int) -> None:
        self._lifetime = lifetime
        self._max_answers = max_answers
        self._answers: OrderedDict[str, _Remembered] = OrderedDict()

    def remember(self, audio_id: str, transcript: str) -> int:
        """Returns the unix second at which it is forgotten (sooner if many answers follow)."""
        expires_at = time.time() + self._lifetime
        self._answers[audio_id] = _Remembered(transcript, expires_at)
        while len(self._answers) > self._max_answers:
            self._answers.popitem(last=False)
        return int(expires_at)

    def transcript(self, audio_id: str, *, param: str) -> str:
        answer = self._answers.get(audio_id)
        if answer is None or answer.expires_at < time.time():
            raise NotFound(
                f"no spoken answer {audio_id!r} is remembered (any more); send its transcript as content",
                code="audio_not_found",
                param=param,
            )
        return answer.transcript


class Service:
    """One per API process."""

    def __init__(self, backend: Backend, settings: ServerSettings) -> None:
        self.backend = backend
        self.settings = settings
        self.metrics = Metrics(backend.gauges)
        self.media = MediaLoader(settings.media)
        self.spoken_answers = SpokenAnswers(
            lifetime=settings.answer_lifetime, max_answers=settings.max_remembered_answers
        )
        self.created = int(time.time())
        self._info: BackendInfo | None = None

    @property
    def info(self) -> BackendInfo:
        """Known for good once the stages have loaded, so that an answer outlives restarts and draining.

        Raises NotReady before.
        """
        if self._info is None:
            if not self.backend.is_ready:
                raise NotReady("the pipeline is still loading; /ready tells when it can answer")
            self._info = self.backend.info
        return self._info

    @cached_property
    def prompt(self) -> PromptFormat:
        return prompt_format(self.info)

    def check_model(self, model: str) -> BackendInfo:
        """Raises NotFound for any model but the one served."""
        info = self.info
        if model != info.model:
            raise NotFound(
                f"the model {model[:100]!r} is not served here; use {info.model!r}",
                code="model_not_found",
                param="model",
            )
        return info

    def voice(self, name: str | None, *, param: str) -> str:
        """The voice asked for, in any case, or else the first.  Raises NotFound."""
        voices = self.info.voices
        if name is None:
            return voices[0] if voices else ""
        if name in voices:
            return name
        known = {voice.casefold(): voice for voice in voices}
        if name.casefold() not in known:
            raise NotFound(
                f"there is no voice {name[:100]!r}{nearest(name, voices)}",
                code="voice_not_found",
                param=param,
            )
        return known[name.casefold()]


async def read_body(request: Request, model: type[B]) -> B:
    """The JSON body as `model`.  Raises InvalidRequest."""
    return parse_body(model, decode_json(await request.body()))


def effective_seed(seed: int | None) -> int:
    """A seed the stages accept: the client's, folded into 63 bits, or a drawn one."""
    return secrets.randbits(63) if seed is None else seed & (2**63 - 1)


def choice_seed(seed: int, choice: int) -> int:
    """The seed of choice number `choice` of a request; choice 0 keeps the request's own.

    Choices are spread by the odd constant of a Weyl sequence (2^64 / golden ratio).
    """
    return (seed + choice * 0x9E3779B97F4A7C15) & (2**63 - 1)
