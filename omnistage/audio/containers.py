"""Sound files: bytes of any common container to PCM and back, whole or as a stream, by PyAV.

Imports no torch, so the API process may use it.  Knows no request: limits are arguments.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from fractions import Fraction
from typing import Literal

import av
import av.error
import numpy as np
from numpy.typing import NDArray

from omnistage.audio.pcm import Pcm, pcm16_bytes
from omnistage.errors import InvalidRequest, MediaError, MediaTooLarge

AudioFormat = Literal["wav", "wav_f32", "pcm16", "mp3", "flac", "opus", "aac"]

CONTENT_TYPES: dict[str, str] = {  # by AudioFormat
    "wav": "audio/wav",
    "wav_f32": "audio/wav",
    "pcm16": "audio/pcm",
    "mp3": "audio/mpeg",
    "flac": "audio/flac",
    "opus": "audio/ogg",
    "aac": "audio/aac",
}

MIN_SAMPLE_RATE, MAX_SAMPLE_RATE = 4_000, 384_000  # Hz
MAX_DECODED_RATE = 48_000  # Hz; nobody hears more, and ten minutes at 384 kHz take a gigabyte
UNKNOWN_SIZE = 0xFFFF_FFFF  # in a WAV header: the stream goes on until it ends

# Demuxers for files; playlists and scripts, which make FFmpeg open other files, are left out.
_DEMUXERS = "wav,w64,mp3,flac,ogg,mov,matroska,aac,aiff,au,caf,amr,ac3,mpegts,mpeg,avi,flv,asf"

# format -> muxer, codec, bits per second
_ENCODINGS: dict[str, tuple[str, str, int | None]] = {
    "mp3": ("mp3", "libmp3lame", 64_000),
    "flac": ("flac", "flac", None),
    "opus": ("ogg", "libopus", 32_000),
    "aac": ("adts", "aac", 64_000),
}
_STREAM_OPTIONS = {
    "mp3": {"write_xing": "0"},  # the Xing header needs the length
    "opus": {"page_duration": "20000"},  # microseconds: a page per packet
}


def decode(data: bytes, *, max_seconds: float) -> Pcm:
    """Decode a sound file (wav, mp3, flac, ogg, m4a, webm, aac and others), averaged to mono.

    Of a video (mp4, mov, mkv, webm, avi and others) it is the first sound track.

    Raises MediaTooLarge if it lasts longer than max_seconds, and MediaError if it is empty, no sound
    file, cut short, damaged, without a sound track, or of a sample rate outside 4 to 384 kHz.
    A rate over 48 kHz is brought down to that.
    """
    if not data:
        raise MediaError("the audio is empty (0 bytes); send the file's bytes")
    try:
        options = {"format_whitelist": _DEMUXERS, "protocol_whitelist": "none"}
        with av.open(io.BytesIO(data), mode="r", options=options, metadata_errors="replace") as container:
            if not container.streams.audio:
                remedy = (
                    " or leave out use_audio_in_video, which needs one" if container.streams.video else ""
                )
                raise MediaError(
                    f"the file ({container.format.long_name}) has no sound track; send one that has "
                    f"sound{remedy}"
                )
            stream = container.streams.audio[0]
            promised = 0.0 if _is_length_guessed(container.format.name, data) else _seconds(stream)
            blocks = list(_mono_blocks(container, stream, max_seconds))
    except av.error.FFmpegError as error:
        raise MediaError(
            f"the {len(data)} bytes are not a sound file that can be read ({error.strerror}); "
            "send a complete WAV, MP3, FLAC, Ogg, M4A or WebM file"
        ) from error
    promised = max(promised, _promised_by_wav(data))
    if not blocks:
        raise MediaError("the audio has no samples (0 s of sound); send a longer recording")
    samples, rate = np.concatenate([block for _, block in blocks]), blocks[0][0]
    if len(samples) / rate < promised - max(0.25, 0.02 * promised):
        raise MediaError(
            f"the audio is cut short: its header promises {promised:.2f} s, "
            f"only {len(samples) / rate:.2f} s are there; send the whole file"
        )
    if not np.isfinite(samples).all():
        raise MediaError("the audio has samples that are not finite numbers; export the file again")
    return Pcm(np.clip(samples, -1.0, 1.0), rate)


def _seconds(stream: av.AudioStream) -> float:
    """The length FFmpeg states; 0.0 if it states none."""
    return float(stream.duration * stream.time_base) if stream.duration and stream.time_base else 0.0


def _is_length_guessed(format_name: str, data: bytes) -> bool:
    """Whether FFmpeg has guessed the length from a few packets' bit rate, for want of a header."""
    if format_name != "mp3":
        return format_name in ("aac", "ac3", "amr")
    first_frame = 0
    if data[:3] == b"ID3" and len(data) >= 10:
        first_frame = 10 + sum(byte << 7 * (3 - index) for index, byte in enumerate(data[6:10]))
    head = data[first_frame : first_frame + 2048]
    return not any(tag in head for tag in (b"Xing", b"Info", b"VBRI"))


