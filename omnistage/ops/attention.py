"""Attention over paged keys and values, and the pages themselves.  Knows rows and blocks, no requests.

A step's rows are flat: first the rows of sequences that add exactly one (in groups of similar
context), then chunks of several rows.  `AttentionMetadata` says which is which; it is built once per
step and shared by all layers.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from omnistage.ops.native.structs import pointers
from omnistage.ops.segments import attention

BlockSelection = Tensor | slice  # block ids [num_blocks] int64, or a run of consecutive blocks


class PagedKVCache:
    """Keys and values of all layers in blocks of `block_size` rows.

    layers: per layer [num_blocks, block_size, 2, num_kv_heads, head_dim]; index 0 of the third axis is
    the key.  Key and value lie side by side so that one operation writes or gathers both.
    addresses: of the layers, for native kernels.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (num_blocks, block_size, 2, num_kv_heads, head_dim)
        # Zeroed, not empty: masked rows still meet the values in a product, and 0 * NaN is NaN.
        self.layers = [_zero_pages(shape, dtype) for _ in range(num_layers)]
        self.addresses = pointers([pages.data_ptr() for pages in self.layers])
        self._row_size = 2 * num_kv_heads * head_dim
        self._gathered = torch.empty(0, dtype=dtype)

    @staticmethod
    def bytes_per_block(
        *, num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> int:
        """Bytes one block takes over all layers."""
        return num_layers * block_size * 2 * num_kv_heads * head_dim * dtype.itemsize

    def write(self, layer: int, slot_mapping: Tensor, key_value: Tensor) -> None:
        """Store rows.  slot_mapping: [num_tokens] int64, block * block_size + row.

        key_value: [num_tokens, 2 * num_kv_heads * head_dim], any row stride.
        """
        self.layers[layer].view(-1, self._row_size).index_copy_(0, slot_mapping, key_value)

    def clear(self, blocks: list[int]) -> None:
        """Zero blocks of all layers."""
        for pages in self.layers:
            pages[blocks] = 0

    def gather(self, layer: int, blocks: BlockSelection) -> Tensor:
        """Rows of the selected blocks in order: [num_blocks * block_size, 2, num_kv_heads, head_dim].

        Valid until the next gather: the result is a view of the pages or of a buffer that is reused.
        """
        pages = self.layers[layer]
        if isinstance(blocks, slice):
            return pages[blocks].flatten(0, 1)
        size = blocks.shape[0] * pages[0].numel()
        if self._gathered.numel() < size:
            self._gathered = torch.empty(2 * size, dtype=pages.dtype)
        gathered = self._gathered[:size].view(blocks.shape[0], -1)
        torch.index_select(pages.view(pages.shape[0], -1), 0, blocks, out=gathered)
        return gathered.view(-1, *pages.shape[2:])


def _zero_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros whose memory the system provides as they are first written, so that a large cache costs what
    it is used for."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if not num_bytes:
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # freed with the tensor
    return torch.frombuffer(memory, dtype=dtype).view(shape)


@dataclass(frozen=True)
class DecodeGroup:
    """Rows [start, start + count) of the step, one per sequence.

    blocks: `count` times the same number of blocks, padded with any valid id.
    context: rows of the longest, including the new one.
    mask: [count, 1, 1, context], added to the scores; None if all contexts are equal.
    """

    start: int
    count: int
    blocks: BlockSelection
    context: int
    mask: Tensor | None


@dataclass(frozen=True)
class PrefillChunk:
    """Rows [start, start + num_rows) of the step, consecutive rows of one sequence.

    blocks: of the whole context; None if the sequence begins with this chunk.
    context: rows including the chunk.
    """

    start: int
    num_rows: int
    context: int
    blocks: BlockSelection | None


@dataclass(frozen=True)
class DecodeRows:
    """A step in which every sequence adds one row, for models that run it natively.

    tables: [num_rows, width], block ids in order, padded.  lengths: [num_rows], rows of each context with
    the new one.  Both int64 and contiguous.
    """

    tables: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class AttentionMetadata:
    """Where the rows of a step belong.  slot_mapping: [num_tokens], int64.

    rows: instead of groups and chunks, where all rows decode and the model runs that natively.
    """

    cache: PagedKVCache
    slot_mapping: Tensor
    decode_groups: tuple[DecodeGroup, ...]
    prefill_chunks: tuple[PrefillChunk, ...]
    rows: DecodeRows | None = None


def length_mask(context_lengths: Tensor, context: int, dtype: torch.dtype) -> Tensor:
    """[count, 1, 1, context]: sequence i sees its first context_lengths[i] rows."""
    visible = torch.arange(context) < context_lengths.unsqueeze(1)
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, -torch.inf)
    return mask.view(-1, 1, 1, context)


def paged_attention(layer: int, query: Tensor, key_value: Tensor, metadata: AttentionMetadata) -> Tensor:
    """Store the step's keys and values and attend over every sequence's pages.

    query: [num_tokens, num_heads, head_dim].  key_value: [num_tokens, 2, num_kv_heads, head_dim].
    Both already rotated, any row stride.  num_heads is a multiple of num_kv_heads (grouped queries,
    arXiv 2305.13245).  Returns [num_tokens, num_heads * head_dim].
    """
    metadata.cache.write(layer, metadata.slot_mapping, key_value.flatten(1))
    if len(metadata.decode_groups) == 1 and not metadata.prefill_chunks:
        return _decode(layer, query, metadata.cache, metadata.decode_groups[0])
    output = torch.empty(query.shape[0], query.shape[1] * query.shape[2], dtype=query.dtype)
    for group in metadata.decode_groups:
        rows = slice(group.start, group.start + group.count)
        output[rows] = _decode(layer, query[rows], metadata.cache, group)
    for chunk in metadata.prefill_chunks:
        rows = slice(chunk.start, chunk.start + chunk.num_rows)
        output[rows] = _prefill(layer, query[rows], key_value[rows], metadata.cache, chunk)
    return output


def _decode(layer: int, query: Tensor, cache: PagedKVCache, group: DecodeGroup) -> Tensor:
    """query: [count, num_heads, head_dim].  Returns [count, num_heads * head_dim]."""
    rows = cache.gather(layer, group.blocks)
    rows = rows.view(group.count, -1, *rows.shape[1:])[:, : group.context]
    key, value = rows.permute(2, 0, 3, 1, 4).unbind(0)  # each [count, num_kv_heads, context, head_dim]
    # The query heads that share a key head stand in the place of query rows: no key is repeated.
    grouped = query.view(group.count, key.shape[1], -1, query.shape[-1])
    attended = F.scaled_dot_product_attention(grouped, key, value, attn_mask=group.mask)
    return attended.reshape(group.count, -1)


def _prefill(
    layer: int, query: Tensor, key_value: Tensor, cache: PagedKVCache, chunk: PrefillChunk
) -> Tensor:
    """query: [num_rows, num_heads, head_dim].  Returns [num_rows, num_heads * head_dim]."""
    rows = key_value if chunk.blocks is None else cache.gather(layer, chunk.blocks)[: chunk.context]
    key, value = rows.permute(1, 2, 0, 3).unsqueeze(1).unbind(0)  # [1, num_kv_heads, context, head_dim]
    attended = attention(query.transpose(0, 1).unsqueeze(0), key, value, is_causal=True)
    return attended.squeeze(0).transpose(0, 1).reshape(chunk.num_rows, -1)
