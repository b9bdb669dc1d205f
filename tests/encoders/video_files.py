"""Small clips as other programs would write them, by PyAV."""

from __future__ import annotations

import io
from collections.abc import Sequence
from fractions import Fraction

import av
import numpy as np
from numpy.typing import NDArray

SOUND_RATE = 16_000


def noise_frames(num_frames: int, height: int = 16, width: int = 24, seed: int = 0) -> NDArray[np.uint8]:
    """[num_frames, height, width, 3]; no two are alike."""
    generator = np.random.default_rng(seed)
    return generator.integers(0, 256, (num_frames, height, width, 3), dtype=np.uint8)


def smooth_frames(num_frames: int, height: int = 48, width: int = 64) -> NDArray[np.uint8]:
    """[num_frames, height, width, 3]: a ramp that turns brighter, as any codec can keep it."""
    ramp = np.linspace(0, 60, width)[None, None, :, None] + np.zeros((1, height, 1, 3))
    steps = np.linspace(20, 180, num_frames)[:, None, None, None]
    return (ramp + steps).round().astype(np.uint8)


def video_file(
    frames: NDArray[np.uint8],
    rate: int | Fraction = 25,
    *,
    muxer: str = "matroska",
    codec: str = "ffv1",
    pix_fmt: str = "bgr0",
    milliseconds: Sequence[int] | None = None,
    rotation: int = 0,
    options: dict[str, str] | None = None,
    sound: NDArray[np.float32] | None = None,
    sound_codec: str = "aac",
) -> bytes:
    """frames: [num_frames, height, width, 3].  rate: frames per second.  milliseconds: presentation times
    instead.  rotation: degrees counterclockwise that the file asks for.  sound: [num_samples] at SOUND_RATE.
    """
    sink = io.BytesIO()
    with av.open(sink, mode="w", format=muxer) as output:
        stream = output.add_stream(codec, rate=rate, options=options or {})
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = pix_fmt
        if rotation:
            stream.set_display_rotation(rotation)
        if milliseconds is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        track = output.add_stream(sound_codec, rate=SOUND_RATE) if sound is not None else None
        if track is not None:
            track.codec_context.layout = "mono"
        for index, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            if milliseconds is not None:
                frame.pts, frame.time_base = milliseconds[index], Fraction(1, 1000)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
        if track is not None:
            heard = av.AudioFrame.from_ndarray(sound[None], format="fltp", layout="mono")
            heard.sample_rate, heard.time_base, heard.pts = SOUND_RATE, Fraction(1, SOUND_RATE), 0
            output.mux(track.encode(heard))
            output.mux(track.encode(None))
    return sink.getvalue()


def jpeg_video(sizes: Sequence[tuple[int, int]]) -> bytes:
    """A QuickTime file of ten frames a second of the given (width, height), which may change."""
    sink = io.BytesIO()
    with av.open(sink, mode="w", format="mov") as output:
        stream = output.add_stream("mjpeg", rate=10)
        stream.width, stream.height = sizes[0]
        stream.pix_fmt = "yuvj420p"
        for index, (width, height) in enumerate(sizes):
            encoder = av.CodecContext.create("mjpeg", "w")
            encoder.width, encoder.height, encoder.pix_fmt = width, height, "yuvj420p"
            encoder.time_base = Fraction(1, 10)
            pixels = np.full((height, width, 3), 90, np.uint8)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24").reformat(format="yuvj420p")
            frame.pts, frame.time_base, frame.color_range = index, Fraction(1, 10), 2
            for packet in [*encoder.encode(frame), *encoder.encode(None)]:
                packet.stream, packet.pts, packet.dts = stream, index, index
                packet.time_base = Fraction(1, 10)
                output.mux(packet)
    return sink.getvalue()


def frames_of(data: bytes) -> NDArray[np.uint8]:
    """All frames of a file, as PyAV decodes them."""
    with av.open(io.BytesIO(data)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
