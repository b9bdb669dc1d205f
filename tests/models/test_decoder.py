"""Hidden states and logits equal transformers', for every variant config.json can ask for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from omnistage.errors import WeightsError
from omnistage.models.decoder import DecoderConfig, load_decoder
from omnistage.ops.attention import AttentionMetadata, PrefillChunk
from omnistage.ops.rotary import RotaryScaling

BASE = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama-mha-tied": (
        LlamaForCausalLM,
        LlamaConfig,
        {"num_key_value_heads": 4, "tie_word_embeddings": True, "rms_norm_eps": 0.1},
    ),
    "llama-biases": (
        LlamaForCausalLM,
        LlamaConfig,
        {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
    ),
    "llama-head-size": (LlamaForCausalLM, LlamaConfig, {"head_dim": 40}),
    "llama3-rope": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3}),
    "linear-rope": (
        LlamaForCausalLM,
        LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}},
    ),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen2-tied": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True, "num_attention_heads": 8}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 32}),
    "qwen3-bias-tied": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True},
    ),
}


def build(variant: str, directory: Path) -> Any:
    model_class, config_class, overrides = VARIANTS[variant]
    model = model_class(config_class(**{**BASE, **overrides})).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.15 * noise)
    model.save_pretrained(directory)
    return model


def logits_in_chunks(directory: Path, token_ids: list[int], dtype: torch.dtype) -> torch.Tensor:
    """All rows' logits, computed as one fresh chunk of 20 rows and one continuing it."""
    decoder = load_decoder(directory, dtype=dtype)
    cache = decoder.new_kv_cache(8, 16)
    table = torch.tensor([5, 2, 7])
    results = []
    for start, stop in ((0, 20), (20, len(token_ids))):
        positions = torch.arange(start, stop)
        chunk = PrefillChunk(0, stop - start, stop, table if start else None)
        metadata = AttentionMetadata(cache, table[positions // 16] * 16 + positions % 16, (), (chunk,))
        with torch.inference_mode():
            hidden = decoder.embed(torch.tensor(token_ids[start:stop]))
            results.append(decoder.logits(decoder.forward(hidden, positions, metadata)))
    return torch.cat(results)


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_logits(variant: str, tmp_path: Path) -> None:
    model = build(variant, tmp_path)
    token_ids = torch.randint(0, 160, (45,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([token_ids])).logits[0]
    result = logits_in_chunks(tmp_path, token_ids, torch.float32)
    assert torch.allclose(result, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("variant", ["llama", "qwen2", "qwen3"])
def test_bfloat16(variant: str, tmp_path: Path) -> None:
    """As near to float32 as the reference's own bfloat16 is."""
    model = build(variant, tmp_path)
    token_ids = torch.randint(0, 160, (45,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.no_grad():
        exact = model(torch.tensor([token_ids])).logits[0]
        rounded = model.to(torch.bfloat16)(torch.tensor([token_ids])).logits[0]
    result = logits_in_chunks(tmp_path, token_ids, torch.bfloat16)
    assert (result - exact).std() < 1.3 * (rounded - exact).std()


CONFIG = {**BASE, "model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 10000.0}


def test_both_spellings_of_rope() -> None:
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    old = DecoderConfig.from_json({**CONFIG, "rope_theta": 1000.0, "rope_scaling": scaling})
    new = DecoderConfig.from_json(
        {key: value for key, value in CONFIG.items() if key != "rope_theta"} | {"rope_parameters": LLAMA3}
    )
    assert old == new
    assert old.rope_theta == 1000.0
    assert old.rope_scaling == RotaryScaling("llama3", 8.0, 1.0, 4.0, 64)
    older = DecoderConfig.from_json({**CONFIG, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert older.rope_scaling == RotaryScaling("linear", 2.0)
    assert DecoderConfig.from_json({**CONFIG, "rope_scaling": None}).rope_scaling == RotaryScaling()


def test_family_comes_from_either_name() -> None:
    by_type = DecoderConfig.from_json({**CONFIG, "model_type": "qwen3"})
    by_name = DecoderConfig.from_json(
        {**CONFIG, "architectures": ["Qwen3ForCausalLM"], "model_type": "custom"}
    )
    assert by_type == by_name
    assert by_type.qk_norm


def test_defaults() -> None:
    config = DecoderConfig.from_json({key: value for key, value in CONFIG.items() if "key_value" not in key})
    assert (config.num_kv_heads, config.head_dim, config.tie_word_embeddings) == (4, 16, False)
    assert DecoderConfig.from_json({**CONFIG, "eos_token_id": [3, 4]}).eos_token_ids == (3, 4)
    assert DecoderConfig.from_json({**CONFIG, "eos_token_id": 3}).eos_token_ids == (3,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"use_sliding_window": True}, "sliding"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_theta": None}, "rope_theta"),
    ],
)
def test_unsupported_configs_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        DecoderConfig.from_json({**CONFIG, **change})


def test_missing_key_is_named() -> None:
    with pytest.raises(WeightsError, match="intermediate_size"):
        DecoderConfig.from_json({key: value for key, value in CONFIG.items() if key != "intermediate_size"})


def test_faults_in_a_checkpoint(tmp_path: Path) -> None:
    build("llama-mha-tied", tmp_path)
    path = tmp_path / "model.safetensors"
    good = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    faults = {
        f"{name} is missing": {key: value for key, value in good.items() if key != name},
        "surprise": {**good, "model.surprise": torch.zeros(1)},
        rf"{name} .*\[2, 2\]": {**good, name: torch.zeros(2, 2)},
        f"{name} .*NaN": {**good, name: torch.full_like(good[name], float("nan"))},
    }
    for message, tensors in faults.items():
        save_file({key: value.clone() for key, value in tensors.items()}, path)
        with pytest.raises(WeightsError, match=message):
            load_decoder(tmp_path, dtype=torch.float32)
    extra = {"lm_head.weight": good["model.embed_tokens.weight"].clone()}  # tied, stored all the same
    extra["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    save_file({**{key: value.clone() for key, value in good.items()}, **extra}, path)
    decoder = load_decoder(tmp_path, dtype=torch.float32)
    table = good["model.embed_tokens.weight"].nbytes
    assert decoder.weight_bytes == sum(tensor.nbytes for tensor in good.values()) + table


def test_prefix_selects_a_part(tmp_path: Path) -> None:
    model = build("qwen2", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {f"thinker.{name}": value.clone() for name, value in load_file(path).items()}
    save_file({**tensors, "talker.weight": torch.zeros(3)}, path)
    decoder = load_decoder(tmp_path, dtype=torch.float32, prefix="thinker.")
    table = model.get_input_embeddings().weight
    assert torch.equal(decoder.embed(torch.tensor([3, 159])), table[[3, 159]])


def test_end_of_sequence_ids_of_the_generation_config_win(tmp_path: Path) -> None:
    build("llama", tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert load_decoder(tmp_path, dtype=torch.float32).config.eos_token_ids == (7, 9)
