"""Sound as numbers: float32 mono samples with their rate, and conversions.

Imports no torch; resample() does, when called, so only worker processes should call it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

INT16_SCALE = 32768.0  # int16 full scale; -32768 is -1.0


@dataclass(frozen=True, eq=False)
class Pcm:
    """samples: [num_samples], float32, mono, in [-1, 1].  sample_rate: Hz."""

    samples: NDArray[np.float32]
    sample_rate: int

    @property
    def duration(self) -> float:
        """Seconds."""
        return len(self.samples) / self.sample_rate


def float_to_int16(samples: NDArray[np.float32]) -> NDArray[np.int16]:
    """[n] float32 in [-1, 1] to int16, rounded to nearest; values beyond the range are clipped."""
    scaled = np.rint(np.asarray(samples, dtype=np.float32) * INT16_SCALE)
    clipped: NDArray[np.int16] = np.clip(scaled, -32768, 32767).astype(np.int16)
    return clipped


def int16_to_float(samples: NDArray[np.int16]) -> NDArray[np.float32]:
    """[n] int16 to float32 in [-1, 1); float_to_int16 gives the same int16 again."""
    return samples.astype(np.float32) / np.float32(INT16_SCALE)


def pcm16_bytes(samples: NDArray[np.float32]) -> bytes:
    """[n] float32 to little-endian signed 16-bit bytes."""
    return float_to_int16(samples).astype("<i2").tobytes()


def resample(pcm: Pcm, sample_rate: int) -> Pcm:
    """The same sound at another rate, by torchaudio's windowed-sinc filter.

    The result has ceil(num_samples * sample_rate / pcm.sample_rate) samples, clipped to [-1, 1].
    """
    if pcm.sample_rate == sample_rate or not len(pcm.samples):
        return Pcm(pcm.samples, sample_rate)
    import torch
    import torchaudio.functional

    with torch.inference_mode():
        source = torch.from_numpy(np.ascontiguousarray(pcm.samples, dtype=np.float32))
        resampled = torchaudio.functional.resample(source, pcm.sample_rate, sample_rate).clamp(-1.0, 1.0)
    samples: NDArray[np.float32] = resampled.numpy()
    return Pcm(samples, sample_rate)
