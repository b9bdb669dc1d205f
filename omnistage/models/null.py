"""The null model: an llm that computes nothing and always says the same token.

With it a pipeline's whole cost is that of graph, transport and engine, which is how they are measured
(benchmarks/pipeline.py).  config.json: {"model_type": "null", "vocab_size", "max_position_embeddings",
"token_id"}.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from omnistage.errors import WeightsError
from omnistage.models.loader import read_json
from omnistage.ops.attention import AttentionMetadata, PagedKVCache


@dataclass(frozen=True)
class NullConfig:
    """token_id: what it says.  The other names are those of DecoderConfig."""

    vocab_size: int
    max_position_embeddings: int
    token_id: int
    hidden_size: int = field(default=1, init=False)


class NullDecoder:
    """See omnistage.models.decoder.Decoder; keys and values of one layer and one element."""

    dtype = torch.float32
    weight_bytes = 0
    num_position_axes = 1
    num_open_layers = 0
    decodes_natively = False

    def __init__(self, config: NullConfig) -> None:
        self.config = config
        self._logits = torch.zeros(1, config.vocab_size)
        self._logits[0, config.token_id] = 1.0

    def new_kv_cache(self, num_blocks: int, block_size: int) -> PagedKVCache:
        return PagedKVCache(**self._shape(block_size), num_blocks=num_blocks)

    def kv_bytes_per_block(self, block_size: int) -> int:
        return PagedKVCache.bytes_per_block(**self._shape(block_size))

    def _shape(self, block_size: int) -> dict[str, Any]:
        return {
            "num_layers": 1,
            "block_size": block_size,
            "num_kv_heads": 1,
            "head_dim": 1,
            "dtype": self.dtype,
        }

    def embed(self, token_ids: Tensor) -> Tensor:
        return torch.zeros(len(token_ids), 1)

    def forward(self, hidden: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self._logits.expand(len(hidden), -1)


def load_null(directory: Path, *, dtype: torch.dtype, prefix: str = "") -> NullDecoder:
    """Raises WeightsError if config.json lacks a number.  dtype, prefix: as load_decoder; not used."""
    values = read_json(directory / "config.json")
    try:
        numbers = {field.name: int(values[field.name]) for field in fields(NullConfig) if field.init}
    except KeyError as error:
        raise WeightsError(f"{directory}/config.json lacks {error.args[0]!r}") from error
    return NullDecoder(NullConfig(**numbers))
