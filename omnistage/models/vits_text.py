"""The text encoder of VITS: phoneme ids to hidden states and the prior's mean and log deviation.

A transformer with relative positions in a window, after VITS (arXiv 2106.06103, section 2.2.2) and
Shaw et al. (arXiv 1803.02155).  One sequence at a time; knows no text, no noise and no durations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from omnistage.models.protocols import Sliced


@dataclass(frozen=True)
class TextEncoderConfig:
    """num_symbols: phoneme ids.  window_size: relative positions reach that many tokens each way."""

    num_symbols: int
    hidden_size: int
    num_layers: int
    num_heads: int
    window_size: int
    ffn_size: int
    ffn_kernel_size: int
    latent_size: int


class RelativeAttention(nn.Module):
    """Self-attention whose keys and values know how far away they are, up to the window."""

    def __init__(self, config: TextEncoderConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads = config.num_heads
        self.head_size = size // config.num_heads
        self.window_size = config.window_size
        self.query = nn.Linear(size, size)
        self.key = nn.Linear(size, size)
        self.value = nn.Linear(size, size)
        self.output = nn.Linear(size, size)
        num_offsets = 2 * config.window_size + 1
        self.key_offsets = nn.Parameter(torch.zeros(num_offsets, self.head_size))
        self.value_offsets = nn.Parameter(torch.zeros(num_offsets, self.head_size))

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [num_tokens, hidden_size].  Returns the same shape."""
        num_tokens, window = hidden.shape[0], self.window_size

        def heads(rows: Tensor) -> Tensor:  # [num_heads, num_tokens, head_size]
            return rows.view(num_tokens, self.num_heads, self.head_size).transpose(0, 1)

        query = heads(self.query(hidden)) / math.sqrt(self.head_size)
        key, value = heads(self.key(hidden)), heads(self.value(hidden))
        scores = query @ key.transpose(1, 2)  # [num_heads, num_tokens, num_tokens]

        token = torch.arange(num_tokens, device=hidden.device)
        offset = token[None, :] - token[:, None]  # of key from query
        by_offset = query @ self.key_offsets.T  # [num_heads, num_tokens, 2 * window + 1]
        index = (offset + window).clamp(0, 2 * window).expand(self.num_heads, -1, -1)
        scores = scores + by_offset.gather(2, index).masked_fill(offset.abs() > window, 0.0)
        weights = scores.softmax(dim=-1)

        neighbour = token[:, None] + torch.arange(-window, window + 1, device=hidden.device)
        outside = (neighbour < 0) | (neighbour >= num_tokens)
        near = weights.gather(2, neighbour.clamp(0, num_tokens - 1).expand(self.num_heads, -1, -1))
        mixed = weights @ value + near.masked_fill(outside, 0.0) @ self.value_offsets
        mixed = mixed.transpose(0, 1).reshape(num_tokens, -1)
        return torch.as_tensor(self.output(mixed))


class TextEncoderLayer(nn.Module):
    """Attention and a convolutional feed-forward, each followed by a layer norm."""

    def __init__(self, config: TextEncoderConfig) -> None:
        super().__init__()
        size, kernel_size = config.hidden_size, config.ffn_kernel_size
        self.padding = ((kernel_size - 1) // 2, kernel_size // 2)
        self.attention = RelativeAttention(config)
        self.attention_norm = nn.LayerNorm(size)
        self.ffn_in = nn.Conv1d(size, config.ffn_size, kernel_size)
        self.ffn_out = nn.Conv1d(config.ffn_size, size, kernel_size)
        self.ffn_norm = nn.LayerNorm(size)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: [num_tokens, hidden_size].  Returns the same shape."""
        hidden = self.attention_norm(hidden + self.attention(hidden))
        wide = F.relu(self.ffn_in(F.pad(hidden.T, self.padding)))
        return torch.as_tensor(self.ffn_norm(hidden + self.ffn_out(F.pad(wide, self.padding)).T))


class TextEncoder(nn.Module):
    """Phoneme ids to what the duration predictor and the prior need."""

    def __init__(self, config: TextEncoderConfig) -> None:
        super().__init__()
        self.scale = math.sqrt(config.hidden_size)
        self.embedding = nn.Parameter(torch.zeros(config.num_symbols, config.hidden_size))
        self.layers = nn.ModuleList(TextEncoderLayer(config) for _ in range(config.num_layers))
        self.projection = nn.Linear(config.hidden_size, 2 * config.latent_size)

    def encode(self, ids: Tensor) -> Sliced[tuple[Tensor, Tensor, Tensor]]:
        """ids: [num_tokens], int64; at least one.

        Returns hidden [num_tokens, hidden_size], and the prior's mean and log standard deviation,
        each [num_tokens, latent_size].  Yields after every layer.
        """
        hidden = self.embedding[ids] * self.scale
        for layer in self.layers:
            hidden = layer(hidden)
            yield
        mean, log_deviation = self.projection(hidden).chunk(2, dim=1)
        return hidden, mean, log_deviation
