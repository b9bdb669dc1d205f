"""POST /v1/audio/transcriptions: a clip to text, whole or as events."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from omnistage.errors import InvalidRequest
from omnistage.serving.audio_protocol import TranscriptionRequest
from omnistage.serving.events import run
from omnistage.serving.media import MediaSource
from omnistage.serving.protocol import parse_body
from omnistage.serving.replies import (
    EVENT_STREAM,
    StreamReply,
    server_sent_event,
    while_connected,
    with_error_event,
)
from omnistage.serving.requests import Done, GenerateRequest, TextDelta
from omnistage.serving.service import Service
from omnistage.serving.timeline import Recorder

_MULTIPART = "multipart/form-data"


async def transcriptions(request: Request, service: Service) -> Response:
    body, data = await _read_form(request)
    job = await while_connected(request.receive, prepare_transcription(service, body, data))
    headers = {"X-Request-Id": job.request_id}
    if body.stream:
        return StreamReply(with_error_event(_events(service, job)), media_type=EVENT_STREAM, headers=headers)
    text = await while_connected(request.receive, _collect(service, job))
    if body.response_format == "text":
        return PlainTextResponse(text + "\n", headers=headers)
    seconds = await _duration(service, data)
    answer: dict[str, Any] = {"text": text, "usage": {"type": "duration", "seconds": seconds}}
    if body.response_format == "verbose_json":
        answer |= {
            "task": "transcribe",
            "language": body.language or service.settings.languages[0],
            "duration": seconds,
        }
    return JSONResponse(answer, headers=headers)


async def prepare_transcription(service: Service, body: TranscriptionRequest, data: bytes) -> GenerateRequest:
    """Raises InvalidRequest, MediaError, MediaTooLarge, NotFound or NotReady."""
    info = service.check_model(body.model)
    if info.transcriber is None:
        raise InvalidRequest("this model transcribes nothing", code="unsupported_modality")
    languages = service.settings.languages
    if body.language is not None and body.language not in languages:
        raise InvalidRequest(
            f"'language' is {body.language[:20]!r}, this model hears {', '.join(languages)}",
            code="invalid_value",
            param="language",
        )
    if body.stream and body.response_format != "json":
        raise InvalidRequest(
            "'stream' needs the response_format 'json'", code="invalid_value", param="response_format"
        )
    [media] = await service.media.load([MediaSource("audio", "file", data=data)])
    return GenerateRequest(
        request_id="transcript-" + uuid.uuid4().hex,
        outputs=(info.transcriber,),
        media={info.transcriber: (media,)},
    )


async def _read_form(request: Request) -> tuple[TranscriptionRequest, bytes]:
    """The fields and the file's bytes.  Raises InvalidRequest for anything but a well-formed form."""
    content_type = request.headers.get("content-type", "")
    if not content_type.lower().startswith(_MULTIPART):
        raise InvalidRequest(
            f"the body must be {_MULTIPART}, its Content-Type is {content_type[:80]!r}",
            code="invalid_content_type",
        )
    try:
        form = await request.form(max_files=1, max_fields=32)
    except HTTPException as error:
        raise InvalidRequest(f"the form cannot be read: {error.detail}", code="invalid_form") from None
    try:
        fields, file = _split_form(form)
        body = parse_body(TranscriptionRequest, fields)
        if file is None:
            raise InvalidRequest(
                "'file' is required and missing", code="missing_required_parameter", param="file"
            )
        return body, await file.read()
    finally:
        await form.close()


def _split_form(form: FormData) -> tuple[dict[str, Any], UploadFile | None]:
    fields: dict[str, Any] = {}
    file: UploadFile | None = None
    for name, value in form.multi_items():
        short = name[:80]
        if isinstance(value, UploadFile):
            if name != "file":
                raise InvalidRequest(f"{short!r} must not be a file", code="invalid_type", param=short)
            file = value
        elif name == "file":
            raise InvalidRequest(
                "'file' must be sent as a file, with a filename", code="invalid_type", param="file"
            )
        elif name in fields:
            raise InvalidRequest(f"{short!r} is given twice", code="invalid_value", param=short)
        else:
            fields[name] = _form_value(name, value)
    return fields, file


def _form_value(name: str, value: str) -> Any:
    """A form knows only strings; the two fields of another type are read here."""
    if name == "stream" and value.lower() in ("true", "false", "1", "0"):
        return value.lower() in ("true", "1")
    if name == "temperature":
        try:
            return float(value)
        except ValueError:
            return value
    return value


async def _collect(service: Service, job: GenerateRequest) -> str:
    recorder = Recorder()
    text = ""
    async with aclosing(run(service.backend, job)) as events:
        async for event in events:
            recorder.observe(event)
            if isinstance(event, TextDelta):
                text += event.text
            elif isinstance(event, Done):
                service.metrics.observe_answer(event, recorder)
                return text.strip()
    raise AssertionError("a backend stream ended without Done")


async def _events(service: Service, job: GenerateRequest) -> AsyncGenerator[bytes, None]:
    """transcript.text.delta events, then transcript.text.done with the whole text."""
    recorder = Recorder()
    text = ""
    async with aclosing(run(service.backend, job)) as events:
        async for event in events:
            recorder.observe(event)
            if isinstance(event, TextDelta):
                delta = event.text if text else event.text.lstrip()
                text += delta
                if delta:
                    yield server_sent_event({"type": "transcript.text.delta", "delta": delta})
            elif isinstance(event, Done):
                service.metrics.observe_answer(event, recorder)
                yield server_sent_event({"type": "transcript.text.done", "text": text.rstrip()})


async def _duration(service: Service, data: bytes) -> float:
    """Seconds of a clip.  Raises MediaError if it cannot be decoded."""
    from omnistage.audio.containers import decode

    pcm = await asyncio.to_thread(decode, data, max_seconds=service.settings.max_audio_seconds)
    return round(len(pcm.samples) / pcm.sample_rate, 3)
