"""Matrix products with weights that are packed once.

On a CPU the weight lies in panels for the native kernels (omnistage/ops/native), which read it at the
memory's speed for one row and multiply as fast as oneDNN for many.  Without them it is reordered into
oneDNN's own blocked layout; where torch was built without oneDNN, or the CPU lacks the dtype, the plain
product is used.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from omnistage.ops.activation import swiglu
from omnistage.ops.native.library import DTYPES, library

_PACKING_BATCH = 32  # rows oneDNN's layout is chosen for; the choice hardly depends on it
GATE_ROWS = 32  # gates, and ups, in a native panel

Form = Literal["native", "onednn", "plain"]


def can_pack(weight: Tensor) -> bool:
    """Whether `weight` has oneDNN's packed form on this machine."""
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if weight.device.type != "cpu" or not has_onednn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def best_form(weight: Tensor) -> Form:
    """The fastest form that `weight` has on this machine."""
    if weight.device.type == "cpu" and weight.dtype in DTYPES and library() is not None:
        return "native"
    return "onednn" if can_pack(weight) else "plain"


class Linear:
    """y = x W^T + bias (+ residual).

    weight: [out_features, in_features]; it is not kept if packed.  bias: [out_features] or None.
    nbytes: of the weight and bias.  form: how the weight is held.
    packed, bias: what the native kernels read; packed is uint8 panels, None in another form.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, form: Form | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.nbytes = weight.nbytes + (bias.nbytes if bias is not None else 0)
        self.form: Form = form or best_form(weight)
        self.bias = None if bias is None else bias.contiguous()
        self.packed: Tensor | None = None
        self._weight = weight
        if self.form == "native":
            self.packed = pack_panels(weight)
            self._weight = weight[:0]
        elif self.form == "onednn":
            with torch.inference_mode(False), torch.no_grad():
                self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKING_BATCH)

    def __call__(self, rows: Tensor, residual: Tensor | None = None) -> Tensor:
        """rows: [num_rows, in_features].  residual: [num_rows, out_features], added to the result."""
        if self.packed is not None:
            return _native_product(self.packed, self.out_features, rows, self.bias, residual)
        if self.form == "plain":
            product = F.linear(rows, self._weight, self.bias)
            return product if residual is None else product.add_(residual)
        if residual is None:
            result: Tensor = torch.ops.mkldnn._linear_pointwise.default(
                rows, self._weight, self.bias, "none", [], ""
            )
        else:
            result = torch.ops.mkldnn._linear_pointwise.binary(rows, residual, self._weight, self.bias, "add")
        return result


class GatedLinear:
    """y = silu(x G^T) * (x U^T), gate and up in one product.

    weight: [2 * out_features, in_features], the gate in the first half; not kept if packed.
    bias: [2 * out_features] or None.  packed: as of Linear; None if there is a bias.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, form: Form | None = None) -> None:
        self.out_features, self.in_features = weight.shape[0] // 2, weight.shape[1]
        self.nbytes = weight.nbytes + (bias.nbytes if bias is not None else 0)
        self.packed: Tensor | None = None
        self._plain: Linear | None = None
        if bias is None and (form or best_form(weight)) == "native":
            self.packed = pack_panels(weight, is_gated=True)
        else:
            self._plain = Linear(weight, bias, form=form)

    def __call__(self, rows: Tensor) -> Tensor:
        """rows: [num_rows, in_features].  Returns [num_rows, out_features]."""
        if self._plain is not None:
            return swiglu(self._plain(rows))
        assert self.packed is not None
        return _native_product(self.packed, 2 * self.out_features, rows, None, None, is_gated=True)


def pack_panels(weight: Tensor, *, is_gated: bool = False) -> Tensor:
    """The native kernels' form of a weight [out_features, in_features]: uint8, one dimension."""
    native = library()
    assert native is not None, "there are no native kernels here"
    num_outputs, num_inputs = weight.shape
    padded = num_outputs
    if is_gated:
        padded = 2 * -(-(num_outputs // 2) // GATE_ROWS) * GATE_ROWS
    source = weight.contiguous()
    dtype = DTYPES[weight.dtype]
    packed = torch.zeros(native.omnistage_packed_bytes(dtype, padded, num_inputs), dtype=torch.uint8)
    native.omnistage_pack(dtype, num_outputs, num_inputs, is_gated, source.data_ptr(), packed.data_ptr())
    return packed


def _native_product(
    packed: Tensor,
    num_outputs: int,
    rows: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    *,
    is_gated: bool = False,
) -> Tensor:
    native = library()
    assert native is not None
    flat = rows if rows.dim() == 2 else rows.flatten(0, -2)
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    if residual is not None and not residual.is_contiguous():
        residual = residual.contiguous()
    num_rows, num_inputs = flat.shape
    result = torch.empty(*rows.shape[:-1], num_outputs // 2 if is_gated else num_outputs, dtype=rows.dtype)
    native.omnistage_linear(
        DTYPES[rows.dtype],
        torch.get_num_threads(),
        num_rows,
        num_outputs,
        num_inputs,
        is_gated,
        flat.data_ptr(),
        flat.stride(0),
        packed.data_ptr(),
        None if bias is None else bias.data_ptr(),
        None if residual is None else residual.data_ptr(),
        result.data_ptr(),
    )
    return result
