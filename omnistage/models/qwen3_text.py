"""The decoder of the Qwen3 models with experts, with three rotary axes, or with both, over flat rows.

Qwen3-Omni's thinker and talker, and the text models of Qwen3-VL and Qwen3-MoE, are this network under
different names (arXiv 2505.09388, 2509.17765, 2511.21631).
Knows flat rows, positions and `AttentionMetadata`; no request, no sampling, no pictures and no speech.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor

from omnistage.errors import WeightsError
from omnistage.models.fused_weights import FusedWeights
from omnistage.models.layers import Attention, GatedMLP
from omnistage.models.mixture import Mixture, MixtureConfig, count_experts, load_gated_mlp, load_mixture
from omnistage.models.native_decoder import NativeDecoder, can_run_natively
from omnistage.ops.attention import AttentionMetadata, PagedKVCache
from omnistage.ops.linear import Linear
from omnistage.ops.norm import rms_norm
from omnistage.ops.rotary import RotaryScaling, inverse_frequencies

NUM_AXES = 3  # of a position: time, row, column


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """Sizes in elements, lengths in tokens.

    rope_sections: pairs of a head that turn with each axis; None where positions have one axis.
    mixture: None if no layer has experts.  has_experts: of each layer.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_sections: tuple[int, int, int] | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    mixture: MixtureConfig | None
    has_experts: tuple[bool, ...]
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_json(
        cls, values: Mapping[str, Any], *, shares_expert: bool = False, is_mixed_throughout: bool = False
    ) -> TextConfig:
        """values: a text model's part of config.json.

        shares_expert: whether layers with experts have a shared one.
        is_mixed_throughout: whether every layer has experts, whatever the values say of single layers.
        Raises WeightsError for a missing key or anything this module would compute wrongly.
        """
        try:
            return _parse(values, shares_expert, is_mixed_throughout)
        except KeyError as error:
            raise WeightsError(
                f"config.json lacks {error.args[0]!r}, which this architecture needs"
            ) from error