def _promised_by_wav(data: bytes) -> float:
    """Seconds that a WAV header says follow; 0.0 if it does not say, or for other files.

    FFmpeg takes what is there instead, so that a cut file would pass as a whole one.
    """
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        return 0.0
    position, bytes_per_second = 12, 0
    while position + 8 <= len(data):
        name, size = struct.unpack_from("<4sI", data, position)
        if name == b"fmt " and position + 20 <= len(data):
            (bytes_per_second,) = struct.unpack_from("<I", data, position + 16)
        if name == b"data":
            is_known = 0 < size < 0x7FFF_0000  # streams write 0 or a number near the largest
            return size / bytes_per_second if is_known and bytes_per_second else 0.0
        position += 8 + size + size % 2
    return 0.0


def _mono_blocks(
    container: av.container.InputContainer, stream: av.AudioStream, max_seconds: float
) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """(sample rate, samples) frame by frame.  Raises MediaError, MediaTooLarge as decode() does."""
    resampler = None
    num_samples, rate = 0, 0
    frames: Iterator[av.AudioFrame] = container.decode(stream)
    for frame in frames:
        rate = rate or frame.sample_rate
        if not MIN_SAMPLE_RATE <= rate <= MAX_SAMPLE_RATE:
            raise MediaError(
                f"the audio has a sample rate of {rate} Hz; "
                f"it must be from {MIN_SAMPLE_RATE} to {MAX_SAMPLE_RATE} Hz: resample the file"
            )
        num_samples += frame.samples
        if num_samples > max_seconds * rate:
            raise MediaTooLarge(
                f"the audio is longer than the limit of {max_seconds:g} s; send a shorter clip"
            )
        if not frame.samples:
            continue
        if resampler is None:  # channels stay the first frame's, and so does a rate that is not excessive
            # Packed: PyAV 18 crashes the process when it converts planar frames of 8 or more channels.
            resampler = av.AudioResampler(format="flt", rate=min(rate, MAX_DECODED_RATE))
        frame.pts = None
        try:
            converted = resampler.resample(frame)
        except ValueError as error:  # PyAV's word for a frame unlike the first one
            raise MediaError(
                "the audio changes its sample rate or channels midway; convert it to one format"
            ) from error
        for part in converted:
            channels = np.frombuffer(memoryview(part.planes[0]), np.float32)[
                : part.samples * part.layout.nb_channels
            ]
            with np.errstate(invalid="ignore", over="ignore"):  # decode() refuses what is not finite
                mono = channels.reshape(part.samples, -1).mean(axis=1, dtype=np.float32)
            yield part.sample_rate, mono


def encode(pcm: Pcm, audio_format: str) -> bytes:
    """A complete file.  Raises InvalidRequest for an unknown format."""
    _check(audio_format)
    if audio_format not in _ENCODINGS:
        body = _raw(pcm.samples, audio_format)
        if audio_format == "pcm16":
            return body
        return wav_header(pcm.sample_rate, num_bytes=len(body), is_float=audio_format == "wav_f32") + body
    sink = io.BytesIO()  # seekable: headers get their lengths
    encoder = StreamEncoder(audio_format, pcm.sample_rate, sink=sink)
    encoder.push(pcm.samples)
    encoder.close()
    return sink.getvalue()


def wav_header(sample_rate: int, *, num_bytes: int | None, is_float: bool = False) -> bytes:
    """The 44 bytes before mono samples, int16 or float32.  num_bytes: of all samples, None if unknown."""
    width = 4 if is_float else 2
    total = UNKNOWN_SIZE if num_bytes is None else 36 + num_bytes
    size = UNKNOWN_SIZE if num_bytes is None else num_bytes
    return struct.pack(
        "<4sI4s4sIHHIIHH4sI",
        b"RIFF", total, b"WAVE",
        b"fmt ", 16, 3 if is_float else 1, 1, sample_rate, sample_rate * width, width, width * 8,
        b"data", size,
    )  # fmt: skip


