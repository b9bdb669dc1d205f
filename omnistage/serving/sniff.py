"""Recognises picture and sound containers by their first bytes.  Decodes nothing."""

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
_FAMILIES = {b"WAVE": "audio/wav", b"WEBP": "image/webp"}  # bytes 8..12 of a RIFF file
_AVIF_BRANDS = (b"avif", b"avis", b"heic", b"heix", b"mif1")

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
    """The MIME type the bytes begin like, or None."""
    head = data[:16]
    if head[:4] in (b"RIFF", b"RF64", b"RIFX"):
        return _FAMILIES.get(head[8:12])
    if head[4:8] == b"ftyp":
        return "image/avif" if head[8:12] in _AVIF_BRANDS else "audio/mp4"
    for signature, mime in _SIGNATURES:
        if head.startswith(signature):
            return mime
    if len(head) >= 2 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0:  # an MPEG frame's sync word
        is_adts = head[1] & 0x06 == 0
        return "audio/aac" if is_adts else "audio/mpeg"
    return None


def modality_of(mime: str) -> Literal["image", "audio"]:
    return "image" if mime.startswith("image/") else "audio"
