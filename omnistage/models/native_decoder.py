"""A decoder's layers as the native kernels run them: one call for a step in which all rows decode.

Knows the layers of omnistage.models.layers and mixture; no embeddings, no head and no request.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from omnistage.models.layers import Attention, GatedMLP
from omnistage.models.mixture import Mixture
from omnistage.ops.attention import AttentionMetadata
from omnistage.ops.native.library import DTYPES, library
from omnistage.ops.native.structs import Gated, Layer, Model, Step

MAX_HEAD_DIM = 1024


class Block(Protocol):
    """One pre-norm layer."""

    @property
    def attention_norm(self) -> Tensor: ...

    @property
    def attention(self) -> Attention: ...

    @property
    def mlp_norm(self) -> Tensor: ...

    @property
    def mlp(self) -> GatedMLP | Mixture: ...

    @property
    def eps(self) -> float: ...


class NativeDecoder:
    """Holds the addresses of all weights, and the layers, so that these live as long.

    model: what the kernels read.
    """

    def __init__(self, layers: Sequence[Block], hidden_size: int) -> None:
        """layers: such that can_run_natively."""
        attention = layers[0].attention
        mixtures = [layer.mlp for layer in layers if isinstance(layer.mlp, Mixture)]
        self._kept: list[Any] = list(layers)
        self._dtype = layers[0].attention_norm.dtype
        self.model = Model(
            layers=(Layer * len(layers))(*(self._layer(layer) for layer in layers)),
            num_layers=len(layers),
            hidden=hidden_size,
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            num_experts=len(mixtures[0].experts) if mixtures else 0,
            num_active=mixtures[0].num_active if mixtures else 0,
            normalises=mixtures[0].normalises if mixtures else False,
            eps=layers[0].eps,
        )

    def run(
        self,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
        *,
        capture_layer: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """One row of each sequence through all layers, as the layers themselves would.

        hidden: [count, hidden].  metadata: with `rows`.  capture_layer: see TextModel.forward.
        Returns hidden before the final norm, and what was captured, not normalised.
        """
        rows, native = metadata.rows, library()
        assert rows is not None
        assert native is not None
        result = hidden.clone(memory_format=torch.contiguous_format)
        captured = None if capture_layer is None else torch.empty_like(result)
        cosine, sine = (factor.contiguous() for factor in rotation)
        step = Step(
            pages=metadata.cache.addresses,
            block_size=metadata.cache.block_size,
            count=result.shape[0],
            table_width=rows.tables.shape[1],
            slots=metadata.slot_mapping.data_ptr(),
            tables=rows.tables.data_ptr(),
            lengths=rows.lengths.data_ptr(),
            cosine=cosine.data_ptr(),
            sine=sine.data_ptr(),
            hidden=result.data_ptr(),
            captured=None if captured is None else captured.data_ptr(),
            capture_layer=capture_layer or 0,
            sees_batch=False,
        )
        native.omnistage_decode(
            DTYPES[self._dtype], torch.get_num_threads(), ctypes.byref(self.model), ctypes.byref(step)
        )
        return result, captured

    def mlp(self, layer: int, normed: Tensor, residual: Tensor) -> Tensor:
        """residual + the MLP of one layer, for any number of rows.  Both [num_rows, hidden], contiguous."""
        native = library()
        assert native is not None
        result = torch.empty_like(residual)
        native.omnistage_mlp(
            DTYPES[self._dtype],
            torch.get_num_threads(),
            ctypes.byref(self.model),
            layer,
            normed.shape[0],
            normed.data_ptr(),
            residual.data_ptr(),
            result.data_ptr(),
        )
        return result

    def _layer(self, layer: Block) -> Layer:
        attention, mlp = layer.attention, layer.mlp
        experts = mlp.experts if isinstance(mlp, Mixture) else [mlp]
        shared = mlp.shared if isinstance(mlp, Mixture) else None
        return Layer(
            attention_norm=layer.attention_norm.data_ptr(),
            qkv=_address(attention.qkv.packed),
            qkv_bias=_address(attention.qkv.bias),
            query_norm=_address(attention.query_norm),
            key_norm=_address(attention.key_norm),
            output=_address(attention.output.packed),
            output_bias=_address(attention.output.bias),
            mlp_norm=layer.mlp_norm.data_ptr(),
            router=_address(mlp.router.packed) if isinstance(mlp, Mixture) else None,
            experts=(Gated * len(experts))(*map(_gated, experts)),
            shared=None if shared is None else ctypes.pointer(_gated(shared)),
        )


def can_run_natively(layers: Sequence[Block]) -> bool:
    """Whether the kernels take these layers: packed weights throughout, equal shapes, no biases in MLPs."""
    if library() is None or not layers or layers[0].attention_norm.dtype not in DTYPES:
        return False
    mixtures = [layer.mlp for layer in layers if isinstance(layer.mlp, Mixture)]
    kinds = {(len(mix.experts), mix.num_active, mix.normalises) for mix in mixtures}
    return len(kinds) <= 1 and all(map(_is_native, layers))


def _is_native(layer: Block) -> bool:
    attention, mlp = layer.attention, layer.mlp
    if attention.head_dim > MAX_HEAD_DIM or attention.head_dim % 2:
        return False
    mlps = [mlp] if isinstance(mlp, GatedMLP) else [*mlp.experts, *([mlp.shared] if mlp.shared else [])]
    linears = [attention.qkv, attention.output, *(each.down for each in mlps)]
    if isinstance(mlp, Mixture):
        linears.append(mlp.router)
    return (
        all(linear.packed is not None for linear in linears)
        and all(each.gate_up.packed is not None and each.down.bias is None for each in mlps)
        and all(norm is None or norm.is_contiguous() for norm in (attention.query_norm, attention.key_norm))
    )


def _gated(mlp: GatedMLP) -> Gated:
    return Gated(
        gate_up=_address(mlp.gate_up.packed), down=_address(mlp.down.packed), size=mlp.gate_up.out_features
    )


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
