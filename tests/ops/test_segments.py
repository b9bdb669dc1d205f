"""Attention by the native kernels and by torch equals softmax in double precision."""

from __future__ import annotations

import pytest
import torch

from omnistage.ops import segments as module
from omnistage.ops.segments import attention

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def reference(query, key, value, is_causal):
    group = query.shape[1] // key.shape[1]
    key, value = (each.double().repeat_interleave(group, dim=1) for each in (key, value))
    scores = query.double() @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    if is_causal:
        num_queries, num_keys = scores.shape[-2:]
        hidden = torch.ones(num_queries, num_keys, dtype=torch.bool).triu(num_keys - num_queries + 1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores.softmax(-1) @ value


def tensors(segments, num_queries, num_keys, heads, kv_heads, size, dtype, seed=0):
    """Rows before heads in memory, keys and values side by side as in the pages."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(segments, num_queries, heads, size, generator=generator).to(dtype)
    pair = torch.randn(segments, num_keys, 2, kv_heads, size, generator=generator).to(dtype)
    key, value = pair.permute(2, 0, 3, 1, 4).unbind(0)
    return query.transpose(1, 2), key, value


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("segments", "num_queries", "num_keys", "heads", "kv_heads", "size"),
    [
        (1, 1, 1, 1, 1, 2),
        (3, 7, 7, 4, 4, 16),
        (1, 5, 70, 6, 2, 24),
        (2, 131, 131, 3, 3, 80),
        (1, 64, 200, 8, 1, 128),
        (1, 3, 300, 2, 1, 33),
    ],
)
def test_equals_softmax(
    dtype, is_native, is_causal, segments, num_queries, num_keys, heads, kv_heads, size, monkeypatch
):
    if not is_native:
        monkeypatch.setattr(module, "library", lambda: None)
    query, key, value = tensors(segments, num_queries, num_keys, heads, kv_heads, size, dtype)
    found = attention(query, key, value, is_causal=is_causal)
    assert found.shape == query.shape
    assert found.dtype == dtype
    expected = reference(query, key, value, is_causal)
    torch.testing.assert_close(found.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_threads_and_neighbours_change_nothing(num_threads):
    query, key, value = tensors(3, 40, 40, 4, 2, 16, torch.float32)
    whole = attention(query, key, value)
    torch.set_num_threads(num_threads)
    try:
        assert torch.equal(attention(query, key, value), whole)
        for index in range(3):
            part = slice(index, index + 1)
            assert torch.equal(attention(query[part], key[part], value[part]), whole[part])
        assert torch.equal(attention(query[:, :, 13:20], key, value), whole[:, :, 13:20])
    finally:
        torch.set_num_threads(1)


def test_large_scores_do_not_overflow():
    query, key, value = tensors(1, 9, 50, 2, 2, 16, torch.float32)
    found = attention(300 * query, key, value)
    torch.testing.assert_close(
        found.double(), reference(300 * query, key, value, False), atol=1e-4, rtol=1e-4
    )


def test_nan_stays_where_it_is():
    """A damaged row harms its own result and nobody else's."""
    query, key, value = tensors(1, 6, 6, 2, 2, 16, torch.float32)
    whole = attention(query, key, value)
    query = query.clone()
    query[0, 1, 3] = torch.nan
    found = attention(query, key, value)
    assert found[0, 1, 3].isnan().all()
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[1, 3] = False
    assert torch.equal(found[0][mask], whole[0][mask])


def test_no_rows():
    query, key, value = tensors(1, 0, 5, 2, 2, 16, torch.float32)
    assert attention(query, key, value).shape == (1, 2, 0, 16)
