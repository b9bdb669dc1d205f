"""Which frames of a clip are taken, in every container, and clips that cannot be used."""

from __future__ import annotations

import contextlib
import io
import itertools
import tracemalloc
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from omnistage.audio.containers import encode, wav_header
from omnistage.audio.pcm import Pcm
from omnistage.encoders.video import decode_video
from omnistage.errors import MediaError, MediaTooLarge
from tests.encoders.video_files import frames_of, jpeg_video, noise_frames, smooth_frames, video_file

NTSC = Fraction(30000, 1001)
FILM = Fraction(24000, 1001)
TONE = (0.3 * np.sin(np.arange(16_000) / 7)).astype(np.float32)


def taken(data: bytes, fps: float, max_seconds: float = 60.0) -> np.ndarray:
    video = decode_video(data, fps=fps, max_seconds=max_seconds)
    assert video.fps == fps
    assert video.frames.dtype == np.uint8
    return video.frames


def indices(data: bytes, frames: np.ndarray, fps: float) -> list[int]:
    """Which of `frames` are taken of a lossless clip."""
    return [
        next(index for index, own in enumerate(frames) if np.array_equal(own, pixels))
        for pixels in taken(data, fps)
    ]


# --- which frames


@pytest.mark.parametrize("rate", [1, 2, 15, 24, 25, 30, 50, 60, NTSC, FILM])
@pytest.mark.parametrize(
    ("muxer", "codec", "pix_fmt"),
    [("avi", "rawvideo", "bgr24"), ("avi", "ffv1", "bgr0"), ("matroska", "ffv1", "bgr0")],
)
def test_a_clip_at_its_own_rate_is_its_own_frames(
    muxer: str, codec: str, pix_fmt: str, rate: int | Fraction
) -> None:
    """Matroska rounds times to milliseconds, which must neither double nor drop a frame."""
    frames = noise_frames(100)
    data = video_file(frames, rate, muxer=muxer, codec=codec, pix_fmt=pix_fmt)
    assert np.array_equal(taken(data, float(rate), 101), frames)
    assert np.array_equal(taken(data, round(float(rate), 2), 101), frames)  # as people write it: 29.97


CONTAINERS = [
    ("mp4", "libx264"),
    ("mov", "libx264"),
    ("avi", "libx264"),  # reordered frames without times of presentation
    ("matroska", "libx264"),
    ("mpegts", "libx264"),
    ("webm", "libvpx-vp9"),
    ("avi", "mpeg4"),
    ("mp4", "mpeg4"),
    ("flv", "flv"),
    ("asf", "wmv2"),
    ("mpeg", "mpeg2video"),
]


@pytest.mark.parametrize(
    ("muxer", "codec", "rate"),
    [
        (*kind, rate)
        for kind in CONTAINERS
        for rate in (2, 24, 25, 30, NTSC)
        if kind[0] != "mpeg" or rate != 2
    ],
)
def test_every_common_container(muxer: str, codec: str, rate: int | Fraction) -> None:
    frames = smooth_frames(23)
    data = video_file(frames, rate, muxer=muxer, codec=codec, pix_fmt="yuv420p")
    own = taken(data, float(rate))
    assert np.array_equal(own, frames_of(data))
    assert np.abs(own.astype(int) - frames).mean() < 8  # in order


def test_a_faster_clip_gives_the_nearest_frames() -> None:
    frames = noise_frames(75)
    data = video_file(frames, 30)
    assert indices(data, frames, 2.0) == [0, 15, 30, 45, 60]
    assert indices(data, frames, 1.0) == [0, 30, 60]
    assert indices(data, frames, 7.0) == [round(30 * k / 7) for k in range(18)]
    assert len(taken(video_file(noise_frames(60), 30), 2.0)) == 4  # two seconds, not a frame of the third


def test_a_slower_clip_repeats_frames() -> None:
    frames = noise_frames(3)
    assert indices(video_file(frames, 1), frames, 2.0) == [0, 0, 1, 1, 2, 2]
    assert indices(video_file(frames, 2), frames, 5.0) == [0, 0, 0, 1, 1, 2, 2, 2]


