"""What a checkpoint needs, from the headers of its safetensors files and its config.json alone.

The file format: 8 bytes, little-endian, the length of a JSON header; the header maps tensor names to
dtype, shape and data_offsets (github.com/huggingface/safetensors, README).  Reads no tensor data.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
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
_DTYPE_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_NUMBERED = re.compile(r"-(\d+)-of-(\d+)\.safetensors$")


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
        return math.prod(self.shape) * dtype_size(dtype)


@dataclass(frozen=True)
class LlmShape:
    """The sizes of a decoder that memory depends on.

    mlp_size: width of a row's MLP; in a mixture, of the experts that a row uses, together.
    dtype: of weights and cache where the pipeline does not say.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    mlp_size: int
    vocab_size: int
    max_model_len: int
    dtype: str

    def kv_bytes_per_token(self, dtype: str = "auto") -> int:
        """Keys and values of all layers for one token, in bytes."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.value_bytes(dtype)

    def value_bytes(self, dtype: str = "auto") -> int:
        """Bytes of one activation; dtype "auto" is the checkpoint's."""
        return dtype_size(self.dtype if dtype == "auto" else dtype)


def dtype_size(dtype: str) -> int:
    """Bytes of a value.  Raises WeightsError for a name that no decoder computes in."""
    size = _DTYPE_SIZES.get(dtype)
    if size is None:
        raise WeightsError(f"dtype {dtype!r} is not one of {', '.join(_DTYPE_SIZES)}; set the stage's dtype")
    return size


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


def check_shards(folder: Path) -> None:
    """See that a folder of shards has every file its index lists, and the index.

    A folder of a single file, or of none, is left to whoever reads it.
    Raises WeightsError that names the files.
    """
    index = folder / INDEX_FILE
    present = sorted(path.name for path in folder.glob("*.safetensors"))
    if index.is_file():
        wanted = sorted(set(shard_names(index).values()))
        missing = [name for name in wanted if not (folder / name).is_file()]
        listed = f"{len(wanted)} files that {INDEX_FILE} lists"
    elif SINGLE_FILE not in present and any(_NUMBERED.search(name) for name in present):
        wanted = [INDEX_FILE, *_numbered(present)]
        missing = [name for name in wanted if not (folder / name).is_file()]
        listed = f"{len(wanted)} files"
    else:
        return
    if missing:
        shown = ", ".join(missing[:8]) + (", ..." if len(missing) > 8 else "")
        raise WeightsError(
            f"{folder} lacks {len(missing)} of the {listed}: {shown}; fetch the model again (a model of the "
            "hub: `omnistage fetch ORG/NAME`) or copy the missing files there"
        )


def shard_names(index: Path) -> dict[str, str]:
    """Tensor name -> file name, of a checkpoint in several files.  Raises WeightsError."""
    names = read_config(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise WeightsError(f"{index} has no weight_map; fetch the model again")
    return names


def _numbered(present: list[str]) -> list[str]:
    """All names of the series that the numbered ones belong to."""
    found: dict[str, None] = {}
    for name in present:
        match = _NUMBERED.search(name)
        if match is not None:
            count, width = int(match[2]), len(match[1])
            stem = name[: match.start()]
            for number in range(1, count + 1):
                found[f"{stem}-{number:0{width}d}-of-{match[2]}.safetensors"] = None
    return list(found)


def main_dtype(tensors: Mapping[str, TensorInfo]) -> str:
    """The name of the float type that most bytes are stored in; "float32" if there are none."""
    sizes: dict[str, int] = {}
    for tensor in tensors.values():
        if tensor.dtype in _DTYPE_NAMES:
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.num_bytes
    return _DTYPE_NAMES[max(sizes, key=lambda dtype: sizes[dtype])] if sizes else "float32"


def read_config(path: Path) -> dict[str, Any]:
    """The object in a JSON file.  Raises WeightsError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        raise WeightsError(f"{path} does not exist; give a directory in the hub's layout") from None
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise WeightsError(f"{path} is not valid JSON: {error}; fetch the model again") from None


def llm_shape(config: Mapping[str, Any], where: Path, *, dtype: str) -> LlmShape:
    """The decoder's sizes from its configuration, in its text_config if it has one.

    where: the file, for messages.  dtype: of the weights as stored.  Raises WeightsError.
    """
    nested = config.get("text_config")
    text = nested if isinstance(nested, Mapping) else config
    num_heads = _integer(where, text, "num_attention_heads")
    hidden_size = _integer(where, text, "hidden_size")
    dtype_size(dtype)
    return LlmShape(
        num_layers=_integer(where, text, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_integer(where, text, "num_key_value_heads", num_heads),
        head_dim=_integer(where, text, "head_dim", hidden_size // num_heads),
        hidden_size=hidden_size,
        mlp_size=_mlp_size(where, text, hidden_size),
        vocab_size=_integer(where, text, "vocab_size"),
        max_model_len=_integer(where, text, "max_position_embeddings"),
        dtype=dtype,
    )


def _mlp_size(where: Path, text: Mapping[str, Any], hidden_size: int) -> int:
    if not (text.get("num_local_experts") or text.get("num_experts")):
        return _integer(where, text, "intermediate_size", 4 * hidden_size)
    size = _integer(where, text, "num_experts_per_tok") * _integer(where, text, "moe_intermediate_size")
    shared = text.get("shared_expert_intermediate_size")
    return size + (shared if isinstance(shared, int) else 0)


def _integer(path: Path, config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, int) or value < 1:
        raise WeightsError(f"{path}: {key} is {value!r}; a decoder needs a whole number of at least 1")
    return value
