"""Matrix products with weights that are packed once.

On a CPU the weight is reordered into oneDNN's blocked layout, which reads memory about twice as fast
as the plain one at one row and multiplies float32 twice as fast at many.  Where torch was built
without oneDNN, or the CPU lacks the dtype, the plain product is used.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_PACKING_BATCH = 32  # rows the layout is chosen for; the choice hardly depends on it


def can_pack(weight: Tensor) -> bool:
    """Whether `weight` has a packed form on this machine."""
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if weight.device.type != "cpu" or not has_onednn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


class Linear:
    """y = x W^T + bias (+ residual).

    weight: [out_features, in_features]; it is not kept if packed.  bias: [out_features] or None.
    nbytes: of the weight and bias as held.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, packed: bool | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.nbytes = weight.nbytes + (bias.nbytes if bias is not None else 0)
        self.is_packed = can_pack(weight) if packed is None else packed
        self._bias = bias
        self._weight = weight
        if self.is_packed:
            with torch.inference_mode(False), torch.no_grad():
                self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKING_BATCH)

    def __call__(self, rows: Tensor, residual: Tensor | None = None) -> Tensor:
        """rows: [num_rows, in_features].  residual: [num_rows, out_features], added to the result."""
        if not self.is_packed:
            product = F.linear(rows, self._weight, self._bias)
            return product if residual is None else product.add_(residual)
        if residual is None:
            result: Tensor = torch.ops.mkldnn._linear_pointwise.default(
                rows, self._weight, self._bias, "none", [], ""
            )
        else:
            result = torch.ops.mkldnn._linear_pointwise.binary(
                rows, residual, self._weight, self._bias, "add"
            )
        return result
