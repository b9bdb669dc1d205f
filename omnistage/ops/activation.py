"""Gated activations (arXiv 2002.05202)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up.

    gate_up: [num_tokens, 2 * size], the gate in the first half, as the fused projection gives it.
    Returns [num_tokens, size].
    """
    size = gate_up.shape[-1] // 2
    return F.silu(gate_up[..., :size]).mul_(gate_up[..., size:])
