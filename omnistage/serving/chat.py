"""POST /v1/chat/completions, whole and streamed, in OpenAI's shapes.

An answer with speech carries its text in audio.transcript, and `content` is null, as OpenAI sends it.
Streamed: first {role, audio: {id}}, then {audio: {transcript}} and {audio: {data}} as they are made,
then {audio: {expires_at}}, then the finish reason.  `data` is base64 of the chosen format, and the
decoded pieces joined are one file.  Speech that ended at the talker's limit before the text was said is
marked: truncated is true beside expires_at.
"""

from __future__ import annotations

import base64
import logging
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from omnistage.serving.chat_protocol import ChatCompletionRequest
from omnistage.serving.chat_request import ChatJob, prepare_chat
from omnistage.serving.events import run_all
from omnistage.serving.replies import (
    EVENT_STREAM,
    SSE_END,
    StreamReply,
    server_sent_event,
    while_connected,
    with_error_event,
)
from omnistage.serving.requests import AudioDelta, Done, TextDelta
from omnistage.serving.service import Service, read_body
from omnistage.serving.sound import AnswerEncoder, WholeSound
from omnistage.serving.timeline import Recorder, timeline_as_json
from omnistage.serving.tokenizer import Tokenizer
from omnistage.types import TokenLogprob

logger = logging.getLogger(__name__)


async def chat_completions(request: Request, service: Service) -> Response:
    body = await read_body(request, ChatCompletionRequest)
    job = await while_connected(request.receive, prepare_chat(service, body))
    if body.user is not None:
        logger.info("%s is asked by user %r", job.completion_id, body.user)
    headers = {"X-Request-Id": job.completion_id}
    if body.stream:
        return StreamReply(
            with_error_event(stream_chat(service, job)), media_type=EVENT_STREAM, headers=headers
        )
    answer = await while_connected(request.receive, collect_chat(service, job))
    return JSONResponse(answer, headers=headers)


class _Choice:
    """One answer in the making.  logprobs, token_ids: all of them so far."""

    def __init__(self, service: Service, job: ChatJob, index: int) -> None:
        self.index = index
        self.body = job.body
        self.tokenizer: Tokenizer = service.prompt.tokenizer
        self.recorder = Recorder()
        self.audio_id = "audio_" + uuid.uuid4().hex
        self.seed = job.requests[index].seed
        self.text: list[str] = []
        self.logprobs: list[dict[str, Any]] = []
        self.token_ids: list[int] = []
        self.sound = WholeSound(service.info.sample_rate)
        self.done: Done | None = None

    def extras(self, delta: TextDelta) -> dict[str, Any]:
        """logprobs and token_ids of a delta, where the request asks for them."""
        extras: dict[str, Any] = {}
        if self.body.logprobs:
            extras["logprobs"] = {
                "content": [logprob_as_json(self.tokenizer, entry) for entry in delta.logprobs],
                "refusal": None,
            }
        if self.body.return_token_ids:
            extras["token_ids"] = list(delta.token_ids)
        return extras

    def timings(self) -> dict[str, Any]:
        assert self.done is not None
        return {"seed": self.seed, **timeline_as_json(self.recorder.timeline(self.done))}


async def collect_chat(service: Service, job: ChatJob) -> dict[str, Any]:
    """The whole answer as one chat.completion object."""
    choices = [_Choice(service, job, index) for index in range(len(job.requests))]
    async with aclosing(run_all(service.backend, job.requests)) as events:
        async for index, event in events:
            choice = choices[index]
            choice.recorder.observe(event)
            if isinstance(event, TextDelta):
                choice.text.append(event.text)
                extras = choice.extras(event)
                choice.token_ids += extras.get("token_ids", [])
                choice.logprobs += extras.get("logprobs", {}).get("content", [])
            elif isinstance(event, AudioDelta):
                choice.sound.push(event)
            else:
                choice.done = event
                service.metrics.observe_answer(event, choice.recorder)
    answer = {
        "id": job.completion_id,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": job.body.model,
        "choices": [await _whole_choice(service, job, choice) for choice in choices],
        "usage": usage_as_json([choice.done for choice in choices]),
    }
    if job.body.metadata is not None:
        answer["metadata"] = job.body.metadata
    if job.body.return_timings:
        answer["omnistage"] = choices[0].timings()
    return answer


async def stream_chat(service: Service, job: ChatJob) -> AsyncGenerator[bytes, None]:
    """The answer as server-sent events."""
    chunks = _Chunks(job)
    choices = [_Choice(service, job, index) for index in range(len(job.requests))]
    encoders = [AnswerEncoder(job.body.audio.format if job.body.audio else None) for _ in choices]
    is_started = False
    async with aclosing(run_all(service.backend, job.requests)) as events:
        async for index, event in events:
            if not is_started:
                is_started = True
                for choice in choices:
                    yield chunks.opening(choice)
            choice = choices[index]
            choice.recorder.observe(event)
            if isinstance(event, TextDelta):
                yield chunks.text(choice, event)
            elif isinstance(event, AudioDelta):
                if data := encoders[index].push(event):
                    yield chunks.audio(choice, {"data": base64.b64encode(data).decode()})
            else:
                choice.done = event
                service.metrics.observe_answer(event, choice.recorder)
                for chunk in _closing(service, chunks, choice, encoders[index]):
                    yield chunk
    for chunk in chunks.tail(choices):
        yield chunk
    yield SSE_END


