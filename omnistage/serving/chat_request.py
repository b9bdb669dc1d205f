"""From a chat body to backend requests: checks what needs the model, loads media, writes the prompt."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec

from omnistage.errors import ContextOverflow, InvalidRequest
from omnistage.serving.chat_media import MediaCollector, place
from omnistage.serving.chat_protocol import (
    AudioUrlPart,
    ChatCompletionRequest,
    ImagePart,
    InputAudioPart,
    Message,
    RefusalPart,
    TextPart,
    VideoPart,
)
from omnistage.serving.chat_sampling import answer_sampling, stage_settings
from omnistage.serving.media import MediaSource
from omnistage.serving.prompt import Piece, PromptMessage, TextPiece
from omnistage.serving.requests import BackendInfo, GenerateRequest
from omnistage.serving.service import Service, choice_seed, effective_seed


@dataclass(frozen=True)
class ChatJob:
    """A checked request.  requests: one per choice, differing in id and seed only."""

    body: ChatCompletionRequest
    completion_id: str
    requests: tuple[GenerateRequest, ...]


async def prepare_chat(service: Service, body: ChatCompletionRequest) -> ChatJob:
    """Raises InvalidRequest, NotFound, ContextOverflow or NotReady."""
    info = service.check_model(body.model)
    _check_combinations(service, body)
    settings = stage_settings(info, body)
    outputs = _outputs(info, body)
    options = {}
    if body.wants_audio:
        assert body.audio is not None
        options["voice"] = service.voice(body.audio.voice_name, param="audio.voice")
    _check_hearing(service, body)
    collector = MediaCollector(info)
    fps = body.mm_processor_kwargs.fps if body.mm_processor_kwargs else None
    messages = [
        _prompt_message(service, collector, message, f"messages[{index}]", fps)
        for index, message in enumerate(body.messages)
    ]
    placed = await place(service.media, info, collector.sources, hears_videos=body.hears_videos)
    _check_length(service, messages, info.max_model_len)
    segments = service.prompt.render(placed.in_messages(messages))
    seed = effective_seed(body.seed)
    request = GenerateRequest(
        request_id="chatcmpl-" + uuid.uuid4().hex,
        outputs=outputs,
        segments=tuple(segments),
        media=placed.by_stage,
        sampling=answer_sampling(
            info,
            body,
            settings.pop(info.entry, {}),
            segments,
            seed=seed,
            vocab_size=service.prompt.tokenizer.vocab_size,
        ),
        seed=seed,
        options=options,
        stage_params=settings,
        cache_salt=body.cache_salt or "",
    )
    return ChatJob(body, request.request_id, tuple(_choice(request, index) for index in range(body.n or 1)))


def _check_hearing(service: Service, body: ChatCompletionRequest) -> None:
    """Whether videos can be heard, if they are to be."""
    encoders = service.info.encoders
    if body.hears_videos and not ({"audio", "video"} <= set(encoders) and service.prompt.merges_sound):
        raise InvalidRequest(
            f"this model hears no videos; it takes text{''.join(f', {name}' for name in encoders)}: leave "
            "out use_audio_in_video",
            code="unsupported_modality",
            param="mm_processor_kwargs.use_audio_in_video",
        )


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


def _choice(request: GenerateRequest, index: int) -> GenerateRequest:
    sampling = request.sampling
    return replace(
        request,
        request_id=request.request_id if index == 0 else f"{request.request_id}-{index}",
        seed=choice_seed(request.seed, index),
        sampling=msgspec.structs.replace(sampling, seed=choice_seed(sampling.seed, index)),
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


def _prompt_message(
    service: Service, collector: MediaCollector, message: Message, path: str, fps: float | None
) -> PromptMessage:
    role = "system" if message.role == "developer" else message.role
    if message.role != "assistant":
        for name in ("audio", "refusal"):
            if getattr(message, name) is not None:
                raise InvalidRequest(
                    f"'{path}.{name}' belongs to assistant messages",
                    code="invalid_value",
                    param=f"{path}.{name}",
                )
    pieces = _pieces(collector, message, path, fps)
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


def _pieces(collector: MediaCollector, message: Message, path: str, fps: float | None) -> tuple[Piece, ...]:
    """fps: of videos that do not say it themselves."""
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
        source = _source(part, where, fps)
        if source is None or message.role != "user":
            raise InvalidRequest(
                f"'{where}': a {part.type} part cannot stand in a {message.role} message",
                code="invalid_value",
                param=where,
            )
        pieces.append(collector.add(source))
    return tuple(pieces)


def _source(part: object, where: str, fps: float | None) -> MediaSource | None:
    if isinstance(part, ImagePart):
        return MediaSource("image", f"{where}.image_url.url", url=part.image_url.url)
    if isinstance(part, AudioUrlPart):
        return MediaSource("audio", f"{where}.audio_url.url", url=part.audio_url.url)
    if isinstance(part, InputAudioPart):
        audio = part.input_audio
        return MediaSource("audio", f"{where}.input_audio.data", encoded=audio.data, declared=audio.format)
    if isinstance(part, VideoPart):
        video = part.video_url
        rate = fps if video.fps is None else video.fps
        options = {} if rate is None else {"fps": float(rate)}
        return MediaSource("video", f"{where}.video_url.url", url=video.url, options=options)
    return None
