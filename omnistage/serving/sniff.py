"""Recognises picture, sound and video containers by their first bytes.  Decodes nothing.

MP4, Matroska and WebM hold sound alone as well as videos; which of them a file is, its user says.
"""

from __future__ import annotations

from typing import Literal

# start of the file -> MIME type
_SIGNATURES: tuple[tuple[bytes, str], ...] = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
    (b"BM", "image/bmp"),
    (b"II*\x00", "image/tiff"),
    (b"MM\x00*", "image/tiff"),
    (b"fLaC", "audio/flac"),
    (b"OggS", "audio/ogg"),
    (b"ID3", "audio/mpeg"),
    (b"\x1aE\xdf\xa3", "audio/webm"),
    (b"FORM", "audio/aiff"),
)
_FAMILIES = {b"WAVE": "audio/wav", b"WEBP": "image/webp", b"AVI ": "video/x-msvideo"}  # bytes 8..12 of RIFF
_AVIF_BRANDS = (b"avif", b"avis", b"heic", b"heix", b"mif1")

_VIDEOS = {"audio/mp4": "video/mp4", "audio/webm": "video/webm"}  # as `sniff` calls them -> as a video
_QUICKTIME = (b"moov", b"mdat", b"wide")  # the first atom of a movie from before there was "ftyp"

# what a client may call a container -> the MIME types it may turn out to be
AUDIO_FORMATS: dict[str, tuple[str, ...]] = {
    "wav": ("audio/wav",),
    "mp3": ("audio/mpeg",),
    "flac": ("audio/flac", "audio/ogg"),
    "opus": ("audio/ogg", "audio/webm"),
    "ogg": ("audio/ogg",),
    "aac": ("audio/aac", "audio/mp4"),
    "m4a": ("audio/mp4",),
    "webm": ("audio/webm",),
}


def sniff(data: bytes) -> str | None:
    """The MIME type the bytes begin like, or None.  A container of either kind is sound here."""
    head = data[:16]
    if head[:4] in (b"RIFF", b"RF64", b"RIFX"):
        return _FAMILIES.get(head[8:12])
    if head[4:8] == b"ftyp":
        return "image/avif" if head[8:12] in _AVIF_BRANDS else "audio/mp4"
    if head[4:8] in _QUICKTIME:
        return "video/quicktime"
    for signature, mime in _SIGNATURES:
        if head.startswith(signature):
            return mime
    if len(head) >= 2 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0:  # an MPEG frame's sync word
        is_adts = head[1] & 0x06 == 0
        return "audio/aac" if is_adts else "audio/mpeg"
    return None


def mime_as(mime: str, modality: Literal["image", "audio", "video"]) -> str | None:
    """What a file that `sniff` calls `mime` is if it is to be of this modality; None if it cannot be."""
    if modality == "video":
        mime = _VIDEOS.get(mime, mime)
    return mime if mime.startswith(f"{modality}/") else None
