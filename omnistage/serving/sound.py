"""An answer's sound in the format its client asked for, piece by piece or whole.

omnistage.audio is imported when the first sound is made: a server of text needs no codecs.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from omnistage.errors import RequestFailed
from omnistage.serving.requests import AudioDelta

if TYPE_CHECKING:
    from omnistage.audio.containers import AudioFormat, StreamEncoder

MEDIA_TYPES = {
    "wav": "audio/wav",
    "wav_f32": "audio/wav",
    "mp3": "audio/mpeg",
    "flac": "audio/flac",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "pcm16": "audio/pcm",
}


class AnswerEncoder:
    """Encodes the sound of one answer as it is made.  audio_format: None if no sound was asked for."""

    def __init__(self, audio_format: AudioFormat | None) -> None:
        self._format = audio_format
        self._encoder: StreamEncoder | None = None
        self._sample_rate = 0

    def push(self, delta: AudioDelta) -> bytes:
        """Bytes to send now, possibly none.  Raises RequestFailed if the sample rate changes."""
        encoder = self._open(delta.sample_rate)
        _check_rate(self._sample_rate, delta.sample_rate)
        return encoder.push(delta.pcm)

    def close(self, sample_rate: int) -> bytes:
        """The file's end.  sample_rate: Hz, used if there was no sound at all."""
        return self._open(sample_rate).close()

    def _open(self, sample_rate: int) -> StreamEncoder:
        if self._encoder is None:
            from omnistage.audio.containers import StreamEncoder

            assert self._format is not None
            self._encoder = StreamEncoder(self._format, sample_rate)
            self._sample_rate = sample_rate
        return self._encoder


class WholeSound:
    """Gathers the sound of one answer.  sample_rate: Hz, used if there is no sound at all."""

    def __init__(self, sample_rate: int) -> None:
        self._sample_rate = sample_rate
        self._pieces: list[NDArray[np.float32]] = []

    def push(self, delta: AudioDelta) -> None:
        """Raises RequestFailed if the sample rate changes."""
        if self._pieces:
            _check_rate(self._sample_rate, delta.sample_rate)
        self._sample_rate = delta.sample_rate
        self._pieces.append(delta.pcm)

    async def encode(self, audio_format: AudioFormat) -> bytes:
        """One complete file, encoded off the event loop."""
        from omnistage.audio.containers import encode
        from omnistage.audio.pcm import Pcm

        samples = np.concatenate(self._pieces) if self._pieces else np.zeros(0, dtype=np.float32)
        return await asyncio.to_thread(encode, Pcm(samples, self._sample_rate), audio_format)


def media_type(audio_format: AudioFormat, sample_rate: int) -> str:
    """The Content-Type of a format; raw PCM says its rate in Hz, which nothing else would."""
    kind = MEDIA_TYPES[audio_format]
    return f"{kind};rate={sample_rate}" if audio_format == "pcm16" else kind


def _check_rate(before: int, now: int) -> None:
    if before != now:
        raise RequestFailed(f"the sample rate changed from {before} to {now} Hz within an answer")