class StreamEncoder:
    """Encodes sound as it comes.  The bytes of all push() and of close(), joined, are one playable file.

    audio_format: an AudioFormat; a WAV's header says that its length is unknown.  sample_rate: Hz of
    what is pushed; formats that lack it (Opus, and MP3 and AAC at odd rates) are resampled to 48 kHz.
    sink: where compressed bytes go instead of being returned.  Raises InvalidRequest for an unknown format.
    """

    def __init__(self, audio_format: str, sample_rate: int, *, sink: io.BytesIO | None = None) -> None:
        _check(audio_format)
        self._format = audio_format
        self._sample_rate = sample_rate
        self._num_samples = 0
        self._is_closed = False
        self._sink = _Sink()
        self._pending = b""
        if audio_format in ("wav", "wav_f32"):
            self._pending = wav_header(sample_rate, num_bytes=None, is_float=audio_format == "wav_f32")
        if audio_format in _ENCODINGS:
            self._open(sink)

    def push(self, samples: NDArray[np.float32]) -> bytes:
        """samples: [n], float32, in [-1, 1].  Returns the bytes that are ready, perhaps none."""
        assert not self._is_closed, "push after close"
        if self._format not in _ENCODINGS:
            return self._take_pending() + _raw(samples, self._format)
        if len(samples):
            clipped = np.clip(np.asarray(samples, dtype=np.float32), -1.0, 1.0)
            frame = av.AudioFrame.from_ndarray(clipped[None], format="fltp", layout="mono")
            frame.sample_rate = self._sample_rate
            frame.time_base = Fraction(1, self._sample_rate)
            frame.pts = self._num_samples
            self._num_samples += len(samples)
            self._container.mux(self._stream.encode(frame))
        return self._sink.take()

    def close(self) -> bytes:
        """The last bytes: what the codec still held, and the container's end."""
        assert not self._is_closed, "close after close"
        if self._format not in _ENCODINGS:
            self._is_closed = True
            return self._take_pending()
        ready = self._pad()
        self._is_closed = True
        self._container.mux(self._stream.encode(None))
        self._container.close()
        return ready + self._sink.take()

    def _pad(self) -> bytes:
        """Make up for less than a frame with silence: lossy codecs would write no file at all."""
        is_lossy = _ENCODINGS[self._format][2] is not None
        missing = self._sample_rate // 50 - self._num_samples
        return self.push(np.zeros(missing, np.float32)) if is_lossy and missing > 0 else b""

    def _open(self, sink: io.BytesIO | None) -> None:
        muxer, codec_name, bit_rate = _ENCODINGS[self._format]
        options = {"flush_packets": "1"}
        if sink is None:
            options |= _STREAM_OPTIONS.get(self._format, {})
        self._container = av.open(sink or self._sink, mode="w", format=muxer, options=options)
        rates = av.codec.Codec(codec_name, "w").audio_rates
        rate = self._sample_rate if rates is None or self._sample_rate in rates else 48_000
        if self._format == "opus":
            rate = 48_000
        stream = self._container.add_stream(codec_name, rate=rate)
        assert isinstance(stream, av.AudioStream)
        stream.codec_context.layout = "mono"
        if bit_rate is not None:
            stream.codec_context.bit_rate = bit_rate
        self._stream = stream

    def _take_pending(self) -> bytes:
        pending, self._pending = self._pending, b""
        return pending


class _Sink:
    """A file without seeking, as a stream has it."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def write(self, data: bytes) -> int:
        self._buffer += data
        return len(data)

    def take(self) -> bytes:
        taken = bytes(self._buffer)
        self._buffer.clear()
        return taken


def _raw(samples: NDArray[np.float32], audio_format: str) -> bytes:
    if audio_format == "wav_f32":
        return np.asarray(samples, dtype="<f4").tobytes()
    return pcm16_bytes(samples)


def _check(audio_format: str) -> None:
    if audio_format not in CONTENT_TYPES:
        raise InvalidRequest(
            f"unknown audio format {audio_format!r}; the formats are {', '.join(CONTENT_TYPES)}",
            param="format",
        )
