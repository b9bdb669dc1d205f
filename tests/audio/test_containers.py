"""Every format there and back, streamed and whole, and every kind of broken file."""

from __future__ import annotations

import io
import struct
import wave
from fractions import Fraction

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from omnistage.audio.containers import CONTENT_TYPES, StreamEncoder, decode, encode, wav_header
from omnistage.audio.pcm import Pcm, float_to_int16
from omnistage.errors import InvalidRequest, MediaError, MediaTooLarge
from tests.encoders.video_files import smooth_frames, video_file

RATE = 22050
LOSSLESS = ("wav", "wav_f32", "flac")
FILES = tuple(name for name in CONTENT_TYPES if name != "pcm16")


def tone(seconds: float = 1.0, rate: int = RATE) -> NDArray[np.float32]:
    """Two sines that fade in and out."""
    time = np.arange(int(seconds * rate)) / rate
    fade = np.sin(np.pi * time / seconds)
    sound = fade * (0.4 * np.sin(2 * np.pi * 440 * time) + 0.1 * np.sin(2 * np.pi * 1000 * time))
    return sound.astype(np.float32)


def streamed(audio_format: str, samples: NDArray[np.float32], size: int = 2205) -> bytes:
    encoder = StreamEncoder(audio_format, RATE)
    pieces = [encoder.push(samples[start : start + size]) for start in range(0, len(samples), size)]
    return b"".join([*pieces, encoder.close()])


def likeness(decoded: Pcm, samples: NDArray[np.float32]) -> float:
    """The best correlation with the original over a codec's possible delays, 1.0 if equal."""
    time = np.arange(int(len(samples) * decoded.sample_rate / RATE)) / decoded.sample_rate
    original = np.interp(time, np.arange(len(samples)) / RATE, samples)
    size = 2 ** int(np.ceil(np.log2(len(original) + len(decoded.samples))))
    spectrum = np.fft.rfft(decoded.samples, size) * np.conj(np.fft.rfft(original, size))
    norms = np.linalg.norm(original) * np.linalg.norm(decoded.samples)
    return float(np.abs(np.fft.irfft(spectrum, size)).max() / norms)


@pytest.mark.parametrize("audio_format", FILES)
@pytest.mark.parametrize("way", ["whole", "streamed"])
def test_there_and_back(audio_format: str, way: str) -> None:
    samples = tone()
    pcm = Pcm(samples, RATE)
    decoded = decode(
        encode(pcm, audio_format) if way == "whole" else streamed(audio_format, samples), max_seconds=5
    )
    assert decoded.samples.dtype == np.float32
    assert decoded.sample_rate == (48_000 if audio_format == "opus" else RATE)
    assert abs(decoded.duration - pcm.duration) < 0.15
    assert likeness(decoded, samples) > 0.99
    if audio_format in LOSSLESS:
        tolerance = 0.0 if audio_format == "wav_f32" else 1 / 32768
        assert np.abs(decoded.samples - samples).max() <= tolerance


@pytest.mark.parametrize("audio_format", ["wav", "wav_f32", "pcm16", "flac"])
@given(sizes=st.lists(st.integers(1, 4000), min_size=1, max_size=5))
@settings(max_examples=15, deadline=None)
def test_streams_do_not_depend_on_their_pieces(audio_format: str, sizes: list[int]) -> None:
    samples = tone(0.5)
    encoder, start, pieces, turn = StreamEncoder(audio_format, RATE), 0, [], 0
    while start < len(samples):
        end = start + sizes[turn % len(sizes)]
        pieces.append(encoder.push(samples[start:end]))
        start, turn = end, turn + 1
    pieces.append(encoder.close())
    if audio_format == "flac":  # its STREAMINFO aside, frames may be cut differently
        assert np.array_equal(
            decode(b"".join(pieces), max_seconds=5).samples,
            decode(encode(Pcm(samples, RATE), "flac"), max_seconds=5).samples,
        )
    else:
        assert b"".join(pieces) == streamed(audio_format, samples)


