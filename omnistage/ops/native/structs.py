"""The native kernels' arguments, field by field as in their headers (decoder.h, frames.h)."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_float, c_long, c_void_p


class Gated(Structure):
    """A gated MLP of `size` middle values; both weights packed."""

    _fields_ = (("gate_up", c_void_p), ("down", c_void_p), ("size", c_long))


class Layer(Structure):
    _fields_ = (
        ("attention_norm", c_void_p),
        ("qkv", c_void_p),
        ("qkv_bias", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("output", c_void_p),
        ("output_bias", c_void_p),
        ("mlp_norm", c_void_p),
        ("router", c_void_p),
        ("experts", POINTER(Gated)),
        ("shared", POINTER(Gated)),
    )


class Model(Structure):
    _fields_ = (
        ("layers", POINTER(Layer)),
        *((name, c_long) for name in ("num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim")),
        *((name, c_long) for name in ("num_experts", "num_active", "normalises")),
        ("eps", c_float),
    )


class Step(Structure):
    _fields_ = (
        ("pages", POINTER(c_void_p)),
        *((name, c_long) for name in ("block_size", "count", "table_width")),
        *((name, c_void_p) for name in ("slots", "tables", "lengths", "cosine", "sine")),
        *((name, c_void_p) for name in ("hidden", "captured")),
        *((name, c_long) for name in ("capture_layer", "sees_batch")),
    )


class Predictor(Structure):
    _fields_ = (
        ("model", Model),
        ("final_norm", c_void_p),
        ("heads", POINTER(c_void_p)),
        ("tables", POINTER(c_void_p)),
        *((name, c_long) for name in ("num_codes", "codebook_size")),
    )


class Strides(Structure):
    """Values between segments, rows and heads."""

    _fields_ = tuple((name, c_long) for name in ("segment", "row", "head"))


class Attention(Structure):
    _fields_ = (
        *((name, c_long) for name in ("segments", "num_queries", "num_keys", "num_heads", "num_kv_heads")),
        *((name, c_long) for name in ("head_dim", "offset")),
        ("scale", c_float),
        *((name, Strides) for name in ("query", "key", "value", "output")),
    )


class Sampling(Structure):
    _fields_ = tuple((name, c_void_p) for name in ("temperature", "top_k", "top_p", "uniforms"))


def pointers(addresses: list[int]) -> ctypes.Array[c_void_p]:
    """An array of addresses."""
    return (c_void_p * len(addresses))(*addresses)
