"""RMS normalisation (arXiv 1910.07467)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale rows to unit root mean square over the last axis, then by `weight`.

    hidden: [..., size].  weight: [size].  The mean is taken in float32 whatever the dtype.
    """
    return F.rms_norm(hidden, weight.shape, weight, eps)
