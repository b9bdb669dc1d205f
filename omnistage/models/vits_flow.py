"""The prior flow of VITS, inference direction: a sample of the text's prior to vocoder latents.

Residual coupling layers around WaveNets without mean scaling (arXiv 2106.06103, section 2.2.2).
One sequence at a time, channels first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from omnistage.models.protocols import Sliced


@dataclass(frozen=True)
class FlowConfig:
    """dilations: of each WaveNet layer."""

    latent_size: int
    hidden_size: int
    num_couplings: int
    kernel_size: int
    dilations: tuple[int, ...]


class WaveNet(nn.Module):
    """Gated dilated convolutions with residual and skip paths."""

    def __init__(self, config: FlowConfig) -> None:
        super().__init__()
        size, last = config.hidden_size, len(config.dilations) - 1
        self.gates = nn.ModuleList(
            nn.Conv1d(
                size,
                2 * size,
                config.kernel_size,
                dilation=dilation,
                padding=(config.kernel_size - 1) * dilation // 2,
            )
            for dilation in config.dilations
        )
        # The last layer has a skip path only.
        self.mixes = nn.ModuleList(
            nn.Conv1d(size, size if layer == last else 2 * size, 1) for layer in range(len(config.dilations))
        )

    def run(self, hidden: Tensor) -> Sliced[Tensor]:
        """hidden: [1, hidden_size, num_frames].  Returns the sum of skips, same shape; yields per layer."""
        skips = torch.zeros_like(hidden)
        for layer, (gate, mix) in enumerate(zip(self.gates, self.mixes, strict=True)):
            signal, control = gate(hidden).chunk(2, dim=1)
            mixed = mix(torch.tanh(signal) * torch.sigmoid(control))
            if layer < len(self.gates) - 1:
                residual, mixed = mixed.chunk(2, dim=1)
                hidden = hidden + residual
            skips = skips + mixed
            yield
        return skips


class Coupling(nn.Module):
    """Moves the second half of the channels by what the first half says."""

    def __init__(self, config: FlowConfig) -> None:
        super().__init__()
        half = config.latent_size // 2
        self.entry = nn.Conv1d(half, config.hidden_size, 1)
        self.wavenet = WaveNet(config)
        self.exit = nn.Conv1d(config.hidden_size, half, 1)

    def invert(self, latents: Tensor) -> Sliced[Tensor]:
        """latents: [1, latent_size, num_frames].  Returns the same shape."""
        first, second = latents.chunk(2, dim=1)
        skips = yield from self.wavenet.run(self.entry(first))
        return torch.cat([first, second - self.exit(skips)], dim=1)


class PriorFlow(nn.Module):
    """The whole flow.  couplings are in the order of inference (the reverse of training's)."""

    def __init__(self, config: FlowConfig) -> None:
        super().__init__()
        self.couplings = nn.ModuleList(Coupling(config) for _ in range(config.num_couplings))

    def invert(self, latents: Tensor) -> Sliced[Tensor]:
        """latents: [1, latent_size, num_frames], a sample of the prior.  Returns the same shape."""
        for coupling in self.couplings:
            assert isinstance(coupling, Coupling)
            latents = yield from coupling.invert(latents.flip(1))
        return latents
