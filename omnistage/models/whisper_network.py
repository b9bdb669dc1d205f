"""Whisper's network: encoder run in slices, decoder with its key and value caches.

Knows features, token ids and logits; nothing of text or audio.  Architecture: "Robust Speech
Recognition via Large-Scale Weak Supervision" (arXiv 2212.04356); tensor names as in the hub.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

POSITIONS = 300  # of the encoder, per slice of attention or feed-forward
KV_GROWTH = 64  # positions by which the decoder's caches grow


class Attention(nn.Module):
    """Multi-head attention; the caller keeps keys and values, as [num_rows, heads, length, head_dim]."""

    def __init__(self, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_proj = nn.Linear(hidden, hidden)
        self.k_proj = nn.Linear(hidden, hidden, bias=False)
        self.v_proj = nn.Linear(hidden, hidden)
        self.out_proj = nn.Linear(hidden, hidden)

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.num_heads, -1).transpose(1, 2)

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: [num_rows, length, hidden]."""
        return self._split(self.k_proj(x)), self._split(self.v_proj(x))

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
        """x: [num_rows, num_queries, hidden].  mask: [num_queries, length], True where visible."""
        mixed = F.scaled_dot_product_attention(self._split(self.q_proj(x)), keys, values, attn_mask=mask)
        out: Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return out


class Layer(nn.Module):
    """One layer of the encoder, or of the decoder if it attends to the encoder's output."""

    def __init__(self, hidden: int, num_heads: int, inner: int, *, is_decoder: bool) -> None:
        super().__init__()
        self.self_attn = Attention(hidden, num_heads)
        self.self_attn_layer_norm = nn.LayerNorm(hidden)
        if is_decoder:
            self.encoder_attn = Attention(hidden, num_heads)
            self.encoder_attn_layer_norm = nn.LayerNorm(hidden)
        self.fc1 = nn.Linear(hidden, inner)
        self.fc2 = nn.Linear(inner, hidden)
        self.final_layer_norm = nn.LayerNorm(hidden)

    def feed_forward(self, x: Tensor) -> Tensor:
        """x: [num_rows, length, hidden]; returns x plus the layer's change."""
        change: Tensor = self.fc2(F.gelu(self.fc1(self.final_layer_norm(x))))
        return x + change


def _layers(modules: nn.ModuleList) -> list[Layer]:
    return cast("list[Layer]", list(modules))


class AudioEncoder(nn.Module):
    """Log-mel features to hidden states, two positions of features to one."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden = config["d_model"]
        self.conv1 = nn.Conv1d(config["num_mel_bins"], hidden, 3, padding=1)
        self.conv2 = nn.Conv1d(hidden, hidden, 3, stride=2, padding=1)
        self.embed_positions = nn.Embedding(config["max_source_positions"], hidden)
        self.layers = nn.ModuleList(
            Layer(hidden, config["encoder_attention_heads"], config["encoder_ffn_dim"], is_decoder=False)
            for _ in range(config["encoder_layers"])
        )
        self.layer_norm = nn.LayerNorm(hidden)

    def run(self, features: Tensor) -> Generator[None, None, Tensor]:
        """features: [num_mels, 3000].  Returns [1, 1500, hidden]; yields several times a layer."""
        x = F.gelu(self.conv2(F.gelu(self.conv1(features[None])))).transpose(1, 2)
        x = x + self.embed_positions.weight
        yield
        for layer in _layers(self.layers):
            normed = layer.self_attn_layer_norm(x)
            keys, values = layer.self_attn.keys_values(normed)
            yield
            parts = []
            for part, queries in zip(
                torch.split(x, POSITIONS, 1), torch.split(normed, POSITIONS, 1), strict=True
            ):
                attended = part + layer.self_attn(queries, keys, values)
                yield
                parts.append(layer.feed_forward(attended))
                yield
            x = torch.cat(parts, dim=1)
        out: Tensor = self.layer_norm(x)
        return out


@dataclass
class DecoderState:
    """Keys and values of the windows being decoded.  Every row is at the same position.

    cross, own: per layer (keys, values), [num_rows, heads, positions, head_dim]; of `own` the first
    `length` positions are filled.
    """

    cross: list[tuple[Tensor, Tensor]]
    own: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    length: int = 0

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store new positions of a layer after `length`; returns all filled ones."""
        end = self.length + keys.shape[2]
        if layer == len(self.own):
            self.own.append((keys.new_empty(0), values.new_empty(0)))
        old_keys, old_values = self.own[layer]
        if old_keys.dim() < 4 or old_keys.shape[2] < end:
            self.own[layer] = old_keys, old_values = (
                self._grown(old_keys, keys, end),
                self._grown(old_values, values, end),
            )
        old_keys[:, :, self.length : end] = keys
        old_values[:, :, self.length : end] = values
        return old_keys[:, :, :end], old_values[:, :, :end]

    def _grown(self, old: Tensor, new: Tensor, end: int) -> Tensor:
        rows, heads, _, width = new.shape
        grown = new.new_empty(rows, heads, end + KV_GROWTH, width)
        if self.length:
            grown[:, :, : self.length] = old[:, :, : self.length]
        return grown

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but these.  rows: [num_kept], int64."""
        self.cross = [(keys[rows], values[rows]) for keys, values in self.cross]
        self.own = [(keys[rows], values[rows]) for keys, values in self.own]


class TextDecoder(nn.Module):
    """Tokens to logits, given the encoder's output; the output matrix is the embedding table."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden = config["d_model"]
        self.embed_tokens = nn.Embedding(config["vocab_size"], hidden)
        self.embed_positions = nn.Embedding(config["max_target_positions"], hidden)
        self.layers = nn.ModuleList(
            Layer(hidden, config["decoder_attention_heads"], config["decoder_ffn_dim"], is_decoder=True)
            for _ in range(config["decoder_layers"])
        )
        self.layer_norm = nn.LayerNorm(hidden)

    def start(self, encoded: Sequence[Tensor]) -> Generator[None, None, DecoderState]:
        """Compute cross-attention's keys and values, once.

        encoded: [1, 1500, hidden] of each row.  Yields after each row of each layer.
        """
        cross = []
        for layer in _layers(self.layers):
            rows = []
            for hidden in encoded:
                rows.append(layer.encoder_attn.keys_values(hidden))
                yield
            keys, values = zip(*rows, strict=True)
            cross.append((torch.cat(keys), torch.cat(values)))
            yield
        return DecoderState(cross)

    def forward(self, token_ids: Tensor, state: DecoderState) -> Tensor:
        """token_ids: [num_rows, num_new].  Returns float32 logits [num_rows, vocab] of the last position."""
        num_new, start = token_ids.shape[1], state.length
        x = self.embed_tokens(token_ids) + self.embed_positions.weight[start : start + num_new]
        mask = None
        if num_new > 1:
            mask = torch.ones(num_new, start + num_new, dtype=torch.bool, device=x.device).tril(start)
        for index, layer in enumerate(_layers(self.layers)):
            normed = layer.self_attn_layer_norm(x)
            keys, values = state.append(index, *layer.self_attn.keys_values(normed))
            x = x + layer.self_attn(normed, keys, values, mask)
            x = x + layer.encoder_attn(layer.encoder_attn_layer_norm(x), *state.cross[index])
            x = layer.feed_forward(x)
        state.length += num_new
        hidden = self.layer_norm(x[:, -1])
        return F.linear(hidden, self.embed_tokens.weight).float()


class Whisper(nn.Module):
    """Encoder and decoder under the names the hub's checkpoints use (below "model.")."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.encoder = AudioEncoder(config)
        self.decoder = TextDecoder(config)