@pytest.mark.parametrize("audio_format", [name for name in CONTENT_TYPES if name != "flac"])
def test_bytes_flow_while_sound_is_made(audio_format: str) -> None:
    encoder = StreamEncoder(audio_format, RATE)
    sizes = [len(encoder.push(tone(0.2))) for _ in range(10)]
    assert all(sizes[1:])
    assert max(sizes[1:]) < 3 * min(sizes[1:])
    encoder.close()


def test_flac_flows_by_frames() -> None:
    encoder = StreamEncoder("flac", RATE)
    assert sum(bool(encoder.push(tone(0.2))) for _ in range(10)) >= 8  # 4608 samples a frame
    encoder.close()


def test_a_stream_is_like_the_whole() -> None:
    for audio_format in FILES:
        assert abs(len(streamed(audio_format, tone())) - len(encode(Pcm(tone(), RATE), audio_format))) < 3000


@pytest.mark.parametrize("audio_format", ["wav", "wav_f32", "pcm16", "flac"])
def test_no_sound_at_all(audio_format: str) -> None:
    nothing = np.zeros(0, np.float32)
    for data in (encode(Pcm(nothing, RATE), audio_format), streamed(audio_format, nothing)):
        if audio_format == "pcm16":
            assert data == b""
        else:
            with pytest.raises(MediaError, match="no samples"):
                decode(data, max_seconds=5)


def test_wav_headers() -> None:
    whole = encode(Pcm(tone(), RATE), "wav")
    with wave.open(io.BytesIO(whole)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (RATE, 1, 2)
        assert file.getnframes() == len(tone())
        assert file.readframes(RATE) == float_to_int16(tone()).tobytes()
    header = wav_header(RATE, num_bytes=None)
    assert len(header) == 44
    assert struct.unpack_from("<I", header, 4) == struct.unpack_from("<I", header, 40) == (0xFFFFFFFF,)
    assert encode(Pcm(tone(), RATE), "pcm16") == whole[44:]


@pytest.mark.parametrize("rate", [8000, 11025, 16000, 24000, 44100, 48000, 37000])
@pytest.mark.parametrize("audio_format", ["mp3", "opus", "aac", "flac"])
def test_any_rate_is_encoded(audio_format: str, rate: int) -> None:
    data = encode(Pcm(tone(0.4, rate), rate), audio_format)
    assert abs(decode(data, max_seconds=5).duration - 0.4) < 0.05 + 2048 / rate  # codecs work by frames


def test_unknown_formats_are_refused_with_the_known_ones() -> None:
    for act in (lambda: encode(Pcm(tone(), RATE), "wma"), lambda: StreamEncoder("wma", RATE)):
        with pytest.raises(InvalidRequest, match=r"'wma'.*wav, .*opus"):
            act()


# --- files of others -----------------------------------------------------------------------


def container(
    muxer: str,
    codec: str,
    *,
    layout: str = "stereo",
    rate: int = 48000,
    sound: NDArray[np.float32] | None = None,
) -> bytes:
    """A file as some other program would write it.  sound: [channels, num_samples]."""
    if sound is None:
        sound = np.stack([tone(1.0, rate)] * (2 if layout == "stereo" else 1))
    sink = io.BytesIO()
    with av.open(sink, mode="w", format=muxer) as output:
        stream = output.add_stream(codec, rate=rate)
        stream.codec_context.layout = layout
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(sound), format="fltp", layout=layout)
        frame.sample_rate, frame.time_base, frame.pts = rate, Fraction(1, rate), 0
        output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return sink.getvalue()


@pytest.mark.parametrize(
    ("muxer", "codec"),
    [
        ("wav", "pcm_s16le"),
        ("wav", "pcm_u8"),
        ("wav", "pcm_s24le"),
        ("mp3", "libmp3lame"),
        ("flac", "flac"),
        ("ogg", "libopus"),
        ("ipod", "aac"),
        ("mp4", "aac"),
        ("webm", "libopus"),
        ("matroska", "flac"),
        ("aiff", "pcm_s16be"),
    ],
)
@pytest.mark.parametrize("layout", ["mono", "stereo"])
def test_common_containers_are_read(muxer: str, codec: str, layout: str) -> None:
    decoded = decode(container(muxer, codec, layout=layout), max_seconds=5)
    assert decoded.sample_rate == 48000
    assert abs(decoded.duration - 1.0) < 0.1
    reference = Pcm(tone(1.0, 48000), 48000)
    assert (
        likeness(decoded, np.interp(np.arange(RATE) / RATE, np.arange(48000) / 48000, reference.samples))
        > 0.98
    )
    assert 0.4 < np.abs(decoded.samples).max() < 0.6  # averaged, not added


