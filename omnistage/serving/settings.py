"""What an operator may set about the HTTP layer.  Knows nothing of stages or devices."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

MEBIBYTE = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class MediaSettings:
    """Where media may come from and how much of it.

    root: the only directory that file:// URLs may name; None refuses them all.
    allow_private_hosts: also fetch from loopback, private and link-local addresses.
    max_items: pictures, clips and videos per request.  max_*_bytes: per item, and of all items together.
    fetch_timeout: seconds for one download, redirects included.
    """

    root: Path | None = None
    allow_private_hosts: bool = False
    max_items: int = 16
    max_image_bytes: int = 20 * MEBIBYTE
    max_audio_bytes: int = 25 * MEBIBYTE
    max_video_bytes: int = 256 * MEBIBYTE
    max_total_bytes: int = 256 * MEBIBYTE
    fetch_timeout: float = 30.0
    max_redirects: int = 5


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Limits and defaults of the API.

    max_body_bytes: of a request body, in bytes.  max_total_body_bytes: of the bodies of all requests
    under way; past it the answer is 429.  max_choices: the largest `n`.
    max_speech_characters: of /v1/audio/speech `input`.  max_audio_seconds: of a clip that is decoded here.
    answer_lifetime: seconds that an audio answer's transcript can be referred to by id.
    languages: what the transcriber hears, as ISO 639-1 codes.
    """

    media: MediaSettings = field(default_factory=MediaSettings)
    max_body_bytes: int = 64 * MEBIBYTE
    max_total_body_bytes: int = 256 * MEBIBYTE
    max_choices: int = 8
    max_speech_characters: int = 4096
    max_audio_seconds: float = 600.0
    answer_lifetime: float = 3600.0
    max_remembered_answers: int = 1000
    languages: tuple[str, ...] = ("en",)
