"""POST /v1/audio/speech: text to speech without a thinker, streamed as it is made."""

from __future__ import annotations

import base64
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import Response

from omnistage.errors import InvalidRequest
from omnistage.serving.audio_protocol import SpeechRequest
from omnistage.serving.events import run
from omnistage.serving.replies import EVENT_STREAM, StreamReply, server_sent_event, with_error_event
from omnistage.serving.requests import AudioDelta, Done, GenerateRequest
from omnistage.serving.service import Service, effective_seed, read_body
from omnistage.serving.sound import AnswerEncoder, media_type
from omnistage.serving.timeline import Recorder

if TYPE_CHECKING:
    from omnistage.audio.containers import AudioFormat


async def speech(request: Request, service: Service) -> Response:
    body = await read_body(request, SpeechRequest)
    job = prepare_speech(service, body)
    sound_format: AudioFormat = "pcm16" if body.response_format == "pcm" else body.response_format
    headers = {"X-Request-Id": job.request_id}
    if body.stream_format == "sse":
        return StreamReply(
            with_error_event(_events(service, job, sound_format)), media_type=EVENT_STREAM, headers=headers
        )
    return StreamReply(
        _bytes(service, job, sound_format),
        media_type=media_type(sound_format, service.info.sample_rate),
        headers=headers,
    )


def prepare_speech(service: Service, body: SpeechRequest) -> GenerateRequest:
    """Raises InvalidRequest, NotFound or NotReady."""
    info = service.check_model(body.model)
    if info.speech_entry is None:
        complaint = "this model does not speak"
        if "audio" in info.outputs:
            complaint = (
                "this model speaks nothing but its own answers; ask /v1/chat/completions with "
                '"modalities": ["text", "audio"]'
            )
        raise InvalidRequest(complaint, code="unsupported_modality")
    limit = service.settings.max_speech_characters
    if len(body.input) > limit:
        raise InvalidRequest(
            f"'input' has {len(body.input)} characters, the limit is {limit}; send it in parts",
            code="string_above_max_length",
            param="input",
        )
    if not any(character.isalnum() for character in body.input):
        raise InvalidRequest(
            "'input' has neither letters nor digits; there is nothing to say",
            code="invalid_value",
            param="input",
        )
    return GenerateRequest(
        request_id="speech-" + uuid.uuid4().hex,
        outputs=("audio",),
        entry=info.speech_entry,
        text=body.input,
        seed=effective_seed(body.seed),
        options={"voice": service.voice(body.voice_name, param="voice"), "speed": float(body.speed)},
    )


async def _bytes(
    service: Service, job: GenerateRequest, sound_format: AudioFormat
) -> AsyncGenerator[bytes, None]:
    """The file itself.  A failure after the first byte cuts the body short: there is no other way to tell."""
    encoder = AnswerEncoder(sound_format)
    recorder = Recorder()
    async with aclosing(run(service.backend, job)) as events:
        async for event in events:
            recorder.observe(event)
            if isinstance(event, AudioDelta):
                if data := encoder.push(event):
                    yield data
            elif isinstance(event, Done):
                service.metrics.observe_answer(event, recorder)
                if data := encoder.close(service.info.sample_rate):
                    yield data


async def _events(
    service: Service, job: GenerateRequest, sound_format: AudioFormat
) -> AsyncGenerator[bytes, None]:
    """speech.audio.delta events of base64, then speech.audio.done."""
    encoder = AnswerEncoder(sound_format)
    recorder = Recorder()
    async with aclosing(run(service.backend, job)) as events:
        async for event in events:
            recorder.observe(event)
            data = b""
            if isinstance(event, AudioDelta):
                data = encoder.push(event)
            elif isinstance(event, Done):
                service.metrics.observe_answer(event, recorder)
                data = encoder.close(service.info.sample_rate)
            if data:
                yield _delta(data)
            if isinstance(event, Done):
                yield _done(event)


def _delta(data: bytes) -> bytes:
    return server_sent_event({"type": "speech.audio.delta", "audio": base64.b64encode(data).decode()})


def _done(done: Done) -> bytes:
    usage = done.usage
    return server_sent_event(
        {
            "type": "speech.audio.done",
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "output_tokens": usage.completion_tokens,
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }
    )
