"""Blocks of decoder networks over flat rows.  Know tensors and `AttentionMetadata`, no requests."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from omnistage.ops.attention import AttentionMetadata, paged_attention
from omnistage.ops.linear import GatedLinear, Linear
from omnistage.ops.norm import rms_norm
from omnistage.ops.rotary import rotate_


@dataclass(frozen=True)
class Attention:
    """Grouped-query self-attention with fused query, key and value projection.

    query_norm, key_norm: [head_dim], or None where the architecture has none.
    """

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    qkv: Linear
    output: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None

    def __call__(
        self, rows: Tensor, residual: Tensor, cosine: Tensor, sine: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """rows: normalised, residual: not, both [num_tokens, hidden].  Returns residual + attention."""
        num_tokens = rows.shape[0]
        heads = self.qkv(rows).view(num_tokens, -1, self.head_dim)  # queries, then keys, then values
        num_rotated = self.num_heads + self.num_kv_heads
        if self.query_norm is not None and self.key_norm is not None:
            heads[:, : self.num_heads] = rms_norm(heads[:, : self.num_heads], self.query_norm, self.eps)
            keys = heads[:, self.num_heads : num_rotated]
            keys.copy_(rms_norm(keys, self.key_norm, self.eps))
        rotate_(heads[:, :num_rotated], cosine, sine)
        key_value = heads[:, self.num_heads :].view(num_tokens, 2, self.num_kv_heads, self.head_dim)
        attended = paged_attention(self.layer, heads[:, : self.num_heads], key_value, metadata)
        return self.output(attended, residual)


@dataclass(frozen=True)
class GatedMLP:
    """down(silu(gate(x)) * up(x)), gate and up fused."""

    gate_up: GatedLinear
    down: Linear

    def __call__(self, rows: Tensor, residual: Tensor) -> Tensor:
        """rows: normalised, residual: not, both [num_tokens, hidden].  Returns residual + mlp."""
        return self.down(self.gate_up(rows), residual)


@dataclass(frozen=True)
class DecoderLayer:
    """One pre-norm transformer block."""

    attention_norm: Tensor
    attention: Attention
    mlp_norm: Tensor
    mlp: GatedMLP
    eps: float

    def __call__(self, hidden: Tensor, cosine: Tensor, sine: Tensor, metadata: AttentionMetadata) -> Tensor:
        """hidden: [num_tokens, hidden_size], left unchanged.  Returns the same shape."""
        normed = rms_norm(hidden, self.attention_norm, self.eps)
        hidden = self.attention(normed, hidden, cosine, sine, metadata)
        return self.mlp(rms_norm(hidden, self.mlp_norm, self.eps), hidden)