def test_a_frame_shows_until_the_next_one() -> None:
    """Slides of a variable rate: nothing shows long before its time, however near it is."""
    frames = noise_frames(4)
    data = video_file(frames, 25, milliseconds=[0, 4000, 4040, 6000])
    assert indices(data, frames, 1.0) == [0, 0, 0, 0, 1, 2, 3]
    assert indices(data, frames, 2.0) == [0] * 8 + [1] + [2] * 3 + [3]


@settings(max_examples=60, deadline=None)
@given(
    gaps=st.lists(st.integers(1, 900), min_size=0, max_size=8),
    fps=st.sampled_from([0.5, 1.0, 2.0, 3.0, 7.5, 25.0, 1000 / 60]),
)
def test_any_times(gaps: list[int], fps: float) -> None:
    """The rule of the docstring, moment by moment."""
    times = [0, *np.cumsum(gaps).tolist()]
    frames = noise_frames(len(times), seed=len(times))
    data = video_file(frames, 25, milliseconds=times)
    with av.open(io.BytesIO(data)) as container:
        decoded = list(container.decode(video=0))
    starts = [Fraction(frame.pts, 1000) for frame in decoded]
    starts.append(starts[-1] + Fraction(decoded[-1].duration, 1000))
    interval = 1 / Fraction(fps)
    from_when = [Fraction(0)]
    from_when += [after - min(after - before, interval) / 2 for before, after in itertools.pairwise(starts)]
    expected, moment = [], Fraction(0)
    while moment <= from_when[-1]:
        expected.append(max(index for index, start in enumerate(from_when) if start < moment or index == 0))
        moment += interval
    assert indices(data, frames, fps) == expected
    assert expected[0] == 0


def test_a_clip_shorter_than_one_interval_gives_its_first_frame() -> None:
    frames = noise_frames(3)
    assert np.array_equal(taken(video_file(frames, 30), 2.0), frames[:1])
    assert np.array_equal(taken(video_file(frames[:1], 30), 0.001), frames[:1])


def test_time_starts_with_the_first_frame() -> None:
    frames = noise_frames(4)
    data = video_file(frames, 2, milliseconds=[7000, 7500, 8000, 8500])
    assert np.array_equal(taken(data, 2.0, 2.5), frames)


