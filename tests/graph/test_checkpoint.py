from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from omnistage.errors import WeightsError
from omnistage.graph.checkpoint import (
    TensorInfo,
    check_shards,
    dtype_size,
    llm_shape,
    main_dtype,
    read_config,
    read_header,
    read_headers,
)

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


def shape_of(config, dtype="bfloat16"):
    return llm_shape(config, Path("config.json"), dtype=dtype)


def test_kv_bytes_of_a_known_model():
    shape = shape_of(CONFIG)
    assert shape.head_dim == 64
    # 30 layers, keys and values, 3 heads of 64, 2 bytes
    assert shape.kv_bytes_per_token() == 30 * 2 * 3 * 64 * 2 == 23040
    assert shape.kv_bytes_per_token("float32") == 2 * 23040
    assert (shape.value_bytes(), shape.value_bytes("float32")) == (2, 4)


def test_sizes_may_stand_in_a_text_config_and_be_left_out():
    config = {key: value for key, value in CONFIG.items() if key != "num_key_value_heads"}
    shape = shape_of({"text_config": {**config, "head_dim": 128}}, "float16")
    assert (shape.num_kv_heads, shape.head_dim, shape.dtype) == (9, 128, "float16")


def test_a_row_of_a_mixture_uses_some_experts_and_the_shared_one():
    mixture = {"num_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 100}
    assert shape_of(CONFIG).mlp_size == 1536
    assert shape_of({**CONFIG, **mixture}).mlp_size == 600
    assert shape_of({**CONFIG, **mixture, "shared_expert_intermediate_size": 50}).mlp_size == 650
    with pytest.raises(WeightsError, match="moe_intermediate_size is None"):
        shape_of({**CONFIG, "num_experts": 64, "num_experts_per_tok": 6})


@pytest.mark.parametrize(
    ("change", "message"),
    [({"num_hidden_layers": 0}, "num_hidden_layers is 0"), ({"vocab_size": None}, "vocab_size is None")],
)
def test_broken_sizes_are_named(change, message):
    with pytest.raises(WeightsError, match=f"config.json: {message}; a decoder needs"):
        shape_of({**CONFIG, **change})


def test_unknown_dtypes_are_named():
    with pytest.raises(WeightsError, match="dtype 'int4' is not one of"):
        dtype_size("int4")


@pytest.mark.parametrize(
    ("text", "message"), [(None, "does not exist"), ("{", "not valid JSON"), ("[1]", "not valid JSON")]
)
def test_broken_configs_are_named(tmp_path, text, message):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(WeightsError, match=rf"config\.json .*{message}"):
        read_config(tmp_path / "config.json")


def test_the_main_dtype_is_that_of_most_bytes():
    small, large = TensorInfo("F32", (2,), 8), TensorInfo("BF16", (8,), 16)
    assert main_dtype({"a": small, "b": large, "c": TensorInfo("I64", (9,), 72)}) == "bfloat16"
    assert main_dtype({"a": small}) == "float32"
    assert main_dtype({}) == "float32"


def write_shards(folder, count=3, *, index=True):
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    for number, name in enumerate(names):
        save_file({f"t{number}": np.zeros(2, np.float32)}, folder / name)
    if index:
        weight_map = {f"t{number}": name for number, name in enumerate(names)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return names


def test_whole_models_pass(tmp_path):
    check_shards(tmp_path)
    check_shards(tmp_path / "nowhere")
    write_shards(tmp_path)
    check_shards(tmp_path)
    (tmp_path / "single").mkdir()
    save_file({"a": np.zeros(3, np.float32)}, tmp_path / "single" / "model.safetensors")
    check_shards(tmp_path / "single")


def test_missing_shards_are_named_with_how_to_get_them(tmp_path):
    names = write_shards(tmp_path)
    (tmp_path / names[1]).unlink()
    with pytest.raises(WeightsError) as caught:
        check_shards(tmp_path)
    assert (
        f"lacks 1 of the 3 files that model.safetensors.index.json lists: {names[1]};" in caught.value.message
    )
    assert "omnistage fetch" in caught.value.message
    write_shards(tmp_path, 12)
    for path in tmp_path.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(
        WeightsError, match=r"lacks 12 of the 12 .*00008-of-00012\.safetensors, \.\.\.; fetch"
    ):
        check_shards(tmp_path)


def test_shards_without_their_index(tmp_path):
    names = write_shards(tmp_path, index=False)
    with pytest.raises(WeightsError, match=r"lacks 1 of the 4 files: model\.safetensors\.index\.json;"):
        check_shards(tmp_path)
    (tmp_path / names[2]).unlink()
    with pytest.raises(WeightsError, match=rf"lacks 2 .*{names[2]}"):
        check_shards(tmp_path)


def test_an_index_without_a_map(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": 1}}')
    with pytest.raises(WeightsError, match="no weight_map"):
        check_shards(tmp_path)
