"""Attention of several queries at once over keys and values that are at hand.  Knows no pages."""

from __future__ import annotations

import ctypes

import torch
import torch.nn.functional as F
from torch import Tensor

from omnistage.ops.native.library import DTYPES, library
from omnistage.ops.native.structs import Attention, Strides


def attention(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = False) -> Tensor:
    """Softmax attention, scaled by the root of head_dim.

    query: [num_segments, num_heads, num_queries, head_dim].  key, value: [num_segments, num_kv_heads,
    num_keys, head_dim]; num_heads is a multiple of num_kv_heads.  Any strides, but the last is 1.
    is_causal: the last query sees all keys, the one before it one key less, and so on.
    Returns [num_segments, num_heads, num_queries, head_dim], with rows before heads in memory.
    """
    native = library() if query.device.type == "cpu" and query.dtype in DTYPES else None
    segments, num_heads, num_queries, head_dim = query.shape
    num_keys = key.shape[2]
    if native is None or not query.numel() or not all(each.stride(3) == 1 for each in (query, key, value)):
        return _with_torch(query, key, value, is_causal=is_causal)
    output = torch.empty(segments, num_queries, num_heads, head_dim, dtype=query.dtype).transpose(1, 2)
    shape = Attention(
        segments=segments,
        num_queries=num_queries,
        num_keys=num_keys,
        num_heads=num_heads,
        num_kv_heads=key.shape[1],
        head_dim=head_dim,
        offset=num_keys - num_queries if is_causal else -1,
        scale=head_dim**-0.5,
        **{
            name: Strides(segment=tensor.stride(0), row=tensor.stride(2), head=tensor.stride(1))
            for name, tensor in (("query", query), ("key", key), ("value", value), ("output", output))
        },
    )
    native.omnistage_attention(
        DTYPES[query.dtype],
        torch.get_num_threads(),
        ctypes.byref(shape),
        query.data_ptr(),
        key.data_ptr(),
        value.data_ptr(),
        output.data_ptr(),
    )
    return output


def _with_torch(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
    num_queries, num_keys = query.shape[2], key.shape[2]
    mask = None
    if is_causal and num_queries != num_keys:
        mask = torch.full((num_queries, num_keys), -torch.inf, dtype=query.dtype, device=query.device)
        mask = mask.triu_(diagonal=num_keys - num_queries + 1)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=is_causal and mask is None,
        enable_gqa=query.shape[1] != key.shape[1],
    )
