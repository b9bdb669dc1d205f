"""Turns the starter's thinker, a GGUF file, into a directory in the hub's layout.

Reads the file's own metadata for the shape, the tokenizer and the chat template; knows nothing
of where the file came from or of the engine that will run it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnistage.errors import WeightsError

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader
    from numpy.typing import NDArray

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
CONTROL_TOKEN = 3  # token_type of special tokens in a GGUF vocabulary


def convert_thinker(gguf_path: Path, target: Path) -> None:
    """Write config, bf16 weights, tokenizer and chat template of a Llama-family GGUF into `target`.

    target: an existing, empty directory.  Tied embeddings: no lm_head is written.
    Raises WeightsError for another architecture, tokenizer or an unknown tensor.
    """
    from gguf import GGUFReader

    reader = GGUFReader(gguf_path)
    architecture = _field(reader, "general.architecture")
    if architecture != "llama":
        raise WeightsError(f"{gguf_path} holds architecture {architecture!r}; only 'llama' can be converted")
    config = _config(reader)
    _write_json(target / "config.json", config)
    special = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(target / "generation_config.json", special)
    _write_tokenizer(reader, target, config)
    _write_weights(reader, target, config)


def _field(reader: GGUFReader, name: str) -> Any:
    field = reader.get_field(name)
    if field is None:
        raise WeightsError(f"the GGUF file has no field {name!r}; it may be truncated, fetch it again")
    return field.contents()


def _config(reader: GGUFReader) -> dict[str, Any]:
    import numpy as np

    # Stored as float32; the shortest decimal that rounds to it is the number that was meant.
    epsilon = float(str(np.float32(_field(reader, "llama.attention.layer_norm_rms_epsilon"))))
    hidden_size = _field(reader, "llama.embedding_length")
    num_heads = _field(reader, "llama.attention.head_count")
    theta = _field(reader, "llama.rope.freq_base")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        "head_dim": hidden_size // num_heads,
        "max_position_embeddings": _field(reader, "llama.context_length"),
        "rms_norm_eps": epsilon,
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "vocab_size": _field(reader, "llama.vocab_size"),
        "tie_word_embeddings": True,
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _field(reader, "tokenizer.ggml.padding_token_id"),
        "dtype": "bfloat16",
    }


def _write_tokenizer(reader: GGUFReader, target: Path, config: dict[str, Any]) -> None:
    """A byte-level BPE whose numbers split into digits (the "smollm" pre-tokenizer)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = (_field(reader, "tokenizer.ggml.model"), _field(reader, "tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise WeightsError(f"the GGUF file has tokenizer {kind!r}; only ('gpt2', 'smollm') can be converted")
    tokens: list[str] = _field(reader, "tokenizer.ggml.tokens")
    types: list[int] = _field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(pair.split(" ")) for pair in _field(reader, "tokenizer.ggml.merges")]
    unknown = tokens[_field(reader, "tokenizer.ggml.unknown_token_id")]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)}, merges=merges, unk_token=unknown
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(target / "tokenizer.json"))

    template = _field(reader, "tokenizer.chat_template")
    (target / "chat_template.jinja").write_text(template, encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[config["bos_token_id"]],
        "eos_token": tokens[config["eos_token_id"]],
        "pad_token": tokens[config["pad_token_id"]],
        "unk_token": unknown,
        "additional_special_tokens": special,
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    _write_json(target / "tokenizer_config.json", settings)


def _write_weights(reader: GGUFReader, target: Path, config: dict[str, Any]) -> None:
    import torch
    from gguf.quants import dequantize
    from safetensors.torch import save_file

    weights: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        array = dequantize(tensor.data, tensor.tensor_type)  # float32
        if ".attn_q." in tensor.name:
            array = _unpermute(array, config["num_attention_heads"])
        elif ".attn_k." in tensor.name:
            array = _unpermute(array, config["num_key_value_heads"])
        weights[_hub_name(tensor.name)] = torch.from_numpy(array.copy()).to(torch.bfloat16)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


def _unpermute(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Undo the row order GGUF gives rotary projections.

    GGUF pairs neighbouring rows (2i, 2i + 1) of a head; the hub's layout pairs row i with
    row i + head_dim / 2.  weight: [num_heads * head_dim, hidden].
    """
    num_rows, width = weight.shape
    pairs = weight.reshape(num_heads, num_rows // num_heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(num_rows, width)


def _hub_name(name: str) -> str:
    if name in OTHER_NAMES:
        return OTHER_NAMES[name]
    block, layer, kind, suffix = [*name.split("."), "", "", ""][:4]
    if block != "blk" or kind not in LAYER_NAMES:
        raise WeightsError(f"the GGUF file holds a tensor {name!r} that a tied Llama model does not have")
    return f"model.layers.{layer}.{LAYER_NAMES[kind]}.{suffix}"


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
