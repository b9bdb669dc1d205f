"""The dense decoder families: Llama, Qwen2 (bias on q, k, v) and Qwen3 (norm on q and k).

One module for all; config.json decides.  Knows flat rows, positions and `AttentionMetadata`; it
knows no request and no sampling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from omnistage.errors import WeightsError
from omnistage.models.layers import Attention, DecoderLayer, GatedMLP
from omnistage.models.loader import Checkpoint, read_json
from omnistage.models.native_decoder import NativeDecoder, can_run_natively
from omnistage.ops.attention import AttentionMetadata, PagedKVCache
from omnistage.ops.linear import GatedLinear, Linear
from omnistage.ops.norm import rms_norm
from omnistage.ops.rotary import RotaryScaling, inverse_frequencies, rotary_angles

_ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen2ForCausalLM": "qwen2", "Qwen3ForCausalLM": "qwen3"}
_ROTARY_KINDS = ("default", "linear", "llama3")
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)  # derived from config.json; old checkpoints store it


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """What config.json says, under one set of names.  Sizes in elements, lengths in tokens."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RotaryScaling
    max_position_embeddings: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> DecoderConfig:
        """Raises WeightsError for a missing key or anything this module would compute wrongly."""
        try:
            return _parse_config(values)
        except KeyError as error:
            raise WeightsError(
                f"config.json lacks {error.args[0]!r}, which this architecture needs"
            ) from error


