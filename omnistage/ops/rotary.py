"""Rotary positions (arXiv 2104.09864), in the layout that rotates the two halves of a head."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RotaryScaling:
    """How inverse frequencies are stretched for contexts longer than the trained one.

    kind: "default" (not at all), "linear" (all by `factor`) or "llama3" (low frequencies by `factor`,
    high ones not at all, with a smooth passage between; lengths in tokens).
    """

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: int = 0


def inverse_frequencies(head_dim: int, theta: float, scaling: RotaryScaling) -> Tensor:
    """Radians per position of each rotated pair: [head_dim / 2], float32."""
    frequencies = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "llama3":
        turns = scaling.original_max_position * frequencies / (2 * math.pi)  # over the trained context
        span = scaling.high_freq_factor - scaling.low_freq_factor
        keep = ((turns - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
        return frequencies * (keep + (1.0 - keep) / scaling.factor)
    return frequencies


def rotary_angles(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Factors for `rotate_`, shared by all layers of a step.

    positions: [num_tokens], int64.  Returns cosine and signed sine, each [num_tokens, 1, head_dim];
    the sine's first half is negated so that rotation is x * cosine + swap_halves(x) * sine.
    """
    angles = positions.to(torch.float32).unsqueeze(1) * frequencies  # [num_tokens, head_dim / 2]
    cosine, sine = angles.cos(), angles.sin()
    return (
        torch.cat((cosine, cosine), dim=-1).unsqueeze(1).to(dtype),
        torch.cat((-sine, sine), dim=-1).unsqueeze(1).to(dtype),
    )


def rotate_(heads: Tensor, cosine: Tensor, sine: Tensor) -> None:
    """Rotate queries or keys in place.

    heads: [num_tokens, num_heads, head_dim], any strides.  cosine, sine: from `rotary_angles`.
    """
    half = heads.shape[-1] // 2
    swapped = torch.cat((heads[..., half:], heads[..., :half]), dim=-1)
    heads.mul_(cosine).addcmul_(swapped, sine)
