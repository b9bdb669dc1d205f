from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from omnistage.errors import WeightsError
from omnistage.graph.checkpoint import read_header, read_headers, read_llm_shape

CONFIG = {
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
}


def raw(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def test_headers_agree_with_the_reference_writer(tmp_path):
    arrays = {
        "a": np.zeros((3, 4), np.float32),
        "b": np.zeros((5,), np.float16),
        "c": np.zeros((2, 2), np.int64),
        "scalar": np.zeros((), np.float32),
        "empty": np.zeros((0, 7), np.float32),
    }
    save_file(arrays, tmp_path / "x.safetensors", metadata={"format": "pt"})
    tensors = read_header(tmp_path / "x.safetensors")
    assert {name: tensor.shape for name, tensor in tensors.items()} == {n: a.shape for n, a in arrays.items()}
    assert {name: tensor.num_bytes for name, tensor in tensors.items()} == {
        n: a.nbytes for n, a in arrays.items()
    }
    assert tensors["b"].loaded_bytes("auto") == 10
    assert tensors["b"].loaded_bytes("float32") == 20
    assert tensors["a"].loaded_bytes("bfloat16") == 24
    assert tensors["c"].loaded_bytes("bfloat16") == 32


def test_shards_are_added_up(tmp_path):
    save_file({"a": np.zeros(3, np.float32)}, tmp_path / "model-1.safetensors")
    save_file({"b": np.zeros(4, np.float32)}, tmp_path / "model-2.safetensors")
    assert sum(tensor.num_bytes for tensor in read_headers(tmp_path).values()) == 28


def test_types_the_table_does_not_know_count_as_stored(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(
        raw({"w": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}, b"1234")
    )
    assert read_header(tmp_path / "x.safetensors")["w"].loaded_bytes("float32") == 4


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no safetensors header"),
        (b"1234567", "has no safetensors header"),
        ((10**12).to_bytes(8, "little") + b"{}", "has no safetensors header"),
        (raw(b"not json"), "malformed"),
        (raw(b'{"a": "\xff"}'), "malformed"),
        (raw([]), "malformed"),
        (raw({"a": {"dtype": "F32"}}), "malformed"),
        (raw({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234"), "a has 4 bytes, not 8"),
        (raw({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, b"1234"), "is truncated: a ends"),
    ],
)
def test_broken_files_are_named(tmp_path, content, message):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(WeightsError, match=message):
        read_header(path)


def test_a_folder_without_weights_says_to_fetch(tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(WeightsError, match=r"no \*\.safetensors in .*; fetch the model's weights first"):
            read_headers(folder)


def test_kv_bytes_of_a_known_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    shape = read_llm_shape(tmp_path)
    assert shape.head_dim == 64
    # 30 layers, keys and values, 3 heads of 64, 2 bytes
    assert shape.kv_bytes_per_token() == 30 * 2 * 3 * 64 * 2 == 23040
    assert shape.kv_bytes_per_token("float32") == 2 * 23040


def test_sizes_may_stand_in_a_text_config_and_be_left_out(tmp_path):
    config = {key: value for key, value in CONFIG.items() if key not in ("num_key_value_heads", "dtype")}
    (tmp_path / "config.json").write_text(
        json.dumps({"text_config": {**config, "head_dim": 128}, "torch_dtype": "float16"})
    )
    shape = read_llm_shape(tmp_path)
    assert (shape.num_kv_heads, shape.head_dim, shape.dtype) == (9, 128, "float16")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ("{", "not valid JSON"),
        (json.dumps({**CONFIG, "num_hidden_layers": 0}), "num_hidden_layers is 0"),
        (json.dumps({**CONFIG, "vocab_size": None}), "vocab_size is None"),
        (json.dumps({**CONFIG, "dtype": "int4"}), "dtype 'int4' is not one of"),
    ],
)
def test_broken_configs_are_named(tmp_path, text, message):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(WeightsError, match=message):
        read_llm_shape(tmp_path)