def test_stereo_is_averaged() -> None:
    left, right = tone(0.5, 48000), np.zeros(24000, np.float32)
    decoded = decode(container("wav", "pcm_f32le", sound=np.stack([left, right])), max_seconds=5)
    assert np.abs(decoded.samples - left / 2).max() < 1e-6


def test_loud_float_files_are_clipped() -> None:
    data = encode(Pcm(4 * tone(), RATE), "wav_f32")
    decoded = decode(data, max_seconds=5).samples
    assert decoded.max() == 1.0
    assert decoded.min() == -1.0


def video_only() -> bytes:
    sink = io.BytesIO()
    with av.open(sink, mode="w", format="mp4") as output:
        stream = output.add_stream("mpeg4", rate=25)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        frame = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")
        output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return sink.getvalue()


def wav(rate: int, body: bytes) -> bytes:
    return wav_header(rate, num_bytes=len(body)) + body


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", r"empty \(0 bytes\)"),
        (b"hello, this is text and no sound at all", "not a sound file"),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), "not a sound file"),
        (encode(Pcm(tone(), RATE), "wav")[:30], "not a sound file"),
        (wav(RATE, b""), r"no samples \(0 s"),
        (encode(Pcm(tone(), RATE), "wav")[:20000], r"cut short: its header promises 1\.00 s, only 0\.45 s"),
        (encode(Pcm(tone(), RATE), "mp3")[:3000], "cut short"),
        (container("mp4", "aac")[:3000], "not a sound file"),
        (wav(1, bytes(4000)), "sample rate of 1 Hz.*4000"),
        (wav(2_000_000_000, bytes(4000)), "sample rate of 2000000000 Hz|not a sound file"),
        (encode(Pcm(np.full(4000, np.nan, np.float32), RATE), "wav_f32"), "not finite"),
        (b"#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile:///etc/passwd\n", "not a sound file"),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", "not a sound file"),
    ],
)
def test_broken_files_are_refused_by_name(data: bytes, fault: str) -> None:
    with pytest.raises(MediaError, match=fault):
        decode(data, max_seconds=5)


def test_video_without_sound_is_refused() -> None:
    with pytest.raises(MediaError, match=r"has no sound track; .* leave out use_audio_in_video, which needs"):
        decode(video_only(), max_seconds=5)


@pytest.mark.parametrize(
    ("muxer", "codec", "sound_codec"),
    [
        ("mp4", "libx264", "aac"),
        ("mov", "libx264", "aac"),
        ("matroska", "libx264", "flac"),
        ("webm", "libvpx-vp9", "libopus"),
        ("avi", "mpeg4", "pcm_s16le"),
        ("avi", "mpeg4", "libmp3lame"),
        ("flv", "flv", "aac"),
        ("mpeg", "mpeg2video", "mp2"),
        ("mpegts", "libx264", "aac"),
        ("asf", "wmv2", "libmp3lame"),
    ],
)
def test_the_sound_track_of_a_video(muxer: str, codec: str, sound_codec: str) -> None:
    sound = tone(1.0, 16_000)
    data = video_file(
        smooth_frames(25), muxer=muxer, codec=codec, pix_fmt="yuv420p", sound=sound, sound_codec=sound_codec
    )
    decoded = decode(data, max_seconds=5)
    assert abs(decoded.duration - 1.0) < 0.15
    assert likeness(decoded, np.interp(np.arange(RATE) / RATE, np.arange(16_000) / 16_000, sound)) > 0.98


@pytest.mark.parametrize("audio_format", ["wav", "mp3", "opus"])
def test_too_long_is_another_error(audio_format: str) -> None:
    data = encode(Pcm(tone(2.0), RATE), audio_format)
    assert decode(data, max_seconds=2.2).duration > 1.9
    with pytest.raises(MediaTooLarge, match=r"longer than the limit of 1\.5 s"):
        decode(data, max_seconds=1.5)


