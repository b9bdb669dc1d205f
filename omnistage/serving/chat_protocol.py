"""Bodies of /v1/chat/completions: what OpenAI defines, what is refused, and a few extensions.

Extensions: min_p, top_k, repetition_penalty, min_tokens, ignore_eos, stop_token_ids, cache_salt,
stage_params, mm_processor_kwargs, return_timings, return_token_ids, and the content parts audio_url and
video_url.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from omnistage.serving.protocol import Body, Unsupported

AudioFormat = Literal["wav", "wav_f32", "pcm16", "mp3", "flac", "opus", "aac"]
MAX_STOP_STRINGS = 16
FramesPerSecond = Annotated[float, Field(gt=0.0, le=60.0)]

_NO_BREAKPOINTS = Unsupported("prefixes are cached automatically; leave it out")


class TextPart(Body):
    type: Literal["text"]
    text: str
    unsupported: ClassVar = {"prompt_cache_breakpoint": _NO_BREAKPOINTS}


class RefusalPart(Body):
    type: Literal["refusal"]
    refusal: str


class ImageUrl(Body):
    """detail: pictures are encoded at one resolution, so "high" cannot be honoured."""

    url: str = Field(min_length=1)
    detail: Literal["auto", "low"] | None = None


class ImagePart(Body):
    type: Literal["image_url"]
    image_url: ImageUrl
    unsupported: ClassVar = {"prompt_cache_breakpoint": _NO_BREAKPOINTS}


class InputAudio(Body):
    data: str = Field(min_length=1)
    format: Literal["wav", "mp3", "flac", "opus", "ogg", "aac", "m4a", "webm"]


class InputAudioPart(Body):
    type: Literal["input_audio"]
    input_audio: InputAudio
    unsupported: ClassVar = {"prompt_cache_breakpoint": _NO_BREAKPOINTS}


class AudioUrl(Body):
    url: str = Field(min_length=1)


class AudioUrlPart(Body):
    type: Literal["audio_url"]
    audio_url: AudioUrl


class VideoUrl(Body):
    """fps: frames per second to look at."""

    url: str = Field(min_length=1)
    fps: FramesPerSecond | None = None


class VideoPart(Body):
    type: Literal["video_url"]
    video_url: VideoUrl


class FilePart(Body):
    type: Literal["file"]
    unsupported: ClassVar = {
        "file": Unsupported("send text, image_url, input_audio, audio_url or video_url parts instead")
    }


Part = Annotated[
    TextPart | RefusalPart | ImagePart | InputAudioPart | AudioUrlPart | VideoPart | FilePart,
    Field(discriminator="type"),
]


def _content_kind(value: Any) -> str:
    return "parts" if isinstance(value, list) else "text"


Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[Part], Field(min_length=1), Tag("parts")],
    Discriminator(_content_kind),
]


class AudioReference(Body):
    """An earlier spoken answer, by the id it came with."""

    id: str
    unsupported: ClassVar = {
        name: Unsupported("refer to a spoken answer by its 'id' alone")
        for name in ("data", "transcript", "expires_at")
    }


class Message(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Content | None = None
    refusal: str | None = None
    audio: AudioReference | None = None
    unsupported: ClassVar = {
        "name": Unsupported("write the participant's name into the text"),
        "tool_calls": Unsupported("this model calls no tools", ([],)),
        "tool_call_id": Unsupported("this model calls no tools"),
        "function_call": Unsupported("this model calls no tools"),
        # openai's own client echoes these read-only fields when a reply is sent back as history
        "annotations": Unsupported("leave it out", ([],)),
    }


class VoiceId(Body):
    id: str


class AudioOptions(Body):
    """voice: one of /v1/audio/voices; the first of them when left out."""

    format: AudioFormat
    voice: str | VoiceId | None = None

    @property
    def voice_name(self) -> str | None:
        return self.voice.id if isinstance(self.voice, VoiceId) else self.voice


class StreamOptions(Body):
    include_usage: bool | None = None
    unsupported: ClassVar = {
        "include_obfuscation": Unsupported("chunks are never padded; leave it out", (False,)),
    }


class MediaProcessing(Body):
    """fps: of videos that do not say it themselves.  use_audio_in_video: whether their sound is heard."""

    fps: FramesPerSecond | None = None
    use_audio_in_video: bool | None = None


_NO_TOOLS = "this model calls no tools; describe the task in the messages"


class ChatCompletionRequest(Body):
    """stage_params: stage -> its sampling settings, by the names that the fields here have."""

    model: str
    messages: list[Message] = Field(min_length=1)
    modalities: list[Literal["text", "audio"]] | None = Field(default=None, min_length=1)
    audio: AudioOptions | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(default=None, ge=1)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    min_tokens: int | None = Field(default=None, ge=0)
    temperature: float | None = Field(default=None, ge=0.0, le=2.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    min_p: float | None = Field(default=None, ge=0.0, le=1.0)
    presence_penalty: float | None = Field(default=None, ge=-2.0, le=2.0)
    frequency_penalty: float | None = Field(default=None, ge=-2.0, le=2.0)
    repetition_penalty: float | None = Field(default=None, gt=0.0, le=2.0)
    logit_bias: dict[str, float] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = Field(default=None, max_length=MAX_STOP_STRINGS)
    ignore_eos: bool | None = None
    stage_params: dict[str, dict[str, Any]] | None = None
    mm_processor_kwargs: MediaProcessing | None = None
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256)
    user: str | None = Field(default=None, max_length=256)
    metadata: dict[str, str] | None = Field(default=None, max_length=16)
    return_timings: bool | None = None
    return_token_ids: bool | None = None

    unsupported: ClassVar = {
        "tools": Unsupported(_NO_TOOLS, ([],)),
        "tool_choice": Unsupported(_NO_TOOLS, ("none",)),
        "parallel_tool_calls": Unsupported(_NO_TOOLS, (False,)),
        "functions": Unsupported(_NO_TOOLS, ([],)),
        "function_call": Unsupported(_NO_TOOLS, ("none",)),
        "response_format": Unsupported("only {'type': 'text'} is", ({"type": "text"},)),
        "prediction": Unsupported("leave it out"),
        "reasoning_effort": Unsupported("this model does not reason separately", ("none",)),
        "verbosity": Unsupported("ask for a short or long answer in the messages"),
        "web_search_options": Unsupported("this server searches nothing"),
        "store": Unsupported("completions are not stored", (False,)),
        "service_tier": Unsupported("there is one tier", ("auto", "default")),
        "prompt_cache_key": Unsupported("prefixes are cached automatically; separate users by 'cache_salt'"),
        "prompt_cache_options": Unsupported(
            "prefixes are cached automatically; separate users by 'cache_salt'"
        ),
        "prompt_cache_retention": Unsupported("cached prefixes live as long as memory allows"),
        "safety_identifier": Unsupported("use 'user'"),
        "moderation": Unsupported("this server moderates nothing"),
    }

    @field_validator("modalities")
    @classmethod
    def _no_repeats(cls, value: list[str] | None) -> list[str] | None:
        if value is not None and len(set(value)) != len(value):
            raise ValueError("each modality may be named once")
        return value

    @field_validator("stop")
    @classmethod
    def _usable_stop(cls, value: str | list[str] | None) -> str | list[str] | None:
        strings = [value] if isinstance(value, str) else value or []
        if len(strings) > MAX_STOP_STRINGS:
            raise ValueError(f"at most {MAX_STOP_STRINGS} stop strings")
        if any(not string for string in strings):
            raise ValueError("a stop string must not be empty")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _usable_bias(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for token_id, bias in (value or {}).items():
            if not (token_id.isascii() and token_id.isdigit() and len(token_id) <= 9):
                raise ValueError(f"keys must be token ids, {token_id!r} is not")
            if not -100.0 <= bias <= 100.0:
                raise ValueError(f"biases must lie between -100 and 100, token {token_id} has {bias}")
        return value

    @field_validator("metadata")
    @classmethod
    def _short_metadata(cls, value: dict[str, str] | None) -> dict[str, str] | None:
        if any(len(key) > 64 or len(text) > 512 for key, text in (value or {}).items()):
            raise ValueError("keys have at most 64 and values at most 512 characters")
        return value

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def hears_videos(self) -> bool:
        return bool(self.mm_processor_kwargs and self.mm_processor_kwargs.use_audio_in_video)

    @property
    def wants_audio(self) -> bool:
        return "audio" in (self.modalities or ())
