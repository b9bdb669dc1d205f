"""Paged attention against softmax written out in double, sequence by sequence."""

from __future__ import annotations

import math

import pytest
import torch

from omnistage.ops.attention import (
    AttentionMetadata,
    DecodeGroup,
    PagedKVCache,
    PrefillChunk,
    length_mask,
    paged_attention,
)

BLOCK, HEAD = 16, 24
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def reference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Rows at the end of one sequence.  query: [rows, heads, dim]; key, value: [context, kv_heads, dim]."""
    group = query.shape[1] // key.shape[1]
    key, value = (one.double().repeat_interleave(group, dim=1) for one in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) / math.sqrt(query.shape[-1])
    hidden = torch.ones(scores.shape[1:]).tril(key.shape[0] - query.shape[0]) == 0
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value).flatten(1)


def filled_cache(kv_heads: int, dtype: torch.dtype) -> PagedKVCache:
    cache = PagedKVCache(
        num_layers=2, num_blocks=32, block_size=BLOCK, num_kv_heads=kv_heads, head_dim=HEAD, dtype=dtype
    )
    generator = torch.Generator().manual_seed(0)
    for pages in cache.layers:
        pages.copy_(torch.randn(pages.shape, generator=generator))
    return cache


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_mixed_step(dtype: torch.dtype, kv_heads: int) -> None:
    """Two decode groups (one of a single run of blocks) and three chunks: fresh, continued, in a run."""
    cache = filled_cache(kv_heads, dtype)
    tables = {
        "a": [7, 3, 9],
        "b": [20, 1],
        "c": [11, 12],
        "d": [0, 2],
        "e": [30, 5, 28],
        "f": [14, 15, 16],
    }
    before = {"a": 40, "b": 16, "c": 20, "d": 0, "e": 35, "f": 30}  # rows already in the pages
    added = {"a": 1, "b": 1, "c": 1, "d": 19, "e": 5, "f": 18}
    slots = torch.tensor(
        [
            tables[name][row // BLOCK] * BLOCK + row % BLOCK
            for name in tables
            for row in range(before[name], before[name] + added[name])
        ]
    )
    metadata = AttentionMetadata(
        cache,
        slots,
        (
            DecodeGroup(
                0, 2, torch.tensor([7, 3, 9, 20, 1, 0]), 41, length_mask(torch.tensor([41, 17]), 41, dtype)
            ),
            DecodeGroup(2, 1, slice(11, 13), 21, None),
        ),
        (
            PrefillChunk(3, 19, 19, None),
            PrefillChunk(22, 5, 40, torch.tensor([30, 5, 28])),
            PrefillChunk(27, 18, 48, slice(14, 17)),
        ),
    )
    generator = torch.Generator().manual_seed(1)
    heads = torch.randn(45, 6 + 2 * kv_heads, HEAD, generator=generator).to(dtype)
    other_layer = cache.layers[0].clone()
    key_value = heads[:, 6:].view(45, 2, kv_heads, HEAD)
    output = paged_attention(1, heads[:, :6], key_value, metadata)
    assert torch.equal(cache.layers[0], other_layer)
    start = 0
    for name, table in tables.items():
        rows = slice(start, start + added[name])
        start = rows.stop
        stored = cache.layers[1][table].flatten(0, 1)[: before[name] + added[name]]
        assert torch.equal(stored[before[name] :], key_value[rows])
        expected = reference(heads[rows, :6], stored[:, 0], stored[:, 1])
        assert torch.allclose(output[rows].double(), expected, atol=TOLERANCE[dtype]), name


def test_decode_only_step() -> None:
    cache = filled_cache(2, torch.float32)
    group = DecodeGroup(0, 2, torch.tensor([4, 5, 8, 1]), 20, None)
    metadata = AttentionMetadata(cache, torch.tensor([5 * BLOCK + 3, BLOCK + 3]), (group,), ())
    heads = torch.randn(2, 8, HEAD)
    output = paged_attention(0, heads[:, :4], heads[:, 4:].view(2, 2, 2, HEAD), metadata)
    for row, table in enumerate(([4, 5], [8, 1])):
        stored = cache.layers[0][table].flatten(0, 1)[:20]
        expected = reference(heads[row : row + 1, :4], stored[:, 0], stored[:, 1])
        assert torch.allclose(output[row].double(), expected[0], atol=1e-5)


def test_stale_rows_behind_the_context_do_not_matter() -> None:
    cache = filled_cache(1, torch.float32)
    cache.layers[0][1, 4:] = 1e30
    group = DecodeGroup(0, 2, torch.tensor([0, 1]), 16, length_mask(torch.tensor([16, 4]), 16, torch.float32))
    metadata = AttentionMetadata(cache, torch.tensor([15, BLOCK + 3]), (group,), ())
    heads = torch.randn(2, 3, HEAD)
    output = paged_attention(0, heads[:, :1], heads[:, 1:].view(2, 2, 1, HEAD), metadata)
    stored = cache.layers[0][1, :4]
    assert torch.allclose(
        output[1:].double(), reference(heads[1:, :1], stored[:, 0], stored[:, 1]), atol=1e-5
    )


def test_clear_and_bytes() -> None:
    cache = filled_cache(2, torch.bfloat16)
    cache.clear([3, 5])
    assert not cache.layers[1][[3, 5]].any()
    assert cache.layers[1][4].any()
    size = PagedKVCache.bytes_per_block(
        num_layers=2, block_size=BLOCK, num_kv_heads=2, head_dim=HEAD, dtype=torch.bfloat16
    )
    assert size * 32 == sum(pages.nbytes for pages in cache.layers)
