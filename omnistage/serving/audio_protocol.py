"""Bodies of /v1/audio/speech and /v1/audio/transcriptions, after OpenAI's."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from omnistage.serving.chat_protocol import VoiceId
from omnistage.serving.protocol import Body, Unsupported

SpeechFormat = Literal["mp3", "opus", "aac", "flac", "wav", "pcm"]


class SpeechRequest(Body):
    """input: what is said.  stream_format: "audio" sends the bytes themselves, "sse" events of base64."""

    model: str
    input: str = Field(min_length=1)
    voice: str | VoiceId
    response_format: SpeechFormat = "mp3"
    speed: float = Field(default=1.0, ge=0.25, le=4.0)
    stream_format: Literal["audio", "sse"] = "audio"
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    unsupported: ClassVar = {
        "instructions": Unsupported("choose a voice and a speed instead", ("",)),
    }

    @property
    def voice_name(self) -> str:
        return self.voice.id if isinstance(self.voice, VoiceId) else self.voice


class TranscriptionRequest(Body):
    """The form fields beside `file`.  temperature: decoding is greedy, so only 0 can be honoured."""

    model: str
    response_format: Literal["json", "text", "verbose_json"] = "json"
    language: str | None = None
    temperature: float = Field(default=0.0, ge=0.0, le=0.0)
    stream: bool = False
    unsupported: ClassVar = {
        "prompt": Unsupported("the transcriber takes no hints", ("",)),
        "include": Unsupported("log-probabilities of transcripts are not available"),
        "include[]": Unsupported("log-probabilities of transcripts are not available"),
        "timestamp_granularities": Unsupported("transcripts carry no timestamps"),
        "timestamp_granularities[]": Unsupported("transcripts carry no timestamps"),
        "chunking_strategy": Unsupported("a clip is transcribed as a whole"),
        "keywords": Unsupported("the transcriber takes no hints"),
        "keywords[]": Unsupported("the transcriber takes no hints"),
        "languages": Unsupported("name one 'language'"),
        "languages[]": Unsupported("name one 'language'"),
        "known_speaker_names": Unsupported("speakers are not told apart"),
        "known_speaker_names[]": Unsupported("speakers are not told apart"),
        "known_speaker_references": Unsupported("speakers are not told apart"),
        "known_speaker_references[]": Unsupported("speakers are not told apart"),
    }
