"""A conversation's media: numbered as the prompt needs them, loaded, given to the stages that take them."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from omnistage.errors import InvalidRequest, MediaError
from omnistage.serving.media import MediaLoader, MediaSource, media_key
from omnistage.serving.prompt import MediaPiece, PromptMessage
from omnistage.serving.requests import BackendInfo
from omnistage.types import Media

# Demuxers for files; playlists and scripts, which make FFmpeg open other files, are left out.
_DEMUXERS = "mov,matroska,avi"


class MediaCollector:
    """Gathers the media of a conversation in order of appearance."""

    def __init__(self, info: BackendInfo) -> None:
        self._info = info
        self.sources: list[MediaSource] = []

    def add(self, source: MediaSource) -> MediaPiece:
        """Its item counts all media so far, until `place` numbers them by stage.  Raises InvalidRequest."""
        if source.modality not in self._info.encoders:
            raise InvalidRequest(
                f"this model takes no {source.modality} input",
                code="unsupported_modality",
                param=source.param,
            )
        self.sources.append(source)
        return MediaPiece(source.modality, len(self.sources) - 1)


@dataclass(frozen=True)
class PlacedMedia:
    """pieces: of each source, numbered by stage.  by_stage: what each encoder stage gets."""

    pieces: tuple[MediaPiece, ...]
    by_stage: Mapping[str, tuple[Media, ...]]

    def in_messages(self, messages: Sequence[PromptMessage]) -> list[PromptMessage]:
        """Messages with pieces from MediaCollector.add, numbered by stage."""
        return [
            replace(
                message,
                pieces=tuple(
                    self.pieces[piece.item] if isinstance(piece, MediaPiece) else piece
                    for piece in message.pieces
                ),
            )
            for message in messages
        ]


async def place(
    loader: MediaLoader, info: BackendInfo, sources: Sequence[MediaSource], *, hears_videos: bool
) -> PlacedMedia:
    """Load all media.  hears_videos: a video with a sound track is an item of the hearing stage, too.

    Raises MediaError or MediaTooLarge, with the param to blame.
    """
    loaded = await loader.load(sources)
    by_stage: dict[str, list[Media]] = {}
    pieces = []
    for source, media in zip(sources, loaded, strict=True):
        piece = MediaPiece(source.modality, _put(by_stage, info.encoders[source.modality], media))
        sound = await _sound_of(source, media) if hears_videos and source.modality == "video" else None
        if sound is not None:
            piece = replace(piece, sound=_put(by_stage, info.encoders["audio"], sound))
        pieces.append(piece)
    return PlacedMedia(tuple(pieces), {stage: tuple(media) for stage, media in by_stage.items()})


def _put(by_stage: dict[str, list[Media]], stage: str, media: Media) -> int:
    """Returns the item's index among those of its stage."""
    items = by_stage.setdefault(stage, [])
    items.append(media)
    return len(items) - 1


async def _sound_of(source: MediaSource, video: Media) -> Media | None:
    """The same file as an item of the hearing stage; None for a silent one, which stays a plain video."""
    try:
        if not await asyncio.to_thread(has_sound_track, video.data):
            return None
    except MediaError as error:
        error.param = source.param
        raise
    key = await asyncio.to_thread(media_key, "audio", video.data, {})
    return Media(key=key, data=video.data, mime=video.mime)


def has_sound_track(data: bytes) -> bool:
    """By the video file's header; no sample is decoded.  Raises MediaError for what is no video file."""
    import av  # a server of text needs no codecs
    import av.error

    options = {"format_whitelist": _DEMUXERS, "protocol_whitelist": "none"}
    try:
        with av.open(io.BytesIO(data), mode="r", options=options, metadata_errors="replace") as container:
            return bool(container.streams.audio)
    except av.error.FFmpegError as error:
        raise MediaError(
            f"the {len(data)} bytes are not a video that can be read ({error.strerror}); send a complete "
            "MP4, MOV, WebM, Matroska or AVI video"
        ) from error
