"""The stochastic duration predictor of VITS, inference direction only.

Noise flows backwards through spline couplings conditioned on the text and comes out as the log of
each phoneme's duration (arXiv 2106.06103, section 2.2.2; splines: arXiv 1906.04032).  One sequence
at a time, channels first; the caller brings the noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from omnistage.models.protocols import Sliced

MIN_BIN_SIZE = 1e-3  # of the unit interval, for widths and heights
MIN_DERIVATIVE = 1e-3


@dataclass(frozen=True)
class DurationConfig:
    """num_flows: spline couplings used in inference.  tail_bound: the spline is the identity beyond it."""

    hidden_size: int
    kernel_size: int
    num_layers: int
    num_flows: int
    num_bins: int
    tail_bound: float


def inverse_spline(
    values: Tensor, widths: Tensor, heights: Tensor, derivatives: Tensor, *, tail_bound: float
) -> Tensor:
    """Invert a monotone rational-quadratic spline on [-tail_bound, tail_bound]; identity outside.

    values: [n].  widths, heights: [n, num_bins], unnormalised.  derivatives: [n, num_bins - 1],
    unnormalised, at the inner knots; the outer ones have slope 1.  Returns [n].
    Method: Durkan et al., Neural Spline Flows (arXiv 1906.04032), equations 6 to 8.
    """
    x_knots = _knots(widths, tail_bound)
    y_knots = _knots(heights, tail_bound)
    slopes = F.pad(MIN_DERIVATIVE + F.softplus(derivatives), (1, 1), value=1.0)

    inside = values.clamp(-tail_bound, tail_bound)
    bin_index = (torch.searchsorted(y_knots, inside[:, None], right=True) - 1).clamp(0, widths.shape[1] - 1)

    def at(knots: Tensor, shift: int = 0) -> Tensor:
        return knots.gather(1, bin_index + shift)[:, 0]

    left, bottom = at(x_knots), at(y_knots)
    width, height = at(x_knots, 1) - left, at(y_knots, 1) - bottom
    slope_left, slope_right, slope_mean = at(slopes), at(slopes, 1), height / width

    rise = inside - bottom
    bend = rise * (slope_left + slope_right - 2 * slope_mean)
    a = height * (slope_mean - slope_left) + bend
    b = height * slope_left - bend
    c = -slope_mean * rise
    discriminant = (b * b - 4 * a * c).clamp(min=0.0)  # never negative but for rounding
    root = 2 * c / (-b - discriminant.sqrt())
    return torch.where(values.abs() <= tail_bound, root * width + left, values)


def _knots(unnormalised: Tensor, tail_bound: float) -> Tensor:
    """Bin edges [n, num_bins + 1] from -tail_bound to tail_bound."""
    num_bins = unnormalised.shape[1]
    sizes = MIN_BIN_SIZE + (1 - MIN_BIN_SIZE * num_bins) * unnormalised.softmax(dim=1)
    edges = F.pad(sizes.cumsum(dim=1), (1, 0)) * (2 * tail_bound) - tail_bound
    edges[:, -1] = tail_bound
    return edges


class DilatedStack(nn.Module):
    """Depthwise convolutions of growing dilation, each followed by a pointwise one, with residuals."""

    def __init__(self, config: DurationConfig) -> None:
        super().__init__()
        size, kernel_size = config.hidden_size, config.kernel_size
        dilations = [kernel_size**layer for layer in range(config.num_layers)]
        self.depthwise = nn.ModuleList(
            nn.Conv1d(
                size,
                size,
                kernel_size,
                groups=size,
                dilation=dilation,
                padding=(kernel_size - 1) * dilation // 2,
            )
            for dilation in dilations
        )
        self.pointwise = nn.ModuleList(nn.Conv1d(size, size, 1) for _ in dilations)
        self.depthwise_norms = nn.ModuleList(nn.LayerNorm(size) for _ in dilations)
        self.pointwise_norms = nn.ModuleList(nn.LayerNorm(size) for _ in dilations)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [hidden_size, num_tokens].  Returns the same shape."""
        layers = zip(self.depthwise, self.depthwise_norms, self.pointwise, self.pointwise_norms, strict=True)
        for depthwise, depthwise_norm, pointwise, pointwise_norm in layers:
            inner = F.gelu(depthwise_norm(depthwise(hidden).T)).T
            hidden = hidden + F.gelu(pointwise_norm(pointwise(inner).T)).T
        return hidden


class SplineCoupling(nn.Module):
    """Transforms the second of two channels by a spline whose shape the first and the text decide."""

    def __init__(self, config: DurationConfig) -> None:
        super().__init__()
        self.num_bins = config.num_bins
        self.tail_bound = config.tail_bound
        self.scale = 1 / math.sqrt(config.hidden_size)
        self.entry = nn.Conv1d(1, config.hidden_size, 1)
        self.stack = DilatedStack(config)
        self.exit = nn.Conv1d(config.hidden_size, 3 * config.num_bins - 1, 1)

    def forward(self, noise: Tensor, text: Tensor) -> Tensor:
        """noise: [2, num_tokens].  text: [hidden_size, num_tokens].  Returns [2, num_tokens]."""
        first, second = noise[:1], noise[1]
        shape = self.exit(self.stack(self.entry(first) + text)).T  # [num_tokens, 3 * num_bins - 1]
        widths, heights, derivatives = shape.split([self.num_bins, self.num_bins, self.num_bins - 1], dim=1)
        moved = inverse_spline(
            second, widths * self.scale, heights * self.scale, derivatives, tail_bound=self.tail_bound
        )
        return torch.cat([first, moved[None]])


class DurationPredictor(nn.Module):
    """Hidden states of the text, and noise, to log durations."""

    def __init__(self, config: DurationConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.entry = nn.Conv1d(size, size, 1)
        self.stack = DilatedStack(config)
        self.exit = nn.Conv1d(size, size, 1)
        self.couplings = nn.ModuleList(SplineCoupling(config) for _ in range(config.num_flows))
        self.shift = nn.Parameter(torch.zeros(2, 1))
        self.log_scale = nn.Parameter(torch.zeros(2, 1))

    def predict(self, hidden: Tensor, noise: Tensor) -> Sliced[Tensor]:
        """hidden: [num_tokens, hidden_size].  noise: [2, num_tokens], already scaled.

        Returns the log of each token's duration in frames, [num_tokens].  Yields after every coupling.
        """
        text = self.exit(self.stack(self.entry(hidden.T)))
        for coupling in self.couplings:
            noise = coupling(noise.flip(0), text)
            yield
        noise = (noise.flip(0) - self.shift) * torch.exp(-self.log_scale)
        return noise[0]