@pytest.mark.parametrize("rotation", [90, 180, -90])
def test_frames_are_turned_upright(rotation: int) -> None:
    """rotation: degrees counterclockwise, which a phone's file asks of the player."""
    frames = smooth_frames(4, 32, 64)
    data = video_file(frames, muxer="mp4", codec="libx264", pix_fmt="yuv420p", rotation=rotation)
    expected = np.rot90(frames_of(data), rotation // 90, axes=(1, 2))
    assert np.array_equal(taken(data, 25.0), expected)
    assert expected.shape[1:3] == ((32, 64) if rotation == 180 else (64, 32))


def test_a_portrait_recording_of_a_phone() -> None:
    """The matrix that a phone writes when the sensor's left edge is up: shown a quarter turn clockwise."""
    frames = np.zeros((3, 32, 64, 3), np.uint8)
    frames[:, :8, :8] = 255
    data = bytearray(video_file(frames, muxer="mp4", codec="libx264", pix_fmt="yuv420p"))
    place = data.index(b"tkhd") + 44
    matrix = np.array([0, 1 << 16, 0, -1 << 16, 0, 0, 0, 0, 1 << 30], ">i4")
    data[place : place + 36] = matrix.tobytes()
    first = taken(bytes(data), 25.0)[0]
    assert first.shape == (64, 32, 3)
    corners = {name: first[y, x].mean() for name, y, x in (("top right", 2, -3), ("top left", 2, 2))}
    assert corners["top right"] > 200
    assert corners["top left"] < 50


def test_only_chosen_frames_are_converted() -> None:
    frames = np.repeat(smooth_frames(20, 144, 192), 20, axis=0)
    data = video_file(frames, 100, codec="libx264", pix_fmt="yuv420p", options={"preset": "ultrafast"})
    tracemalloc.start()
    try:
        chosen = taken(data, 2.0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(chosen) == 8
    assert peak < 3 * chosen.nbytes < frames.nbytes / 10


# --- limits


def test_a_clip_that_is_too_long() -> None:
    data = video_file(noise_frames(50), 25)
    assert len(taken(data, 2.0, 2.0)) == 4
    with pytest.raises(MediaTooLarge, match=r"lasts 2\.00 s, more than the limit of 1\.9 s"):
        taken(data, 2.0, 1.9)


def test_a_last_frame_that_shows_for_hours() -> None:
    data = video_file(noise_frames(2), 25, milliseconds=[0, 4_000_000])
    with pytest.raises(MediaTooLarge, match=r"lasts 4000\.\d\d s, more than the limit of 600 s"):
        taken(data, 1.0, 600)


def test_too_many_frames_and_bytes() -> None:
    data = video_file(noise_frames(50), 25)
    size = 24 * 16 * 3
    allowed = {"max_seconds": 60, "max_frames": 50, "max_bytes": 50 * size, "max_pixels": 24 * 16}
    assert len(decode_video(data, fps=25, **allowed).frames) == 50
    with pytest.raises(
        MediaTooLarge, match="more than 49 frames at 25 per second, the limit; ask for a lower"
    ):
        decode_video(data, fps=25, **{**allowed, "max_frames": 49})
    with pytest.raises(
        MediaTooLarge, match=r"50 frames of 24 x 16 pixels take 57,600 bytes, more than .*57,599"
    ):
        decode_video(data, fps=25, **{**allowed, "max_bytes": 50 * size - 1})
    with pytest.raises(
        MediaTooLarge, match=r"24 x 16 = 384 pixels, more than the limit of 383; scale it down"
    ):
        decode_video(data, fps=25, **{**allowed, "max_pixels": 383})
    with pytest.raises(MediaTooLarge, match="more than 1200 frames at 1e\\+06 per second"):
        decode_video(data, fps=1e6, max_seconds=60)


def test_a_rate_that_nothing_records() -> None:
    times = list(range(1, 1101))
    data = video_file(noise_frames(1100, 2, 2), 25, milliseconds=times)
    assert len(taken(data, 1.0, 1.2)) == 2
    with pytest.raises(MediaTooLarge, match="more than 1,000 frames, the limit"):
        taken(
            video_file(noise_frames(1100, 2, 2), 50_000, muxer="mp4", codec="mpeg4", pix_fmt="yuv420p"),
            1.0,
            1.0,
        )


def test_frames_that_grow_midway() -> None:
    """The decoder itself refuses before it takes the memory."""
    data = jpeg_video([(64, 48)] * 2 + [(640, 480)])
    with pytest.raises((MediaError, MediaTooLarge)):
        decode_video(data, fps=10, max_seconds=60, max_pixels=64 * 48)


@pytest.mark.parametrize("fps", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_must_be_positive(fps: float) -> None:
    with pytest.raises(MediaError, match="but must be a positive number"):
        decode_video(video_file(noise_frames(2)), fps=fps, max_seconds=60)


# --- files that cannot be used


def with_duration(data: bytes, seconds: float) -> bytes:
    """A Matroska file whose header says another duration."""
    changed = bytearray(data)
    place = changed.index(b"\x44\x89\x88") + 3  # the element, with 8 bytes
    changed[place : place + 8] = np.array([seconds * 1000], ">f8").tobytes()
    return bytes(changed)


def with_cover() -> bytes:
    """Sound with a picture of its cover."""
    cover = io.BytesIO()
    Image.new("RGB", (16, 16), (90, 20, 10)).save(cover, "JPEG")
    sink = io.BytesIO()
    with av.open(sink, mode="w", format="mp4") as output:
        track = output.add_stream("aac", rate=16_000)
        track.codec_context.layout = "mono"
        picture = output.add_stream("mjpeg", rate=1)
        picture.width = picture.height = 16
        picture.pix_fmt = "yuvj420p"
        picture.disposition = av.stream.Disposition.attached_pic
        frame = av.AudioFrame.from_ndarray(TONE[None], format="fltp", layout="mono")
        frame.sample_rate = 16_000
        packet = av.Packet(cover.getvalue())
        packet.stream, packet.pts, packet.dts, packet.time_base = picture, 0, 0, Fraction(1, 1000)
        output.mux(packet)
        output.mux(track.encode(frame))
        output.mux(track.encode(None))
    return sink.getvalue()


def no_frames() -> bytes:
    sink = io.BytesIO()
    with av.open(sink, mode="w", format="matroska") as output:
        stream = output.add_stream("ffv1", rate=25)
        stream.width, stream.height, stream.pix_fmt = 24, 16, "bgr0"
        output.start_encoding()
    return sink.getvalue()


WHOLE = video_file(noise_frames(50), 25)
WHOLE_MP4 = video_file(
    smooth_frames(60), 25, muxer="mp4", codec="libx264", pix_fmt="yuv420p", options={"movflags": "faststart"}
)


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", r"empty \(0 bytes\)"),
        (b"hello, this is text and no video at all", "not a video that can be read"),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), "not a video that can be read"),
        (wav_header(16_000, num_bytes=None) + bytes(9000), "not a video that can be read"),
        (encode(Pcm(TONE, 16_000), "opus"), "has no pictures; send it as sound"),
        (with_cover(), "has no pictures; send it as sound"),
        (no_frames(), r"no frames \(0 s|not a video that can be read"),
        (WHOLE[:40], "not a video that can be read"),
        (WHOLE[: len(WHOLE) // 2], r"cut short: its header promises 2\.00 s, only [01]\.\d\d s"),
        (WHOLE_MP4[: len(WHOLE_MP4) // 2], "not a video that can be read|cut short"),
        (with_duration(WHOLE, 360_000.0), r"cut short: its header promises 360000\.00 s, only 2\.00 s"),
        (jpeg_video([(64, 48), (64, 48), (48, 64)]), "change from 64 x 48 to 48 x 64 pixels"),
        (
            b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile:///etc/passwd\n",
            "not a video that can be read",
        ),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "not a video that can be read"),
    ],
    ids=[
        *("empty", "text", "png", "wav", "opus", "cover", "no frames", "header only", "half mkv", "half mp4"),
        *("long header", "two sizes", "playlist", "script"),
    ],
)
def test_what_is_no_whole_video_is_refused(data: bytes, fault: str) -> None:
    with pytest.raises(MediaError, match=fault):
        taken(data, 25.0)


@pytest.mark.parametrize(
    "data", [WHOLE, WHOLE[: len(WHOLE) // 2], with_cover()], ids=["whole", "half", "cover"]
)
def test_files_are_closed(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    def watched(*args: Any, **kwargs: Any) -> Any:
        opened.append(av.open(*args, **kwargs))
        return opened[-1]

    monkeypatch.setattr("omnistage.encoders.video.av", SimpleNamespace(**{**vars(av), "open": watched}))
    with contextlib.suppress(MediaError):
        taken(data, 25.0)
    assert opened
    for container in opened:
        with pytest.raises(AssertionError, match="not open"):
            next(container.demux())


@pytest.mark.parametrize(
    ("muxer", "codec"),
    [("matroska", "libx264"), ("mp4", "libx264"), ("avi", "mpeg4"), ("webm", "libvpx-vp9")],
)
@given(damage=st.data())
@settings(max_examples=25, deadline=None)
def test_damaged_files_never_raise_anything_else(muxer: str, codec: str, damage: st.DataObject) -> None:
    data = bytearray(video_file(smooth_frames(12), 25, muxer=muxer, codec=codec, pix_fmt="yuv420p"))
    for _ in range(damage.draw(st.integers(1, 12))):
        data[damage.draw(st.integers(0, len(data) - 1))] = damage.draw(st.integers(0, 255))
    cut = damage.draw(st.integers(0, len(data)))
    for broken in (bytes(data), bytes(data[:cut])):
        try:
            video = decode_video(broken, fps=10.0, max_seconds=60)
        except (MediaError, MediaTooLarge):
            continue
        assert video.frames.ndim == 4
        assert len(video.frames) >= 1
