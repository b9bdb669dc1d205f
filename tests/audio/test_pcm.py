from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnistage.audio.pcm import Pcm, float_to_int16, int16_to_float, pcm16_bytes, resample


def sine(frequency: float, sample_rate: int, seconds: float = 0.5) -> Pcm:
    time = np.arange(int(seconds * sample_rate)) / sample_rate
    return Pcm((0.5 * np.sin(2 * np.pi * frequency * time)).astype(np.float32), sample_rate)


@given(st.lists(st.integers(-32768, 32767), max_size=50))
def test_int16_survives_the_way_to_float_and_back(values: list[int]) -> None:
    integers = np.array(values, dtype=np.int16)
    floats = int16_to_float(integers)
    assert floats.dtype == np.float32
    assert np.array_equal(float_to_int16(floats), integers)


def test_loud_samples_are_clipped() -> None:
    samples = np.array([-2.0, -1.0, 0.0, 1.0, 2.0], np.float32)
    assert float_to_int16(samples).tolist() == [-32768, -32768, 0, 32767, 32767]


def test_bytes_are_little_endian() -> None:
    assert pcm16_bytes(np.array([1 / 32768, -1.0], np.float32)) == b"\x01\x00\x00\x80"


@pytest.mark.parametrize(("source", "target"), [(22050, 16000), (44100, 16000), (8000, 16000)])
def test_resample_keeps_the_sound(source: int, target: int) -> None:
    resampled = resample(sine(440, source), target)
    expected = sine(440, target).samples
    assert resampled.sample_rate == target
    assert abs(len(resampled.samples) - len(expected)) <= 1
    inner = slice(200, -200)  # the filter rings at the ends
    assert np.abs(resampled.samples[: len(expected)][inner] - expected[inner]).max() < 5e-3


def test_resample_to_the_same_rate_is_free() -> None:
    pcm = sine(440, 16000)
    assert resample(pcm, 16000).samples is pcm.samples
    assert len(resample(Pcm(np.zeros(0, np.float32), 22050), 16000).samples) == 0


def test_duration() -> None:
    assert Pcm(np.zeros(11025, np.float32), 22050).duration == 0.5


def test_the_package_imports_no_torch() -> None:
    code = (
        "import sys; from omnistage.audio import pcm, containers, sentences, player; "
        "print([name for name in ('torch', 'torchaudio') if name in sys.modules])"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == "[]"
