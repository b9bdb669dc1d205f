"""What a checkpoint needs, from the headers of its safetensors files and its config.json alone.

The file format: 8 bytes, little-endian, the length of a JSON header; the header maps tensor names to
dtype, shape and data_offsets (github.com/huggingface/safetensors, README).  Reads no tensor data.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from omnistage.errors import WeightsError

_MAX_HEADER = 100 * 10**6  # bytes; the format's own limit
_FLOAT_SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_SIZES = {
    **_FLOAT_SIZES,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U64": 8,
    "U32": 4,
    "U16": 2,
    "U8": 1,
    "BOOL": 1,
}
_DTYPE_SIZES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True)
class TensorInfo:
    """dtype: the format's name, such as "BF16".  num_bytes: as stored."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int

    def loaded_bytes(self, dtype: str) -> int:
        """Bytes once loaded as "float32" or "bfloat16"; "auto" and tensors of integers stay as stored."""
        if dtype == "auto" or self.dtype not in _FLOAT_SIZES:
            return self.num_bytes
        return math.prod(self.shape) * _DTYPE_SIZES[dtype]


@dataclass(frozen=True)
class LlmShape:
    """The sizes of a decoder that memory depends on."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_model_len: int
    dtype: str

    def kv_bytes_per_token(self, dtype: str = "auto") -> int:
        """Keys and values of all layers for one token, in bytes; dtype "auto" is the checkpoint's."""
        size = _DTYPE_SIZES[self.dtype if dtype == "auto" else dtype]
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * size


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file.  Raises WeightsError if it is truncated or malformed."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise WeightsError(f"{path} has no safetensors header ({size} bytes); fetch it again")
        text = file.read(length)
    try:
        entries = msgspec.json.decode(text, type=dict[str, dict[str, Any]])
        entries.pop("__metadata__", None)
        header = {name: msgspec.convert(entry, _Entry) for name, entry in entries.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise WeightsError(f"{path} has a malformed safetensors header ({error}); fetch it again") from None
    tensors = {}
    for name, entry in header.items():
        start, end = entry.data_offsets
        num_bytes = end - start
        expected = math.prod(entry.shape) * _SIZES.get(entry.dtype, 0)
        if not 0 <= start <= end or (entry.dtype in _SIZES and num_bytes != expected):
            raise WeightsError(f"{path}: {name} has {num_bytes} bytes, not {expected}; fetch it again")
        if 8 + length + end > size:
            raise WeightsError(
                f"{path} is truncated: {name} ends at byte {8 + length + end} of {size}; fetch it again"
            )
        tensors[name] = TensorInfo(entry.dtype, entry.shape, num_bytes)
    return tensors


def read_headers(folder: Path) -> dict[str, TensorInfo]:
    """The tensors of all safetensors files in a folder.  Raises WeightsError if there are none."""
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not files:
        raise WeightsError(f"no *.safetensors in {folder}; fetch the model's weights first")
    return {name: tensor for file in files for name, tensor in read_header(file).items()}


def read_llm_shape(folder: Path) -> LlmShape:
    """The decoder's sizes from config.json, in its text_config if it has one.  Raises WeightsError."""
    path = folder / "config.json"
    try:
        config = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise WeightsError(f"{os.fspath(path)} cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise WeightsError(f"{path} is not valid JSON: {error}") from None
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    num_heads = _integer(path, text, "num_attention_heads")
    hidden_size = _integer(path, text, "hidden_size")
    dtype = next(
        (where[key] for where in (text, config) for key in ("dtype", "torch_dtype") if where.get(key)),
        "float32",
    )
    if dtype not in _DTYPE_SIZES:
        raise WeightsError(f"{path}: dtype {dtype!r} is not one of {', '.join(_DTYPE_SIZES)}")
    return LlmShape(
        num_layers=_integer(path, text, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_integer(path, text, "num_key_value_heads", num_heads),
        head_dim=_integer(path, text, "head_dim", hidden_size // num_heads),
        hidden_size=hidden_size,
        intermediate_size=_integer(path, text, "intermediate_size", 4 * hidden_size),
        vocab_size=_integer(path, text, "vocab_size"),
        max_model_len=_integer(path, text, "max_position_embeddings"),
        dtype=dtype,
    )


def _integer(path: Path, config: dict[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or value < 1:
        raise WeightsError(f"{path}: {key} is {value!r}; a decoder needs a whole number of at least 1")
    return value
