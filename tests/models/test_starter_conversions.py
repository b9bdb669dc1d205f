"""The thinker's and the hearing model's conversions, against transformers' own reading and by hand."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from omnistage.errors import WeightsError
from omnistage.models.starter_hearing import convert_hearing, read_ctranslate2
from omnistage.models.starter_manifest import SMOLLM2, WHISPER_TINY
from omnistage.models.starter_thinker import _hub_name, _unpermute, convert_thinker

ITEM_TYPES = {np.dtype(np.float32): 0, np.dtype(np.int8): 1, np.dtype(np.int16): 2, np.dtype(np.float16): 4}


def write_ctranslate2(arrays, spec="WhisperSpec"):
    def string(text):
        return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"

    data = struct.pack("<I", 6) + string(spec) + struct.pack("<II", 3, len(arrays))
    for name, array in arrays.items():
        data += string(name) + struct.pack(f"<B{array.ndim}I", array.ndim, *array.shape)
        data += struct.pack("<BI", ITEM_TYPES[array.dtype], array.nbytes) + array.tobytes()
    return data + struct.pack("<I", 0)


def test_ctranslate2_variables_are_read_by_name():
    arrays = {
        "decoder/num_heads": np.array(6, np.int16),
        "encoder/conv1/weight": np.arange(12, dtype=np.float16).reshape(2, 2, 3),
    }
    data = write_ctranslate2(arrays)
    found = read_ctranslate2(data)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert np.array_equal(found[name], array)
    with pytest.raises(WeightsError, match=r"not readable at byte .*fetch it again"):
        read_ctranslate2(data[:60])
    with pytest.raises(WeightsError, match="'TransformerSpec'"):
        read_ctranslate2(write_ctranslate2(arrays, spec="TransformerSpec"))


def test_rotary_rows_are_put_back():
    """GGUF's writer turns rows (half, pair) of each head into (pair, half)."""
    weight = np.arange(2 * 8 * 3, dtype=np.float32).reshape(16, 3)  # two heads of eight rows
    written = weight.reshape(2, 2, 4, 3).swapaxes(1, 2).reshape(16, 3)
    assert not np.array_equal(written, weight)
    assert np.array_equal(_unpermute(written, 2), weight)


def test_tensor_names():
    assert _hub_name("blk.12.ffn_gate.weight") == "model.layers.12.mlp.gate_proj.weight"
    assert _hub_name("token_embd.weight") == "model.embed_tokens.weight"
    with pytest.raises(WeightsError, match=r"'output\.weight'"):
        _hub_name("output.weight")


@pytest.fixture(scope="module")
def sources(starter_dir):
    """The folder of a package's verified files."""
    downloads = starter_dir.parent.parent / "downloads"
    return lambda package: [
        downloads / f"{package.name}-{package.version}" / file.path for file in package.files
    ]


@pytest.mark.starter
def test_the_thinker_answers_and_its_tokenizer_round_trips(starter_dir):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(starter_dir / "thinker", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(starter_dir / "thinker")
    text = "Hello 12345 world, it's 3.14!\n\n  def f(x):\n\treturn 'x' hé 日本語 🎉"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


@pytest.mark.starter
def test_a_model_in_pieces_converts_like_the_whole(sources, tmp_path):
    model, config, tokenizer = sources(WHISPER_TINY)
    data = model.read_bytes()
    pieces = [tmp_path / "one", tmp_path / "two"]
    pieces[0].write_bytes(data[:1_000_000])
    pieces[1].write_bytes(data[1_000_000:])
    for name, parts in (("whole", [model]), ("pieces", pieces)):
        (tmp_path / name).mkdir()
        convert_hearing(parts, config, tokenizer, tmp_path / name)
    settings = json.loads((tmp_path / "pieces" / "config.json").read_text())
    assert (settings["d_model"], settings["encoder_layers"], settings["vocab_size"]) == (384, 4, 51864)
    whole, joined = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "pieces"))
    assert whole.keys() == joined.keys()
    assert all(torch.equal(whole[name], joined[name]) for name in whole)


@pytest.mark.starter
@pytest.mark.full
def test_the_thinker_equals_transformers_reading_of_the_gguf(sources, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (gguf,) = sources(SMOLLM2)
    convert_thinker(gguf, tmp_path)
    ours = load_file(tmp_path / "model.safetensors")
    try:
        from transformers import GgufConfig

        options = {"quantization_config": GgufConfig(dequantize=True)}
    except ImportError:  # older versions always dequantize
        options = {}
    theirs = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, **options
    ).state_dict()
    theirs.pop("lm_head.weight")
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(ours[name], tensor.bfloat16()), name
    tokenizer, reference = (
        AutoTokenizer.from_pretrained(tmp_path),
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name),
    )
    for text in (
        "Hello 12345 world, it's 3.14!\n\n  def f(x):\n\treturn 'x'",
        "<|im_start|>user\nhé 日本語 🎉<|im_end|>",
    ):
        assert tokenizer(text)["input_ids"] == reference(text)["input_ids"]
