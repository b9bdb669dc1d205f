"""Video clips from bytes to the frames that a model is to see, by PyAV, with limits.

Only chosen frames become RGB, so that memory follows what is asked for, not how long the file is.
Knows no model and no request; the sound track is omnistage.audio's.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import av
import av.error
import numpy as np
from numpy.typing import NDArray

from omnistage.errors import MediaError, MediaTooLarge
from omnistage.models.protocols import VideoFrames

MAX_FRAME_PIXELS = 9_000_000  # a little more than 4096 x 2160
MAX_FRAMES = 1200  # ten minutes at two frames per second
MAX_VIDEO_BYTES = 1024**3  # of all chosen frames in RGB
MAX_SOURCE_RATE = 1000  # frames per second of the file, on average over the longest clip allowed

# Demuxers for files; playlists and scripts, which make FFmpeg open other files, are left out.
_DEMUXERS = "mov,matroska,avi,mpegts,mpeg,flv,asf,ogg"


def decode_video(
    data: bytes,
    *,
    fps: float,
    max_seconds: float,
    max_pixels: int = MAX_FRAME_PIXELS,
    max_frames: int = MAX_FRAMES,
    max_bytes: int = MAX_VIDEO_BYTES,
) -> VideoFrames:
    """The frames that a clip shows at 0, 1 / fps, 2 / fps ... seconds after its first one.

    data: a file (mp4, mov, mkv, webm, avi, mpeg, flv, wmv, ogv).  fps: frames per second to take.
    max_pixels: of one frame.  max_frames, max_bytes: of what is taken.  Returns RGB, turned upright where
    the file says how; pixels that are not square stay so.

    A frame shows from its own presentation time until the next one's, so files of a variable rate are
    seen as a player shows them.  But it may be taken early: by less than half of the time since the frame
    before or of 1 / fps, whichever is less.  So rounded times neither double nor drop a frame: a
    clip of `fps` frames per second gives each of its frames once, and a faster one gives those nearest
    to the moments asked for.  The same holds for the clip's end, when its last frame stops to show; a
    clip that lasts less than 1 / fps gives its first frame.

    Raises MediaTooLarge for a clip that is over a limit, and MediaError for one that is empty, no video,
    cut short or damaged, or whose frames change their size, and for a rate that is no positive number.
    """
    interval = 1 / _rate(fps)
    if not data:
        raise MediaError("the video is empty (0 bytes); send the file's bytes")
    chosen = _ChosenFrames(fps, max_pixels=max_pixels, max_frames=max_frames, max_bytes=max_bytes)
    try:
        _check_length(data, max_seconds)
        with _open(data) as container:
            stream = _video_stream(container)
            _check_size(stream.codec_context.width, stream.codec_context.height, max_pixels)
            # Should the size grow midway, the decoder refuses before it takes memory for it.  It counts
            # whole blocks of pixels and their margins, hence a wider limit.
            stream.codec_context.options = {"max_pixels": str(2 * max_pixels + 2**16)}
            _choose(_timed_frames(container, stream), interval, Fraction(max_seconds), chosen)
    except av.error.FFmpegError as error:
        raise MediaError(
            f"the {len(data)} bytes are not a video that can be read ({error.strerror}); send a complete "
            "MP4, MOV, WebM, MKV or AVI file"
        ) from error
    return VideoFrames(chosen.stacked(), fps)


@dataclass(frozen=True)
class _TimedFrame:
    """Seconds since the first frame, and seconds that it shows if none follows."""

    frame: av.VideoFrame
    time: Fraction
    duration: Fraction | None


class _ChosenFrames:
    """The frames taken so far, in RGB, within the limits."""

    def __init__(self, fps: float, *, max_pixels: int, max_frames: int, max_bytes: int) -> None:
        self._fps = fps
        self._max_pixels = max_pixels
        self._max_frames = max_frames
        self._max_bytes = max_bytes
        self._frames: list[NDArray[np.uint8]] = []  # a frame that shows for long is in it several times

    def add(self, frame: av.VideoFrame, count: int) -> None:
        """Take a frame `count` times.  Raises MediaTooLarge, before it is converted, and MediaError."""
        _check_size(frame.width, frame.height, self._max_pixels)
        total = len(self._frames) + count
        if total > self._max_frames:
            raise MediaTooLarge(
                f"the clip gives more than {self._max_frames} frames at {self._fps:g} per second, the limit; "
                "ask for a lower fps or send a shorter clip"
            )
        num_bytes = total * frame.width * frame.height * 3
        if num_bytes > self._max_bytes:
            raise MediaTooLarge(
                f"{total} frames of {frame.width} x {frame.height} pixels take {num_bytes:,} bytes, more "
                f"than the limit of {self._max_bytes:,}; ask for a lower fps or scale the clip down"
            )
        pixels = np.asarray(frame.to_ndarray(format="rgb24"), np.uint8)
        upright = np.rot90(pixels, k=round(frame.rotation / 90) % 4)  # both count counterclockwise
        if self._frames and upright.shape != self._frames[0].shape:
            height, width = self._frames[0].shape[:2]
            raise MediaError(
                f"the video's frames change from {width} x {height} to {upright.shape[1]} x "
                f"{upright.shape[0]} pixels; convert it to one size"
            )
        self._frames += [upright] * count

    def stacked(self) -> NDArray[np.uint8]:
        """[num_frames, height, width, 3].  Frees the frames as it copies them.  Raises MediaError if none."""
        if not self._frames:
            raise MediaError("the video has no frames (0 s of pictures); send a longer clip")
        stacked = np.empty((len(self._frames), *self._frames[0].shape), np.uint8)
        for index in reversed(range(len(stacked))):
            stacked[index] = self._frames.pop()
        return stacked


def _rate(fps: float) -> Fraction:
    if not math.isfinite(fps) or fps <= 0:
        raise MediaError(f"fps is {fps!r}, but must be a positive number of frames per second")
    return Fraction(fps)


def _open(data: bytes) -> av.container.InputContainer:
    options = {"format_whitelist": _DEMUXERS, "protocol_whitelist": "none"}
    return av.open(io.BytesIO(data), mode="r", options=options, metadata_errors="replace")


def _video_stream(container: av.container.InputContainer) -> av.VideoStream:
    """The first track of moving pictures.  Raises MediaError if there is none that can be decoded."""
    cover = av.stream.Disposition.attached_pic
    streams = [stream for stream in container.streams.video if not stream.disposition & cover]
    if not streams:
        raise MediaError(f"the file ({container.format.long_name}) has no pictures; send it as sound")
    if streams[0].codec_context is None:
        raise MediaError("the video's codec is unknown; convert it to H.264, VP9 or AV1")
    return streams[0]


def _check_size(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise MediaTooLarge(
            f"the video has frames of {width} x {height} = {width * height:,} pixels, more than the limit of "
            f"{max_pixels:,}; scale it down"
        )


def _check_length(data: bytes, max_seconds: float) -> None:
    """Refuse a clip by the times of its packets, before any is decoded.

    Raises MediaTooLarge for one that is too long, and MediaError if it is shorter than its header says.
    """
    longest = Fraction(max_seconds)
    with _open(data) as container:
        stream = _video_stream(container)
        frame_time = 1 / stream.average_rate if stream.average_rate else Fraction(0)
        promised = Fraction(container.duration or 0, av.time_base)
        all_packets, pictures, num_frames = _Span(), _Span(), 0
        for packet in container.demux():
            time = packet.dts if packet.pts is None else packet.pts
            if time is None or packet.time_base is None:
                continue  # the mark of a stream's end
            start, end = time * packet.time_base, (time + max(0, packet.duration or 0)) * packet.time_base
            if packet.stream is stream and end == start:
                end += frame_time
            all_packets.extend(start, end)
            if packet.stream is not stream:
                continue
            pictures.extend(start, end)
            num_frames += 1
            if num_frames > longest * MAX_SOURCE_RATE:
                raise MediaTooLarge(
                    f"the video has more than {num_frames - 1:,} frames, the limit; reduce its frame rate"
                )
    if pictures.length > longest:
        raise MediaTooLarge(
            f"the video lasts {float(pictures.length):.2f} s, more than the limit of {max_seconds:g} s; "
            "send a shorter clip"
        )
    there = max(all_packets.length, all_packets.end)  # some headers count from zero, whatever comes first
    if there < promised - max(Fraction(1, 4), promised / 50):
        raise MediaError(
            f"the video is cut short: its header promises {float(promised):.2f} s, only "
            f"{float(there):.2f} s are there; send the whole file"
        )


class _Span:
    """From the earliest to the latest of some times, in seconds."""

    def __init__(self) -> None:
        self._start: Fraction | None = None
        self.end = Fraction(0)

    @property
    def length(self) -> Fraction:
        return Fraction(0) if self._start is None else self.end - self._start

    def extend(self, start: Fraction, end: Fraction) -> None:
        self.end = end if self._start is None else max(self.end, end)
        self._start = start if self._start is None else min(self._start, start)


def _timed_frames(container: av.container.InputContainer, stream: av.VideoStream) -> Iterator[_TimedFrame]:
    """All frames in the order in which they show; one without a time follows its predecessor."""
    frame_time = 1 / stream.average_rate if stream.average_rate else None
    # AVI has times of decoding only, from which those of reordered frames cannot be told.
    is_reordered = container.format.name == "avi" and bool(stream.codec_context.has_b_frames)
    first_pts: int | None = None
    time = Fraction(0)
    frames: Iterator[av.VideoFrame] = container.decode(stream)
    for index, frame in enumerate(frames):
        duration = frame_time
        if is_reordered and frame_time is not None:
            time = index * frame_time
        elif frame.pts is not None and frame.time_base is not None:
            first_pts = frame.pts if first_pts is None else first_pts
            time = (frame.pts - first_pts) * frame.time_base
            duration = frame.duration * frame.time_base if frame.duration > 0 else frame_time
        elif index:
            time += frame_time or 0
        yield _TimedFrame(frame, time, duration)


def _choose(
    frames: Iterator[_TimedFrame], interval: Fraction, max_seconds: Fraction, chosen: _ChosenFrames
) -> None:
    """Take of `frames` as decode_video says.  interval: 1 / fps.  Raises MediaTooLarge and MediaError."""
    taken = 0
    shown: _TimedFrame | None = None

    def take_until(time: Fraction) -> None:
        """All moments at which `shown` shows.  time: when it stops."""
        nonlocal taken
        assert shown is not None
        if time > max_seconds:
            raise MediaTooLarge(
                f"the video is longer than the limit of {float(max_seconds):g} s; send a shorter clip"
            )
        early = min(time - shown.time, interval) / 2
        count = math.floor((time - early) / interval) + 1 - taken
        if count > 0:
            chosen.add(shown.frame, count)
            taken += count

    for frame in frames:
        if shown is not None and frame.time <= shown.time:
            continue  # out of order, as in damaged or joined files: no player shows it
        if shown is not None:
            take_until(frame.time)
        shown = frame
    if shown is not None:
        take_until(shown.time + (shown.duration or interval))
