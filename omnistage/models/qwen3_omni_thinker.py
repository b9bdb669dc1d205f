"""Loads the text model that reads prompts and writes answers: of Qwen3-Omni, Qwen3-VL and Qwen3-MoE.

Knows where their config.json and their checkpoints keep it; the network itself is `qwen3_text`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from omnistage.errors import WeightsError
from omnistage.models.fused_weights import FusedWeights
from omnistage.models.loader import Checkpoint, read_json
from omnistage.models.packed_blocks import with_defaults
from omnistage.models.qwen3_text import TextConfig, TextLayers, TextModel
from omnistage.ops.linear import Linear

IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)  # computed; some checkpoints store it
# What config.json may leave out: the architecture class of the published models.
_SECTIONS = (24, 20, 20)
_OMNI_DEFAULTS: dict[str, Any] = {
    "vocab_size": 3584,
    "hidden_size": 2048,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "num_experts": 128,
    "norm_topk_prob": True,
}
_VL_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 128000,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500_000.0,
}
_MOE_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "num_experts": 128,
}


@dataclass(frozen=True)
class _Place:
    """Where a kind of checkpoint keeps its text model.

    config: keys that lead to its part of config.json.  model, head: what its tensors begin with.
    sections: of the rotary axes, None where positions have one axis.
    """

    config: tuple[str, ...]
    model: str
    head: str
    defaults: Mapping[str, Any]
    sections: tuple[int, int, int] | None = None


_PLACES = {
    "qwen3_omni_moe": _Place(
        ("thinker_config", "text_config"), "thinker.model.", "thinker.lm_head.", _OMNI_DEFAULTS, _SECTIONS
    ),
    "qwen3_vl": _Place(("text_config",), "model.language_model.", "lm_head.", _VL_DEFAULTS, _SECTIONS),
    "qwen3_moe": _Place((), "model.", "lm_head.", _MOE_DEFAULTS),
}


def thinker_config(directory: Path) -> TextConfig:
    """What config.json and generation_config.json say of the text model.  Raises WeightsError."""
    return _read(directory)[1]


def load_thinker(directory: Path, *, dtype: torch.dtype, prefix: str = "") -> TextModel:
    """The text model of a model directory.  Raises WeightsError naming what is missing or wrong.

    prefix: not used; the architecture decides where the tensors are.
    """
    place, config = _read(directory)
    checkpoint = Checkpoint(directory, prefix=place.model)
    weights = FusedWeights(checkpoint, dtype)
    embedding = weights.tensor("embed_tokens.weight", config.vocab_size, config.hidden_size)
    layers = TextLayers(config, weights)
    checkpoint.finish(ignored_suffixes=IGNORED_SUFFIXES)
    if config.tie_word_embeddings:
        head = Linear(embedding)
    else:
        taken = Checkpoint(directory, prefix=place.head).take(
            "weight", (config.vocab_size, config.hidden_size), dtype
        )
        head = Linear(taken)
    weight_bytes = weights.nbytes + head.nbytes
    return TextModel(config, embedding=embedding, layers=layers, head=head, weight_bytes=weight_bytes)


def _read(directory: Path) -> tuple[_Place, TextConfig]:
    whole = read_json(directory / "config.json")
    place = _PLACES.get(str(whole.get("model_type")))
    if place is None:
        raise WeightsError(
            f"model_type {whole.get('model_type')!r} in {directory / 'config.json'} is not one of "
            f"{', '.join(sorted(_PLACES))}"
        )
    parent: Mapping[str, Any] = whole
    values: Mapping[str, Any] = whole
    for key in place.config:
        if not isinstance(values.get(key), dict):
            raise WeightsError(f"{directory / 'config.json'} lacks {key!r}; fetch the model again")
        parent, values = values, values[key]
    filled = with_defaults(values, place.defaults)
    rope = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    if place.sections is not None:
        rope.setdefault("mrope_section", place.sections)
    filled["rope_parameters"] = rope
    ties = parent.get("tie_word_embeddings", values.get("tie_word_embeddings"))  # the parent has the head
    filled["tie_word_embeddings"] = bool(ties)
    generation = directory / "generation_config.json"
    if generation.exists():
        eos = read_json(generation).get("eos_token_id")
        filled["eos_token_id"] = filled.get("eos_token_id") if eos is None else eos
    return place, TextConfig.from_json(filled)
