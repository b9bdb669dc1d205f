"""Gets the bytes of the media a request names: data: and http(s) URLs, allowed files, base64.

Bytes are recognised by their signature and sized here; decoding is the encoder's work.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from omnistage.errors import MediaError, MediaTooLarge
from omnistage.serving.fetching import Fetcher
from omnistage.serving.prompt import Modality
from omnistage.serving.settings import MediaSettings
from omnistage.serving.sniff import AUDIO_FORMATS, mime_as, sniff
from omnistage.types import Media, Scalar

_NAMES = {
    "image": "a PNG, JPEG, WebP, GIF, BMP or TIFF picture",
    "audio": "a WAV, MP3, FLAC, Ogg or AAC clip",
    "video": "an MP4, MOV, WebM, Matroska or AVI video",
}


@dataclass(frozen=True)
class MediaSource:
    """One item of a request.  Exactly one of url, encoded (base64) and data is given.

    declared: the container an input_audio part claims to hold.  param: the field to blame.
    """

    modality: Modality
    param: str
    url: str | None = None
    encoded: str | None = None
    data: bytes | None = None
    declared: str | None = None
    options: Mapping[str, Scalar] = field(default_factory=dict)


def media_key(modality: Modality, data: bytes, options: Mapping[str, Scalar]) -> str:
    """BLAKE2b over the bytes and the options, as hex; equal keys mean equal inputs to an encoder."""
    digest = blake2b(digest_size=20)
    digest.update(json.dumps([modality, dict(options)], sort_keys=True).encode() + b"\0")
    digest.update(data)
    return digest.hexdigest()


class MediaLoader:
    """Loads all media of a request at once, within the limits of MediaSettings."""

    def __init__(self, settings: MediaSettings, fetcher: Fetcher | None = None) -> None:
        self._settings = settings
        self._limits: dict[Modality, int] = {
            "image": settings.max_image_bytes,
            "audio": settings.max_audio_bytes,
            "video": settings.max_video_bytes,
        }
        self._fetcher = fetcher or Fetcher(settings)

    async def load(self, sources: Sequence[MediaSource]) -> list[Media]:
        """In the order given.  Raises MediaError or MediaTooLarge, with the param to blame."""
        settings = self._settings
        if len(sources) > settings.max_items:
            raise MediaError(
                f"the request has {len(sources)} pictures, clips and videos together, "
                f"the limit is {settings.max_items}",
                param="messages",
            )
        tasks = [asyncio.ensure_future(self._load_one(source)) for source in sources]
        try:
            media = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        total = sum(len(item.data) for item in media)
        if total > settings.max_total_bytes:
            raise MediaTooLarge(
                f"the request's media have {total} bytes together, the limit is {settings.max_total_bytes}",
                param="messages",
            )
        return media

    async def aclose(self) -> None:
        await self._fetcher.aclose()

    async def _load_one(self, source: MediaSource) -> Media:
        limit = self._limits[source.modality]
        try:
            data = await self._bytes_of(source, limit)
            if len(data) > limit:
                raise MediaTooLarge(f"the {source.modality} has {len(data)} bytes, the limit is {limit}")
            mime = _recognise(source, data)
            return Media(
                key=await asyncio.to_thread(media_key, source.modality, data, source.options),
                data=data,
                mime=mime,
                options=dict(source.options),
            )
        except (MediaError, MediaTooLarge) as error:
            error.param = error.param or source.param
            raise

    async def _bytes_of(self, source: MediaSource, limit: int) -> bytes:
        if source.data is not None:
            return source.data
        if source.encoded is not None:
            return decode_base64(source.encoded, limit)
        assert source.url is not None
        scheme = source.url.partition(":")[0].lower()
        if scheme == "data":
            return decode_data_url(source.url, limit)
        if scheme in ("http", "https"):
            return await self._fetcher.fetch(source.url, max_bytes=limit)
        if scheme == "file":
            return await asyncio.to_thread(read_allowed_file, source.url, self._settings.root, limit)
        raise MediaError(
            f"cannot load media from {source.url[:60]!r}; use a data:, http:, https: or file: URL"
        )


def decode_base64(text: str, limit: int) -> bytes:
    """Standard base64, strictly.  limit: bytes of the result, checked before decoding."""
    if len(text) > (limit + 2) // 3 * 4 + 4:
        raise MediaTooLarge(f"the base64 data has {len(text)} characters, the limit is {limit} bytes decoded")
    try:
        return base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise MediaError(f"the data is not valid base64 ({error})", code="invalid_base64") from None


def decode_data_url(url: str, limit: int) -> bytes:
    """data:[type][;base64],DATA of RFC 2397."""
    header, comma, body = url[len("data:") :].partition(",")
    if not comma:
        raise MediaError("the data: URL has no comma between its type and its data")
    if header.lower().endswith(";base64"):
        return decode_base64(unquote(body) if "%" in body else body, limit)
    if len(body) > 3 * limit:
        raise MediaTooLarge(f"the data: URL has {len(body)} characters, the limit is {limit} bytes decoded")
    return unquote_to_bytes(body)


def read_allowed_file(url: str, root: Path | None, limit: int) -> bytes:
    """A file:// URL under root, after resolving links.  Never tells whether a file outside exists."""
    if root is None:
        raise MediaError(
            "file: URLs are not allowed on this server; it must be started with a media root",
            code="forbidden_file",
        )
    parts = urlsplit(url)
    path = unquote(parts.path)
    refusal = MediaError(f"{url[:100]!r} is not a readable file under the media root", code="forbidden_file")
    if parts.netloc not in ("", "localhost") or "\0" in path:
        raise refusal
    real = os.path.realpath(path)
    if os.path.commonpath([os.path.realpath(root), real]) != os.path.realpath(root):
        raise refusal
    try:
        with open(real, "rb", opener=_open_without_waiting) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise refusal
            if status.st_size > limit:
                raise MediaTooLarge(f"the file has {status.st_size} bytes, the limit is {limit}")
            return file.read(limit + 1)
    except OSError:
        raise refusal from None


def _open_without_waiting(path: str, flags: int) -> int:
    """A pipe that nobody writes to must not hold a thread; a link that appeared since is not followed."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)


def _recognise(source: MediaSource, data: bytes) -> str:
    if not data:
        raise MediaError(f"the {source.modality} is empty (0 bytes)")
    found = sniff(data)
    mime = mime_as(found, source.modality) if found else None
    if mime is None:
        looks = f"looks like {found}" if found else "is of no known format"
        raise MediaError(f"the {source.modality} {looks}; send {_NAMES[source.modality]}")
    if source.declared is not None and mime not in AUDIO_FORMATS[source.declared]:
        raise MediaError(f"the clip is declared as {source.declared} but its bytes are {mime}")
    return mime