@pytest.mark.parametrize("audio_format", ["mp3", "opus", "aac"])
@pytest.mark.parametrize("num_samples", [0, 1, 200])
def test_next_to_nothing_is_a_playable_file(audio_format: str, num_samples: int) -> None:
    silence = np.zeros(num_samples, np.float32)
    encoder = StreamEncoder(audio_format, RATE)
    for data in (encode(Pcm(silence, RATE), audio_format), encoder.push(silence) + encoder.close()):
        pcm = decode(data, max_seconds=1)
        assert 0.015 < pcm.duration < 0.2
        assert np.abs(pcm.samples).max() < 1e-3


def test_a_guessed_length_is_not_taken_for_a_promise() -> None:
    """ADTS has no header: FFmpeg guesses from the quiet beginning's bit rate, which is too long."""
    noise = np.random.default_rng(0).normal(0, 0.3, 15 * 16_000).astype(np.float32).clip(-1, 1)
    noise[: 10 * 16_000] *= 1e-4
    data = container("adts", "aac", layout="mono", rate=16_000, sound=noise[None])
    with av.open(io.BytesIO(data)) as file:
        stream = file.streams.audio[0]
        assert float(stream.duration * stream.time_base) > 15.6
    assert decode(data, max_seconds=20).duration == pytest.approx(15, abs=0.2)


def test_a_stream_header_is_not_taken_for_a_cut_file() -> None:
    assert decode(streamed("wav", tone()), max_seconds=5).duration == pytest.approx(1.0)


@pytest.mark.parametrize("num_channels", [3, 6, 7, 8, 9, 16, 64])
def test_many_channels_are_averaged(num_channels: int) -> None:
    """PyAV's planar conversion ends the whole process from 8 channels on."""
    levels = np.linspace(-0.5, 0.4, num_channels, dtype=np.float32)
    samples = np.tile(levels, (2000, 1))
    data = wav_header(8000, num_bytes=samples.nbytes, is_float=True)
    position = data.index(b"fmt ") + 10
    data = bytearray(data)
    data[position : position + 2] = num_channels.to_bytes(2, "little")
    data[position + 6 : position + 10] = (8000 * num_channels * 4).to_bytes(4, "little")
    data[position + 10 : position + 12] = (num_channels * 4).to_bytes(2, "little")
    pcm = decode(bytes(data) + samples.tobytes(), max_seconds=5)
    assert len(pcm.samples) == 2000
    np.testing.assert_allclose(pcm.samples, levels.mean(), atol=1e-6)


def test_rates_nobody_hears_are_brought_down() -> None:
    pcm = decode(encode(Pcm(tone(0.5, rate=192_000), 192_000), "flac"), max_seconds=5)
    assert pcm.sample_rate == 48_000
    assert pcm.duration == pytest.approx(0.5, abs=0.01)


def test_samples_that_are_no_numbers_are_refused() -> None:
    data = bytearray(encode(Pcm(tone(0.3), RATE), "wav_f32"))
    data[-4:] = b"\0\0\xc0\x7f"  # NaN, as IEEE 754 writes it
    with pytest.raises(MediaError, match="not finite"):
        decode(bytes(data), max_seconds=5)


@pytest.mark.parametrize("audio_format", FILES)
@given(damage=st.data())
@settings(max_examples=25, deadline=None)
def test_damaged_files_never_raise_anything_else(audio_format: str, damage: st.DataObject) -> None:
    data = bytearray(encode(Pcm(tone(0.3), RATE), audio_format))
    for _ in range(damage.draw(st.integers(1, 12))):
        data[damage.draw(st.integers(0, len(data) - 1))] = damage.draw(st.integers(0, 255))
    cut = damage.draw(st.integers(0, len(data)))
    for broken in (bytes(data), bytes(data[:cut])):
        try:
            decoded = decode(broken, max_seconds=5)
        except (MediaError, MediaTooLarge):
            continue
        assert np.isfinite(decoded.samples).all()
        assert np.abs(decoded.samples).max() <= 1.0