class _Chunks:
    """Builds chat.completion.chunk objects of one completion."""

    def __init__(self, job: ChatJob) -> None:
        self._body = job.body
        self._include_usage = bool(job.body.stream_options and job.body.stream_options.include_usage)
        self._base = {
            "id": job.completion_id,
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": job.body.model,
        }

    def opening(self, choice: _Choice) -> bytes:
        if self._body.wants_audio:
            return self._chunk(
                choice, {"role": "assistant", "content": None, "audio": {"id": choice.audio_id}}
            )
        return self._chunk(choice, {"role": "assistant", "content": ""})

    def text(self, choice: _Choice, delta: TextDelta) -> bytes:
        choice.text.append(delta.text)
        content = {"audio": {"transcript": delta.text}} if self._body.wants_audio else {"content": delta.text}
        return self._chunk(choice, content, **choice.extras(delta))

    def audio(self, choice: _Choice, audio: dict[str, Any]) -> bytes:
        return self._chunk(choice, {"audio": audio})

    def finish(self, choice: _Choice, reason: str) -> bytes:
        return self._chunk(choice, {}, finish_reason=reason)

    def tail(self, choices: list[_Choice]) -> list[bytes]:
        """The chunks without choices: usage and timings, where the request asks for them."""
        tail: dict[str, Any] = {}
        if self._include_usage:
            tail["usage"] = usage_as_json([choice.done for choice in choices])
        if self._body.return_timings:
            tail["omnistage"] = choices[0].timings()
        return [server_sent_event({**self._base, "choices": [], **tail})] if tail else []

    def _chunk(
        self, choice: _Choice, delta: dict[str, Any], *, finish_reason: str | None = None, **extras: Any
    ) -> bytes:
        entry = {"index": choice.index, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
        chunk = {**self._base, "choices": [{**entry, **extras}]}
        if self._include_usage:
            chunk["usage"] = None
        return server_sent_event(chunk)


def _closing(service: Service, chunks: _Chunks, choice: _Choice, encoder: AnswerEncoder) -> list[bytes]:
    assert choice.done is not None
    closing = []
    if choice.body.wants_audio:
        if data := encoder.close(service.info.sample_rate):
            closing.append(chunks.audio(choice, {"data": base64.b64encode(data).decode()}))
        closing.append(chunks.audio(choice, _ending(service, choice)))
    return [*closing, chunks.finish(choice, choice.done.finish_reason.value)]


async def _whole_choice(service: Service, job: ChatJob, choice: _Choice) -> dict[str, Any]:
    assert choice.done is not None
    text = "".join(choice.text)
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if job.body.audio is not None:
        data = await choice.sound.encode(job.body.audio.format)
        message["content"] = None
        message["audio"] = {
            "id": choice.audio_id,
            "data": base64.b64encode(data).decode(),
            "transcript": text,
            **_ending(service, choice),
        }
    whole: dict[str, Any] = {
        "index": choice.index,
        "message": message,
        "logprobs": {"content": choice.logprobs, "refusal": None} if job.body.logprobs else None,
        "finish_reason": choice.done.finish_reason.value,
    }
    if job.body.return_token_ids:
        whole["token_ids"] = choice.token_ids
    return whole


def _ending(service: Service, choice: _Choice) -> dict[str, Any]:
    """What is known of an answer's speech at its end."""
    assert choice.done is not None
    ending: dict[str, Any] = {
        "expires_at": service.spoken_answers.remember(choice.audio_id, "".join(choice.text))
    }
    if choice.done.truncated:
        ending["truncated"] = True
    return ending


def usage_as_json(dones: list[Done | None]) -> dict[str, Any]:
    """Tokens of all choices; the prompt, which they share, counts once.

    audio_tokens: frames that a talker sampled, which count as completion tokens; 0 where the speech is
    made by other means.
    """
    known = [done for done in dones if done is not None]
    usage = known[0].usage
    text_tokens = sum(done.usage.completion_tokens for done in known)
    audio_tokens = sum(done.audio_tokens for done in known)
    completion_tokens = text_tokens + audio_tokens
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": usage.prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {
            "audio_tokens": audio_tokens,
            "reasoning_tokens": 0,
            "text_tokens": text_tokens,
        },
    }


def logprob_as_json(tokenizer: Tokenizer, entry: TokenLogprob) -> dict[str, Any]:
    """OpenAI's token object; -9999.0 stands for a probability of zero."""
    return {
        **_token(tokenizer, entry.token_id, entry.logprob),
        "top_logprobs": [_token(tokenizer, token_id, logprob) for token_id, logprob in entry.top],
    }


def _token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    return {
        "token": raw.decode("utf-8", errors="replace"),
        "logprob": max(logprob, -9999.0),
        "bytes": list(raw),
    }
