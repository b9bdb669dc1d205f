"""From a chat body to backend requests: checks what needs the model, loads media, writes the prompt."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from omnistage.errors import ContextOverflow, InvalidRequest
from omnistage.serving.chat_protocol import (
    AudioUrlPart,
    ChatCompletionRequest,
    ImagePart,
    InputAudioPart,
    Message,
    RefusalPart,
    TextPart,
)
from omnistage.serving.media import MediaSource
from omnistage.serving.prompt import MediaPiece, Piece, PromptMessage, TextPiece
from omnistage.serving.requests import BackendInfo, GenerateRequest
from omnistage.serving.service import Service, choice_seed, effective_seed
from omnistage.types import Media, SamplingParams, Segment, TokenSegment


@dataclass(frozen=True)
class ChatJob:
    """A checked request.  requests: one per choice, differing in id and seed only."""

    body: ChatCompletionRequest
    completion_id: str
    requests: tuple[GenerateRequest, ...]


@dataclass
class _Collector:
    """Gathers the media of a conversation in order of appearance, numbered per modality."""

    info: BackendInfo
    sources: list[MediaSource]

    def add(self, source: MediaSource) -> MediaPiece:
        if source.modality not in self.info.encoders:
            raise InvalidRequest(
                f"this model takes no {source.modality} input",
                code="unsupported_modality",
                param=source.param,
            )
        item = sum(known.modality == source.modality for known in self.sources)
        self.sources.append(source)
        return MediaPiece(source.modality, item)


async def prepare_chat(service: Service, body: ChatCompletionRequest) -> ChatJob:
    """Raises InvalidRequest, NotFound, ContextOverflow or NotReady."""
    info = service.check_model(body.model)
    _check_combinations(service, body)
    outputs = _outputs(info, body)
    options = {}
    if body.wants_audio:
        assert body.audio is not None
        options["voice"] = service.voice(body.audio.voice_name, param="audio.voice")
    collector = _Collector(info, [])
    messages = [
        _prompt_message(service, collector, message, f"messages[{index}]")
        for index, message in enumerate(body.messages)
    ]
    media = await load_media(service, info, collector.sources)
    _check_length(service, messages, info.max_model_len)
    segments = service.prompt.render(messages)
    request = GenerateRequest(
        request_id="chatcmpl-" + uuid.uuid4().hex,
        outputs=outputs,
        segments=tuple(segments),
        media=media,
        sampling=_sampling(service, body, segments, info.max_model_len),
        seed=effective_seed(body.seed),
        options=options,
        cache_salt=body.cache_salt or "",
    )
    return ChatJob(body, request.request_id, tuple(_choice(request, index) for index in range(body.n or 1)))


def _check_length(service: Service, messages: Sequence[PromptMessage], max_model_len: int) -> None:
    """Refuse a text that cannot fit before tokenising it, which takes a second per megabyte."""
    pieces = [piece for message in messages for piece in message.pieces]
    num_characters = sum(len(piece.text) for piece in pieces if isinstance(piece, TextPiece))
    limit = max_model_len * service.prompt.tokenizer.longest_token
    if num_characters > limit:
        raise ContextOverflow(
            f"the messages have {num_characters} characters; no text over {limit} fits the context of "
            f"{max_model_len} tokens: shorten it",
            param="messages",
        )


async def load_media(
    service: Service, info: BackendInfo, sources: Sequence[MediaSource]
) -> dict[str, tuple[Media, ...]]:
    """All media of a request, by the stage that encodes them."""
    by_stage: dict[str, tuple[Media, ...]] = {}
    for source, media in zip(sources, await service.media.load(sources), strict=True):
        stage = info.encoders[source.modality]
        by_stage[stage] = (*by_stage.get(stage, ()), media)
    return by_stage


def _choice(request: GenerateRequest, index: int) -> GenerateRequest:
    seed = choice_seed(request.seed, index)
    return replace(
        request,
        request_id=request.request_id if index == 0 else f"{request.request_id}-{index}",
        seed=seed,
        sampling=msgspec.structs.replace(request.sampling, seed=seed),
    )


def _check_combinations(service: Service, body: ChatCompletionRequest) -> None:
    """Fields that contradict one another, or a limit of this server."""
    if body.n is not None and body.n > service.settings.max_choices:
        raise InvalidRequest(
            f"'n' is {body.n}, the limit is {service.settings.max_choices}", code="invalid_value", param="n"
        )
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest(
            "'stream_options' needs 'stream': true", code="invalid_value", param="stream_options"
        )
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest(
            "'top_logprobs' needs 'logprobs': true", code="invalid_value", param="top_logprobs"
        )
    if body.wants_audio and body.audio is None:
        raise InvalidRequest(
            "'audio' is required when modalities include \"audio\", for instance {'format': 'wav'}",
            code="missing_required_parameter",
            param="audio",
        )
    if body.audio is not None and not body.wants_audio:
        raise InvalidRequest(
            "'audio' needs 'modalities': [\"text\", \"audio\"]", code="invalid_value", param="audio"
        )
    if None not in (body.max_tokens, body.max_completion_tokens) and (
        body.max_tokens != body.max_completion_tokens
    ):
        raise InvalidRequest(
            f"'max_tokens' ({body.max_tokens}) and 'max_completion_tokens' ({body.max_completion_tokens}) "
            "differ; send one of them",
            code="invalid_value",
            param="max_tokens",
        )


def _outputs(info: BackendInfo, body: ChatCompletionRequest) -> tuple[str, ...]:
    """Text is always among them: a spoken answer comes with its transcript."""
    wanted = ("text", "audio") if body.wants_audio else ("text",)
    for modality in wanted:
        if modality not in info.outputs:
            raise InvalidRequest(
                f"this model makes no {modality}; it makes {', '.join(info.outputs)}",
                code="unsupported_modality",
                param="modalities",
            )
    return wanted


def _prompt_message(service: Service, collector: _Collector, message: Message, path: str) -> PromptMessage:
    role = "system" if message.role == "developer" else message.role
    if message.role != "assistant":
        for name in ("audio", "refusal"):
            if getattr(message, name) is not None:
                raise InvalidRequest(
                    f"'{path}.{name}' belongs to assistant messages",
                    code="invalid_value",
                    param=f"{path}.{name}",
                )
    pieces = _pieces(collector, message, path)
    if pieces and message.audio is not None:
        raise InvalidRequest(
            f"'{path}' has both content and audio; send the audio's id or its transcript as content",
            code="invalid_value",
            param=f"{path}.audio",
        )
    if message.audio is not None:
        transcript = service.spoken_answers.transcript(message.audio.id, param=f"{path}.audio.id")
        pieces = (TextPiece(transcript),)
    if not pieces and message.refusal:
        pieces = (TextPiece(message.refusal),)
    if not pieces:
        raise InvalidRequest(
            f"'{path}.content' is required and missing",
            code="missing_required_parameter",
            param=f"{path}.content",
        )
    return PromptMessage(role, pieces)


def _pieces(collector: _Collector, message: Message, path: str) -> tuple[Piece, ...]:
    if message.content is None:
        return ()
    if isinstance(message.content, str):
        return (TextPiece(message.content),)
    pieces: list[Piece] = []
    for index, part in enumerate(message.content):
        where = f"{path}.content[{index}]"
        if isinstance(part, TextPart):
            pieces.append(TextPiece(part.text))
            continue
        if isinstance(part, RefusalPart) and message.role == "assistant":
            pieces.append(TextPiece(part.refusal))
            continue
        source = _source(part, where)
        if source is None or message.role != "user":
            raise InvalidRequest(
                f"'{where}': a {part.type} part cannot stand in a {message.role} message",
                code="invalid_value",
                param=where,
            )
        pieces.append(collector.add(source))
    return tuple(pieces)


def _source(part: object, where: str) -> MediaSource | None:
    if isinstance(part, ImagePart):
        return MediaSource("image", f"{where}.image_url.url", url=part.image_url.url)
    if isinstance(part, AudioUrlPart):
        return MediaSource("audio", f"{where}.audio_url.url", url=part.audio_url.url)
    if isinstance(part, InputAudioPart):
        audio = part.input_audio
        return MediaSource("audio", f"{where}.input_audio.data", encoded=audio.data, declared=audio.format)
    return None


def _sampling(
    service: Service, body: ChatCompletionRequest, segments: Sequence[Segment], max_model_len: int
) -> SamplingParams:
    max_tokens = answer_budget(segments, max_model_len, body.max_completion_tokens or body.max_tokens)
    vocab_size = service.prompt.tokenizer.vocab_size
    logit_bias = {int(token_id): bias for token_id, bias in (body.logit_bias or {}).items()}
    for param, token_ids in (("logit_bias", list(logit_bias)), ("stop_token_ids", body.stop_token_ids or [])):
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequest(
                    f"'{param}' names token {token_id}, the vocabulary has {vocab_size}",
                    code="invalid_value",
                    param=param,
                )
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequest(
            f"'min_tokens' ({min_tokens}) exceeds the answer's limit of {max_tokens} tokens",
            code="invalid_value",
            param="min_tokens",
        )
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=_or(body.temperature, 1.0),
        top_k=max(0, body.top_k or 0),
        top_p=_or(body.top_p, 1.0),
        min_p=_or(body.min_p, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        logit_bias=logit_bias,
        stop=body.stop_strings,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        seed=0,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


def answer_budget(segments: Sequence[Segment], max_model_len: int, asked: int | None) -> int:
    """The answer's largest length in tokens, as far as it is known before media are encoded.

    Every media item counts as one token here; the llm stage knows its true length and ends the answer
    where the context ends.  Raises ContextOverflow if prompt and `asked` do not fit.
    """
    num_prompt_tokens = sum(
        len(segment.token_ids) if isinstance(segment, TokenSegment) else 1 for segment in segments
    )
    room = max_model_len - num_prompt_tokens
    if room < 1 or (asked is not None and asked > room):
        raise ContextOverflow(
            f"the prompt has {num_prompt_tokens} tokens and the answer asks for {asked or 'at least 1'}, "
            f"the context holds {max_model_len}; shorten the messages or the answer",
            param="messages" if room < 1 else "max_completion_tokens",
        )
    return room if asked is None else asked


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