def _parse(values: Mapping[str, Any], shares_expert: bool, is_mixed_throughout: bool) -> TextConfig:
    if values.get("hidden_act", "silu") != "silu":
        raise WeightsError(f"hidden_act is {values['hidden_act']!r}; only 'silu' is supported")
    if values.get("quantization_config"):
        raise WeightsError("the checkpoint is quantised; use one in bfloat16 or float32")
    if values.get("use_sliding_window", False):
        raise WeightsError("the model uses sliding-window attention, which is not supported")
    num_heads, num_layers = int(values["num_attention_heads"]), int(values["num_hidden_layers"])
    has_experts = _layers_with_experts(values, num_layers, is_mixed_throughout)
    theta, sections = _rotary(values)
    eos = values.get("eos_token_id")
    return TextConfig(
        vocab_size=int(values["vocab_size"]),
        hidden_size=int(values["hidden_size"]),
        intermediate_size=int(values.get("intermediate_size") or 0),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=int(values.get("num_key_value_heads") or num_heads),
        head_dim=int(values.get("head_dim") or int(values["hidden_size"]) // num_heads),
        rms_norm_eps=float(values["rms_norm_eps"]),
        rope_theta=theta,
        rope_sections=sections,
        max_position_embeddings=int(values["max_position_embeddings"]),
        tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
        attention_bias=bool(values.get("attention_bias", False)),
        mixture=MixtureConfig.from_json(values, has_shared=shares_expert) if any(has_experts) else None,
        has_experts=has_experts,
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (int(eos),),
    )


def _layers_with_experts(values: Mapping[str, Any], num_layers: int, always: bool) -> tuple[bool, ...]:
    num_experts = count_experts(values)
    step = int(values.get("decoder_sparse_step", 1))
    dense = set(values.get("mlp_only_layers") or ())
    return tuple(
        always or (num_experts > 0 and layer not in dense and (layer + 1) % step == 0)
        for layer in range(num_layers)
    )


def _rotary(values: Mapping[str, Any]) -> tuple[float, tuple[int, int, int] | None]:
    """Both spellings: rope_parameters, or rope_theta beside rope_scaling."""
    parameters = values.get("rope_parameters") or values.get("rope_scaling") or {}
    theta = parameters.get("rope_theta", values.get("rope_theta"))
    if theta is None:
        raise KeyError("rope_theta")
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind != "default":
        raise WeightsError(f"rope_type {kind!r} is not supported here; only 'default' is")
    sections = parameters.get("mrope_section")
    if sections is None:
        return float(theta), None
    if len(sections) != NUM_AXES:
        raise WeightsError(f"mrope_section is {sections}, but positions have {NUM_AXES} axes")
    return float(theta), (int(sections[0]), int(sections[1]), int(sections[2]))


def axes_of_pairs(head_dim: int, sections: tuple[int, int, int]) -> Tensor:
    """The axis that turns each pair of a head: [head_dim / 2], int64.

    Rows and columns take every third pair, from the second and third on; time takes the others
    (the interleaved layout of Qwen3-VL, arXiv 2511.21631).
    """
    axes = torch.zeros(head_dim // 2, dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : NUM_AXES * sections[axis] : NUM_AXES] = axis
    return axes


@dataclass(frozen=True, eq=False)
class DeepstackRows:
    """What is added to the hidden states of pictures after the first layers (arXiv 2406.04334).

    rows: [num_rows], int64, of the step.  features: after layer i, [num_rows, hidden].
    """

    rows: Tensor
    features: Sequence[Tensor]


@dataclass(frozen=True)
class TextLayer:
    """One pre-norm transformer block."""

    attention_norm: Tensor
    attention: Attention
    mlp_norm: Tensor
    mlp: GatedMLP | Mixture
    eps: float

    def attend(self, hidden: Tensor, cosine: Tensor, sine: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Attention.  hidden: [num_tokens, hidden_size], left unchanged.  Returns the same shape."""
        normed = rms_norm(hidden, self.attention_norm, self.eps)
        return self.attention(normed, hidden, cosine, sine, metadata)

    def think(self, hidden: Tensor) -> Tensor:
        """The MLP.  hidden as of `attend`."""
        return self.mlp(rms_norm(hidden, self.mlp_norm, self.eps), hidden)


class TextLayers:
    """All blocks and the final norm.

    native: runs the blocks where all rows decode, None without kernels.  final_norm: [hidden].
    """

    def __init__(self, config: TextConfig, weights: FusedWeights) -> None:
        """weights: names from "layers" and "norm" on.  Raises WeightsError."""
        self.config = config
        self.dtype = weights.dtype
        self._layers = [_load_layer(config, weights, index) for index in range(config.num_layers)]
        runs_natively = can_run_natively(self._layers)
        self.native = NativeDecoder(self._layers, config.hidden_size) if runs_natively else None
        self.final_norm = weights.tensor("norm.weight", config.hidden_size)
        self._frequencies = inverse_frequencies(config.head_dim, config.rope_theta, RotaryScaling())
        self._axes = (
            None if config.rope_sections is None else axes_of_pairs(config.head_dim, config.rope_sections)
        )

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Factors for `rotate_`: cosine and signed sine, each [num_tokens, 1, head_dim].

        positions: [num_tokens], or [3, num_tokens] where the model has axes; any number type.
        """
        rows = positions.to(torch.float32)
        if rows.dim() == 1:
            rows = rows.unsqueeze(1)
        else:
            assert self._axes is not None, "this model's positions have one axis"
            rows = rows[self._axes].transpose(0, 1)  # [num_tokens, head_dim / 2]
        angles = rows * self._frequencies
        cosine, sine = angles.cos(), angles.sin()
        return (
            torch.cat((cosine, cosine), dim=-1).unsqueeze(1).to(self.dtype),
            torch.cat((-sine, sine), dim=-1).unsqueeze(1).to(self.dtype),
        )

    def run(
        self,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor],
        metadata: AttentionMetadata,
        *,
        deepstack: DeepstackRows | None = None,
        capture_layer: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden: [num_tokens, hidden].  Returns it before the final norm, and what was captured.

        capture_layer: see TextModel.forward.
        """
        if metadata.rows is not None and self.native is not None:
            assert deepstack is None, "rows between the layers are not for a step that only decodes"
            hidden, captured = self.native.run(hidden, rotation, metadata, capture_layer=capture_layer)
            is_last = captured is not None and capture_layer == len(self._layers)
            return hidden, self.normalise(captured) if is_last and captured is not None else captured
        captured = hidden if capture_layer == 0 else None
        for index, layer in enumerate(self._layers):
            hidden = layer.attend(hidden, *rotation, metadata)
            hidden = layer.think(hidden) if self.native is None else self._think(self.native, index, hidden)
            if capture_layer == index + 1:
                captured = hidden
            if deepstack is not None and index < len(deepstack.features):
                features = deepstack.features[index].to(hidden.dtype)
                hidden = hidden.index_add(0, deepstack.rows, features)
        if capture_layer == len(self._layers):
            captured = self.normalise(hidden)
        return hidden, captured

    def _think(self, native: NativeDecoder, index: int, hidden: Tensor) -> Tensor:
        """The MLP of layer `index`, its experts in one call."""
        layer = self._layers[index]
        if not isinstance(layer.mlp, Mixture):
            return layer.think(hidden)
        return native.mlp(index, rms_norm(hidden, layer.mlp_norm, layer.eps), hidden.contiguous())

    def normalise(self, hidden: Tensor) -> Tensor:
        """The final norm.  hidden: [num_rows, hidden]."""
        return rms_norm(hidden, self.final_norm, self.config.rms_norm_eps)


def _load_layer(config: TextConfig, weights: FusedWeights, index: int) -> TextLayer:
    name = f"layers.{index}"
    hidden, head_dim = config.hidden_size, config.head_dim
    query_size, key_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    qkv = {"q_proj": query_size, "k_proj": key_size, "v_proj": key_size}
    bias = config.attention_bias
    mlp: GatedMLP | Mixture
    if config.has_experts[index]:
        assert config.mixture is not None
        mlp = load_mixture(config.mixture, weights, f"{name}.mlp", hidden)
    else:
        mlp = load_gated_mlp(weights, f"{name}.mlp", hidden, config.intermediate_size)
    return TextLayer(
        attention_norm=weights.tensor(f"{name}.input_layernorm.weight", hidden),
        attention=Attention(
            layer=index,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=head_dim,
            eps=config.rms_norm_eps,
            qkv=weights.linear(f"{name}.self_attn", qkv, hidden, bias=bias),
            output=weights.linear(f"{name}.self_attn", {"o_proj": hidden}, query_size, bias=bias),
            query_norm=weights.tensor(f"{name}.self_attn.q_norm.weight", head_dim),
            key_norm=weights.tensor(f"{name}.self_attn.k_norm.weight", head_dim),
        ),
        mlp_norm=weights.tensor(f"{name}.post_attention_layernorm.weight", hidden),
        mlp=mlp,
        eps=config.rms_norm_eps,
    )


class TextModel:
    """A causal model over flat rows: table, layers and head.

    embedding: [vocab, hidden].  weight_bytes: of the weights as held.
    num_position_axes: NUM_AXES, or 1.
    num_open_layers: after which `forward` takes rows to add, and gives hidden states; all.
    decodes_natively: whether steps in which all rows decode come as DecodeRows.
    """

    def __init__(
        self, config: TextConfig, *, embedding: Tensor, layers: TextLayers, head: Linear, weight_bytes: int
    ) -> None:
        self.config = config
        self.dtype = layers.dtype
        self.weight_bytes = weight_bytes
        self.num_position_axes = 1 if config.rope_sections is None else NUM_AXES
        self.num_open_layers = config.num_layers
        self.decodes_natively = layers.native is not None
        self._embedding = embedding
        self._layers = layers
        self._head = head

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

    @overload
    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        metadata: AttentionMetadata,
        *,
        deepstack: DeepstackRows | None = None,
        capture_layer: Literal[None] = None,
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        metadata: AttentionMetadata,
        *,
        deepstack: DeepstackRows | None = None,
        capture_layer: int,
    ) -> tuple[Tensor, Tensor]: ...

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        metadata: AttentionMetadata,
        *,
        deepstack: DeepstackRows | None = None,
        capture_layer: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Run all layers over the rows of one step, writing their keys and values.

        hidden: [num_tokens, hidden].  positions: [num_tokens], or [3, num_tokens] where the model has
        axes; any number type.
        capture_layer: k asks for the hidden states after k layers as well (before deepstack rows are
        added; 0: what goes in; all layers: after the final norm), transformers' hidden_states[k].
        Returns [num_tokens, hidden] before the final norm; with capture_layer, both.
        """
        rotation = self._layers.rotation(positions)
        result, captured = self._layers.run(
            hidden, rotation, metadata, deepstack=deepstack, capture_layer=capture_layer
        )
        if capture_layer is None:
            return result
        if captured is None:
            raise WeightsError(
                f"config.json asks for the hidden states after {capture_layer} layers, "
                f"but there are {self.config.num_layers}"
            )
        return result, captured

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [num_rows, hidden] from `forward`.  Returns [num_rows, vocab] in the model's dtype."""
        return self._head(self._layers.normalise(hidden))