def _parse_config(values: Mapping[str, Any]) -> DecoderConfig:
    family = _family(values)
    if values.get("hidden_act", "silu") != "silu":
        raise WeightsError(f"hidden_act is {values['hidden_act']!r}; only 'silu' is supported")
    if values.get("quantization_config"):
        raise WeightsError("the checkpoint is quantised; use one in bfloat16 or float32")
    uses_window = values.get("use_sliding_window", False) or "sliding_attention" in (
        values.get("layer_types") or ()
    )
    if uses_window:
        raise WeightsError("the model uses sliding-window attention, which is not supported")
    num_heads = int(values["num_attention_heads"])
    attention_bias = bool(values.get("attention_bias", False)) and family != "qwen2"
    theta, scaling = _rotary(values)
    eos = values.get("eos_token_id")
    return DecoderConfig(
        family=family,
        vocab_size=int(values["vocab_size"]),
        hidden_size=int(values["hidden_size"]),
        intermediate_size=int(values["intermediate_size"]),
        num_layers=int(values["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=int(values.get("num_key_value_heads") or num_heads),
        head_dim=int(values.get("head_dim") or int(values["hidden_size"]) // num_heads),
        rms_norm_eps=float(values["rms_norm_eps"]),
        rope_theta=theta,
        rope_scaling=scaling,
        max_position_embeddings=int(values["max_position_embeddings"]),
        tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias or family == "qwen2",
        output_bias=attention_bias,
        mlp_bias=family == "llama" and bool(values.get("mlp_bias", False)),
        qk_norm=family == "qwen3",
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),),
    )


def _family(values: Mapping[str, Any]) -> str:
    for architecture in values.get("architectures") or ():
        if architecture in _ARCHITECTURES:
            return _ARCHITECTURES[architecture]
    model_type = values.get("model_type")
    if model_type in _ARCHITECTURES.values():
        return str(model_type)
    raise WeightsError(
        f"architecture {values.get('architectures')} of model_type {model_type!r} is not one of "
        f"{sorted(_ARCHITECTURES)}"
    )


def _rotary(values: Mapping[str, Any]) -> tuple[float, RotaryScaling]:
    """Both spellings: rope_parameters, or rope_theta beside rope_scaling."""
    parameters = values.get("rope_parameters") or values.get("rope_scaling") or {}
    theta = parameters.get("rope_theta", values.get("rope_theta"))
    if theta is None:
        raise KeyError("rope_theta")
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in _ROTARY_KINDS:
        raise WeightsError(f"rope_type {kind!r} is not supported; known are {', '.join(_ROTARY_KINDS)}")
    if float(parameters.get("partial_rotary_factor", values.get("partial_rotary_factor") or 1.0)) != 1.0:
        raise WeightsError("partial_rotary_factor other than 1.0 is not supported")
    if kind == "default":
        return float(theta), RotaryScaling()
    if kind == "linear":
        return float(theta), RotaryScaling("linear", factor=float(parameters["factor"]))
    return float(theta), RotaryScaling(
        "llama3",
        factor=float(parameters["factor"]),
        low_freq_factor=float(parameters["low_freq_factor"]),
        high_freq_factor=float(parameters["high_freq_factor"]),
        original_max_position=int(parameters["original_max_position_embeddings"]),
    )


class Decoder:
    """A causal language model over flat rows.

    weight_bytes: memory of the weights as held (a tied output projection is held twice: plain for
    look-up, packed for the product).
    num_position_axes, num_open_layers, decodes_natively: see omnistage.engine.runner.FlatTokenModel.
    """

    num_position_axes = 1
    num_open_layers = 0

    def __init__(self, config: DecoderConfig, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        """Takes every tensor it needs from `checkpoint`.  Raises WeightsError."""
        self.config = config
        self.dtype = dtype
        self._take = _Taker(checkpoint, dtype)
        hidden = config.hidden_size
        self._embedding = self._take("model.embed_tokens.weight", config.vocab_size, hidden)
        self._layers = [self._layer(index) for index in range(config.num_layers)]
        self._final_norm = self._take("model.norm.weight", hidden)
        head = (
            self._embedding
            if config.tie_word_embeddings
            else self._take("lm_head.weight", config.vocab_size, hidden)
        )
        self._head = Linear(head)
        self._frequencies = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        self.decodes_natively = can_run_natively(self._layers)
        self._native = NativeDecoder(self._layers, hidden) if self.decodes_natively else None
        self.weight_bytes = self._take.nbytes + (self._head.nbytes if config.tie_word_embeddings else 0)

    def _layer(self, index: int) -> DecoderLayer:
        config, take = self.config, self._take
        name = f"model.layers.{index}"
        hidden, middle = config.hidden_size, config.intermediate_size
        query_size, key_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv = {"q_proj": query_size, "k_proj": key_size, "v_proj": key_size}
        attention = Attention(
            layer=index,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
            qkv=take.linear(f"{name}.self_attn", qkv, hidden, config.qkv_bias),
            output=take.linear(f"{name}.self_attn", {"o_proj": hidden}, query_size, config.output_bias),
            query_norm=take(f"{name}.self_attn.q_norm.weight", config.head_dim) if config.qk_norm else None,
            key_norm=take(f"{name}.self_attn.k_norm.weight", config.head_dim) if config.qk_norm else None,
        )
        return DecoderLayer(
            attention_norm=take(f"{name}.input_layernorm.weight", hidden),
            attention=attention,
            mlp_norm=take(f"{name}.post_attention_layernorm.weight", hidden),
            mlp=GatedMLP(
                gate_up=take.gated(f"{name}.mlp", middle, hidden, config.mlp_bias),
                down=take.linear(f"{name}.mlp", {"down_proj": hidden}, middle, config.mlp_bias),
            ),
            eps=config.rms_norm_eps,
        )

    def new_kv_cache(self, num_blocks: int, block_size: int) -> PagedKVCache:
        """Zeroed pages for this model's layers."""
        return PagedKVCache(
            num_layers=self.config.num_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            dtype=self.dtype,
        )

    def kv_bytes_per_block(self, block_size: int) -> int:
        """Bytes one block of `block_size` rows takes over all layers."""
        return PagedKVCache.bytes_per_block(
            num_layers=self.config.num_layers,
            block_size=block_size,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            dtype=self.dtype,
        )

    def embed(self, token_ids: Tensor) -> Tensor:
        """token_ids: [num_tokens], int64.  Returns a fresh [num_tokens, hidden]."""
        return F.embedding(token_ids, self._embedding)

    def forward(self, hidden: Tensor, positions: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Run all layers over the rows of one step, writing their keys and values.

        hidden: [num_tokens, hidden].  positions: [num_tokens], int64.
        Returns [num_tokens, hidden] before the final norm.
        """
        cosine, sine = rotary_angles(positions, self._frequencies, self.dtype)
        if metadata.rows is not None and self._native is not None:
            return self._native.run(hidden, (cosine, sine), metadata)[0]
        for layer in self._layers:
            hidden = layer(hidden, cosine, sine, metadata)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [num_rows, hidden] from `forward`.  Returns [num_rows, vocab] in the model's dtype."""
        return self._head(rms_norm(hidden, self._final_norm, self.config.rms_norm_eps))


class _Taker:
    """Takes tensors and fused projections from a checkpoint and counts their bytes."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self.nbytes = 0

    def __call__(self, name: str, *shape: int) -> Tensor:
        tensor = self._checkpoint.take(name, shape, self._dtype)
        self.nbytes += tensor.nbytes
        return tensor

    def gated(self, module: str, size: int, in_features: int, bias: bool) -> GatedLinear:
        """gate_proj and up_proj of a gated MLP, `size` outputs each."""
        names = [f"{module}.{name}" for name in ("gate_proj", "up_proj")]
        weights = self._checkpoint.take_fused(
            [(f"{name}.weight", (size, in_features)) for name in names], self._dtype
        )
        biases = [(f"{name}.bias", (size,)) for name in names]
        linear = GatedLinear(weights, self._checkpoint.take_fused(biases, self._dtype) if bias else None)
        self.nbytes += linear.nbytes
        return linear

    def linear(self, module: str, outputs: Mapping[str, int], in_features: int, bias: bool) -> Linear:
        """Projections of one module stacked into one.  outputs: name -> out_features."""
        weights = [(f"{module}.{name}.weight", (size, in_features)) for name, size in outputs.items()]
        biases = [(f"{module}.{name}.bias", (size,)) for name, size in outputs.items()]
        linear = Linear(
            self._checkpoint.take_fused(weights, self._dtype),
            self._checkpoint.take_fused(biases, self._dtype) if bias else None,
        )
        self.nbytes += linear.nbytes
        return linear


def load_decoder(directory: Path, *, dtype: torch.dtype, prefix: str = "") -> Decoder:
    """Read a model directory (config.json and safetensors).

    prefix: what names of this part begin with in a checkpoint of several parts.
    Raises WeightsError naming what is missing, unexpected or wrong.
    """
    values = read_json(directory / "config.json")
    generation = directory / "generation_config.json"
    if generation.exists():
        values = {**values, **{k: v for k, v in read_json(generation).items() if k == "eos_token_id"}}
    config = DecoderConfig.from_json(values)
    checkpoint = Checkpoint(directory, prefix=prefix)
    decoder = Decoder(config, checkpoint, dtype)
    ignored = (*_IGNORED_SUFFIXES, *(("lm_head.weight",) if config.tie_word_embeddings else ()))
    checkpoint.finish(ignored_suffixes=ignored)
    return decoder
