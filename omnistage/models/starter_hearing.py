"""Turns the starter's hearing model, Whisper in CTranslate2's format, into the hub's layout.

Reads model.bin (which may come in several pieces), config.json and tokenizer.json; knows nothing of
where the files came from or of the module that will run them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from omnistage.errors import WeightsError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Arrays = dict[str, NDArray[Any]]

ITEM_TYPES: dict[int, type[np.generic]] = {
    0: np.float32,
    1: np.int8,
    2: np.int16,
    3: np.int32,
    4: np.float16,
}
SAMPLE_RATE, WINDOW_SECONDS, NUM_FFT, HOP = 16_000, 30, 400, 160


def convert_hearing(
    model_pieces: Sequence[Path], config_path: Path, tokenizer_path: Path, target: Path
) -> None:
    """Write config, generation_config, float32 weights and tokenizer of a Whisper into `target`.

    model_pieces: model.bin, or the files whose concatenation it is.  target: an existing, empty
    directory.  Raises WeightsError if the file is truncated or not a Whisper.
    """
    from tokenizers import Tokenizer

    arrays = read_ctranslate2(b"".join(piece.read_bytes() for piece in model_pieces))
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    source_config = json.loads(config_path.read_text(encoding="utf-8"))
    config = _config(arrays, tokenizer)
    (target / "tokenizer.json").write_bytes(tokenizer_path.read_bytes())
    _write_json(target / "config.json", config)
    _write_json(target / "generation_config.json", _generation_config(config, source_config, tokenizer))
    _write_json(target / "preprocessor_config.json", _preprocessor_config(config))
    _write_weights(arrays, config, target)


def read_ctranslate2(data: bytes) -> Arrays:
    """The variables of a CTranslate2 model.bin (version 6), by name, as views of `data`.

    Layout: version, spec name, revision, then per variable its name, shape, item type and bytes;
    strings are length-prefixed and end in NUL.  Raises WeightsError if the file is cut short.
    """
    offset = 0

    def number(kind: str) -> int:
        nonlocal offset
        (value,) = struct.unpack_from("<" + kind, data, offset)
        offset += struct.calcsize("<" + kind)
        return int(value)

    def string() -> str:
        nonlocal offset
        length = number("H")
        offset += length
        return data[offset - length : offset - 1].decode()

    try:
        number("I")
        spec = string()
        if spec != "WhisperSpec":
            raise WeightsError(f"model.bin holds a {spec!r}; expected 'WhisperSpec'")
        number("I")
        arrays: Arrays = {}
        for _ in range(number("I")):
            name = string()
            shape = [number("I") for _ in range(number("B"))]
            item_type = ITEM_TYPES[number("B")]
            num_bytes = number("I")
            view = np.frombuffer(data, item_type, num_bytes // item_type(0).itemsize, offset)
            arrays[name] = view.reshape(shape)
            offset += num_bytes
    except (struct.error, ValueError, KeyError) as error:
        raise WeightsError(
            f"model.bin of {len(data)} bytes is not readable at byte {offset} ({error}); fetch it again"
        ) from error
    return arrays


def _num_layers(arrays: Arrays, side: str) -> int:
    suffix = "/ffn/linear_0/weight"
    return sum(name.startswith(f"{side}/layer_") and name.endswith(suffix) for name in arrays)


def _config(arrays: Arrays, tokenizer: Tokenizer) -> dict[str, Any]:
    vocab_size, hidden = arrays["decoder/embeddings/weight"].shape
    end, start = tokenizer.token_to_id("<|endoftext|>"), tokenizer.token_to_id("<|startoftranscript|>")
    config: dict[str, Any] = {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "activation_function": "gelu",
        "vocab_size": vocab_size,
        "d_model": hidden,
        "num_mel_bins": arrays["encoder/conv1/weight"].shape[1],
        "max_source_positions": arrays["encoder/position_encodings/encodings"].shape[0],
        "max_target_positions": arrays["decoder/position_encodings/encodings"].shape[0],
        "scale_embedding": False,
        "bos_token_id": start,
        "decoder_start_token_id": start,
        "eos_token_id": end,
        "pad_token_id": end,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
    for side in ("encoder", "decoder"):
        config[f"{side}_layers"] = _num_layers(arrays, side)
        config[f"{side}_attention_heads"] = int(arrays[f"{side}/num_heads"])
        config[f"{side}_ffn_dim"] = arrays[f"{side}/layer_0/ffn/linear_0/weight"].shape[0]
    return config


def _generation_config(
    config: dict[str, Any], source_config: dict[str, Any], tokenizer: Tokenizer
) -> dict[str, Any]:
    """What the decode loop needs to know: suppressed tokens, prompt tokens, no-speech token."""
    # The English-only models have one language token fewer, which their vocabulary size shows.
    is_multilingual = config["vocab_size"] >= 51865
    languages = {
        token: index
        for token, index in tokenizer.get_vocab().items()
        if index in set(source_config.get("lang_ids", ()))
    }
    generation: dict[str, Any] = {
        "is_multilingual": is_multilingual,
        "suppress_tokens": source_config["suppress_ids"],
        "begin_suppress_tokens": source_config["suppress_ids_begin"],
        "no_timestamps_token_id": tokenizer.token_to_id("<|notimestamps|>"),
        "prev_sot_token_id": tokenizer.token_to_id("<|startofprev|>"),
        "max_length": config["max_target_positions"],
        "return_timestamps": False,
    }
    for name in ("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id"):
        generation[name] = config[name]
    no_speech = tokenizer.token_to_id("<|nospeech|>") or tokenizer.token_to_id("<|nocaptions|>")
    generation["no_speech_token_id"] = no_speech
    if is_multilingual:
        generation["lang_to_id"] = dict(sorted(languages.items(), key=lambda item: item[1]))
        generation["task_to_id"] = {
            task: tokenizer.token_to_id(f"<|{task}|>") for task in ("transcribe", "translate")
        }
    return generation


def _preprocessor_config(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": config["num_mel_bins"],
        "sampling_rate": SAMPLE_RATE,
        "chunk_length": WINDOW_SECONDS,
        "n_fft": NUM_FFT,
        "hop_length": HOP,
        "padding_value": 0.0,
        "return_attention_mask": False,
    }


def _write_weights(arrays: Arrays, config: dict[str, Any], target: Path) -> None:
    import torch
    from safetensors.torch import save_file

    weights: dict[str, NDArray[Any]] = {}
    for side in ("encoder", "decoder"):
        prefix = f"model.{side}"
        weights[f"{prefix}.embed_positions.weight"] = arrays[f"{side}/position_encodings/encodings"]
        _norm(weights, f"{prefix}.layer_norm", arrays, f"{side}/layer_norm")
        for layer in range(config[f"{side}_layers"]):
            _layer(weights, f"{prefix}.layers.{layer}", arrays, f"{side}/layer_{layer}")
    weights["model.decoder.embed_tokens.weight"] = arrays["decoder/embeddings/weight"]
    for name in ("conv1", "conv2"):
        _linear(weights, f"model.encoder.{name}", arrays, f"encoder/{name}")
    tensors = {name: torch.from_numpy(array.astype(np.float32)) for name, array in weights.items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


def _layer(weights: Arrays, name: str, arrays: Arrays, source: str) -> None:
    """One encoder or decoder layer.  CTranslate2 stacks q, k, v (or k, v of cross-attention)."""
    _attention(weights, f"{name}.self_attn", arrays, f"{source}/self_attention", ("q", "k", "v"))
    _norm(weights, f"{name}.self_attn_layer_norm", arrays, f"{source}/self_attention/layer_norm")
    if f"{source}/attention/linear_0/weight" in arrays:
        cross, cross_source = f"{name}.encoder_attn", f"{source}/attention"
        _linear(weights, f"{cross}.q_proj", arrays, f"{cross_source}/linear_0")
        _stacked(weights, cross, arrays, f"{cross_source}/linear_1", ("k", "v"))
        _linear(weights, f"{cross}.out_proj", arrays, f"{cross_source}/linear_2")
        _norm(weights, f"{name}.encoder_attn_layer_norm", arrays, f"{cross_source}/layer_norm")
    _linear(weights, f"{name}.fc1", arrays, f"{source}/ffn/linear_0")
    _linear(weights, f"{name}.fc2", arrays, f"{source}/ffn/linear_1")
    _norm(weights, f"{name}.final_layer_norm", arrays, f"{source}/ffn/layer_norm")


def _attention(weights: Arrays, name: str, arrays: Arrays, source: str, projections: Sequence[str]) -> None:
    _stacked(weights, name, arrays, f"{source}/linear_0", projections)
    _linear(weights, f"{name}.out_proj", arrays, f"{source}/linear_1")


def _stacked(weights: Arrays, name: str, arrays: Arrays, source: str, projections: Sequence[str]) -> None:
    num_rows = arrays[f"{source}/weight"].shape[0] // len(projections)
    for index, projection in enumerate(projections):
        rows = slice(index * num_rows, (index + 1) * num_rows)
        weights[f"{name}.{projection}_proj.weight"] = arrays[f"{source}/weight"][rows]
        bias = arrays[f"{source}/bias"][rows]
        if projection != "k":
            weights[f"{name}.{projection}_proj.bias"] = bias
        elif np.any(bias):
            raise WeightsError(f"{source} has a bias on its keys; a Whisper has none")


def _linear(weights: Arrays, name: str, arrays: Arrays, source: str) -> None:
    weights[f"{name}.weight"] = arrays[f"{source}/weight"]
    weights[f"{name}.bias"] = arrays[f"{source}/bias"]


def _norm(weights: Arrays, name: str, arrays: Arrays, source: str) -> None:
    weights[f"{name}.weight"] = arrays[f"{source}/gamma"]
    weights[f"{name}.bias"] = arrays[f"{source}/beta"]


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
