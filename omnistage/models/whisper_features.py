"""Sound to Whisper's log-mel windows: cutting long audio at quiet points, and the features.

Knows nothing of the network.  Features follow "Robust Speech Recognition via Large-Scale Weak
Supervision" (arXiv 2212.04356, section 2.2) and equal transformers' WhisperFeatureExtractor.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SAMPLE_RATE = 16_000  # Hz
WINDOW_SAMPLES = 30 * SAMPLE_RATE
NUM_FFT, HOP = 400, 160  # samples
MIN_CUT_SAMPLES = 20 * SAMPLE_RATE  # a cut lies in the last ten seconds of its window
FRAME_SAMPLES = SAMPLE_RATE // 20
SMOOTHED_FRAMES = 5

# Slaney's mel scale: linear below 1000 Hz (66.7 Hz a mel), logarithmic above.
MEL_BREAK_HZ, MEL_BREAK, MEL_LOG_STEP = 1000.0, 15.0, math.log(6.4) / 27.0


def split_windows(samples: NDArray[np.float32]) -> list[NDArray[np.float32]]:
    """Cut sound into pieces of at most 30 s, each but the last ending at a quiet point.

    samples: [num_samples], 16 kHz.  The quiet point is the least energy over a quarter of a second
    between the 20th and the 30th second of a piece.  The pieces are views and lose no sample.
    """
    pieces = []
    start = 0
    while len(samples) - start > WINDOW_SAMPLES:
        region = samples[start + MIN_CUT_SAMPLES : start + WINDOW_SAMPLES].astype(np.float64)
        energy = np.square(region).reshape(-1, FRAME_SAMPLES).sum(1)
        smoothed = np.convolve(energy, np.ones(SMOOTHED_FRAMES), mode="valid")
        middle = int(smoothed.argmin()) * FRAME_SAMPLES + SMOOTHED_FRAMES * FRAME_SAMPLES // 2
        end = start + MIN_CUT_SAMPLES + middle
        pieces.append(samples[start:end])
        start = end
    pieces.append(samples[start:])
    return pieces


def mel_filters(num_mels: int) -> Tensor:
    """Triangular filters [num_mels, NUM_FFT / 2 + 1], float32, 0 to 8000 Hz, each of unit area."""
    frequencies = np.linspace(0, SAMPLE_RATE / 2, NUM_FFT // 2 + 1)
    top = MEL_BREAK + math.log(SAMPLE_RATE / 2 / MEL_BREAK_HZ) / MEL_LOG_STEP
    mels = np.linspace(0, top, num_mels + 2)
    linear = mels * (MEL_BREAK_HZ / MEL_BREAK)
    logarithmic = MEL_BREAK_HZ * np.exp(MEL_LOG_STEP * (mels - MEL_BREAK))
    edges = np.where(mels < MEL_BREAK, linear, logarithmic)  # Hz
    lower, centre, upper = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    rising = (frequencies - lower) / (centre - lower)
    falling = (upper - frequencies) / (upper - centre)
    filters = np.maximum(0.0, np.minimum(rising, falling)) * (2.0 / (upper - lower))
    return torch.from_numpy(filters.astype(np.float32))


def log_mel(samples: NDArray[np.float32], filters: Tensor) -> Tensor:
    """Features [num_mels, 3000], float32, of one window, padded with silence to 30 s.

    samples: [at most 480000], 16 kHz.  filters: from `mel_filters`.
    """
    padded = torch.zeros(WINDOW_SAMPLES)
    padded[: len(samples)] = torch.from_numpy(np.ascontiguousarray(samples, np.float32))
    spectrum = torch.stft(padded, NUM_FFT, HOP, window=torch.hann_window(NUM_FFT), return_complex=True)
    power = spectrum[:, :-1].abs().square()  # [NUM_FFT / 2 + 1, 3000]
    mel = (filters @ power).clamp_min(1e-10).log10()
    return (torch.maximum(mel, mel.max() - 8.0) + 4.0) / 4.0
