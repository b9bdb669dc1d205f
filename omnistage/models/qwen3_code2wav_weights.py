"""Code2Wav's layers from a checkpoint, by their official names.

Layer scales and ConvNeXt gammas are multiplied into the projections before them.  Knows names, shapes
and where each layer's past goes in a stream's histories.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from omnistage.models.loader import Checkpoint
from omnistage.models.qwen3_code2wav_config import Code2WavConfig
from omnistage.models.qwen3_code2wav_layers import (
    ConvNextUpsampler,
    DecoderBlock,
    ResidualUnit,
    TransformerLayer,
    WaveHead,
    WindowedAttention,
)
from omnistage.models.streaming_conv import CausalConv, PastRows, Snake
from omnistage.ops.linear import Linear

DILATIONS = (1, 3, 9)  # of a decoder block's residual units; no setting of config.json, like the next two
KERNEL_SIZE = 7  # of every convolution that does not upsample
EXPANSION = 4  # of a ConvNeXt block's channels


@dataclass(frozen=True, kw_only=True)
class Network:
    """All layers.  pasts: the layers' memories in the order of their slots.  weight_bytes: as held.

    embedding: [num_codebooks * codebook_size, hidden].  norm: [hidden].
    """

    embedding: Tensor
    layers: tuple[TransformerLayer, ...]
    norm: Tensor
    upsamplers: tuple[ConvNextUpsampler, ...]
    entry: CausalConv
    blocks: tuple[DecoderBlock, ...]
    head: WaveHead
    pasts: tuple[PastRows, ...]
    weight_bytes: int


def build_network(config: Code2WavConfig, checkpoint: Checkpoint, dtype: torch.dtype, device: str) -> Network:
    """Takes every tensor it needs from `checkpoint`.  Raises WeightsError if one does not fit."""
    build = _Builder(config, checkpoint, dtype, device)
    num_blocks = len(config.upsample_rates)
    embedding = build.tensor(
        "code_embedding.weight", config.num_codebooks * config.codebook_size, config.hidden_size
    )
    layers = tuple(build.transformer_layer(index) for index in range(config.num_layers))
    norm = build.tensor("pre_transformer.norm.weight", config.hidden_size)
    upsamplers = tuple(build.upsampler(index) for index in range(len(config.upsampling_ratios)))
    entry = build.conv("decoder.0", config.hidden_size, config.decoder_dim)
    blocks = tuple(build.decoder_block(block) for block in range(num_blocks))
    head = build.head(f"decoder.{num_blocks + 1}", f"decoder.{num_blocks + 2}")
    return Network(
        embedding=embedding,
        layers=layers,
        norm=norm,
        upsamplers=upsamplers,
        entry=entry,
        blocks=blocks,
        head=head,
        pasts=tuple(build.pasts),
        weight_bytes=build.nbytes,
    )


L = TypeVar("L", Linear, CausalConv)


class _Builder:
    """Makes layers, counts their bytes and numbers their pasts."""

    def __init__(
        self, config: Code2WavConfig, checkpoint: Checkpoint, dtype: torch.dtype, device: str
    ) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self.nbytes = 0
        self.pasts: list[PastRows] = []

    def tensor(self, name: str, *shape: int) -> Tensor:
        tensor = self._checkpoint.take(name, shape, self._dtype).to(self._device)
        self.nbytes += tensor.nbytes
        return tensor

    def transformer_layer(self, index: int) -> TransformerLayer:
        config, name = self._config, f"pre_transformer.layers.{index}"
        hidden, middle = config.hidden_size, config.intermediate_size
        query_size, key_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        qkv = {"q_proj": query_size, "k_proj": key_size, "v_proj": key_size}
        attention = WindowedAttention(
            past=self._past(config.window - 1, 2 * key_size, is_padded=False),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            qkv=self._linear(f"{name}.self_attn", qkv, hidden, bias=config.attention_bias),
            output=self._linear(
                f"{name}.self_attn",
                {"o_proj": hidden},
                query_size,
                bias=config.attention_bias,
                scale=f"{name}.self_attn_layer_scale.scale",
            ),
        )
        return TransformerLayer(
            attention_norm=self.tensor(f"{name}.input_layernorm.weight", hidden),
            attention=attention,
            mlp_norm=self.tensor(f"{name}.post_attention_layernorm.weight", hidden),
            gate_up=self._linear(f"{name}.mlp", {"gate_proj": middle, "up_proj": middle}, hidden, bias=False),
            down=self._linear(
                f"{name}.mlp",
                {"down_proj": hidden},
                middle,
                bias=False,
                scale=f"{name}.mlp_layer_scale.scale",
            ),
            eps=config.rms_norm_eps,
        )

    def upsampler(self, index: int) -> ConvNextUpsampler:
        size, factor = self._config.hidden_size, self._config.upsampling_ratios[index]
        name = f"upsample.{index}"
        weight, bias = self._weight_and_bias(f"{name}.0.conv", (size, size, factor), size)
        depthwise = self._weight_and_bias(f"{name}.1.dwconv.conv", (size, 1, KERNEL_SIZE), size)
        wide = EXPANSION * size
        return ConvNextUpsampler(
            factor=factor,
            expand=self._counted(Linear(weight.permute(2, 1, 0).reshape(-1, size), bias.repeat(factor))),
            depthwise=self._remembering(CausalConv(*depthwise, slot=len(self.pasts), groups=size)),
            norm_weight=self.tensor(f"{name}.1.norm.weight", size),
            norm_bias=self.tensor(f"{name}.1.norm.bias", size),
            widen=self._linear(f"{name}.1", {"pwconv1": wide}, size, bias=True),
            narrow=self._linear(f"{name}.1", {"pwconv2": size}, wide, bias=True, scale=f"{name}.1.gamma"),
        )

    def conv(self, name: str, in_channels: int, out_channels: int, *, dilation: int = 1) -> CausalConv:
        parts = self._weight_and_bias(f"{name}.conv", (out_channels, in_channels, KERNEL_SIZE), out_channels)
        return self._remembering(CausalConv(*parts, slot=len(self.pasts), dilation=dilation))

    def decoder_block(self, block: int) -> DecoderBlock:
        config, name = self._config, f"decoder.{block + 1}.block"
        rate, in_channels, channels = (
            config.upsample_rates[block],
            config.channels(block),
            config.channels(block + 1),
        )
        snake = self._snake(f"{name}.0", in_channels)
        weight, bias = self._weight_and_bias(f"{name}.1.conv", (in_channels, channels, 2 * rate), channels)
        upsample = CausalConv.transposed(weight, bias, stride=rate, slot=len(self.pasts))
        return DecoderBlock(
            snake=snake,
            upsample=self._remembering(upsample),
            units=tuple(
                self._unit(f"{name}.{unit}", channels, dilation)
                for unit, dilation in enumerate(DILATIONS, start=2)
            ),
        )

    def head(self, snake: str, conv: str) -> WaveHead:
        channels = self._config.last_channels
        weight, bias = self._weight_and_bias(f"{conv}.conv", (1, channels, KERNEL_SIZE), 1)
        return WaveHead(
            snake=self._snake(snake, channels),
            past=self._past(KERNEL_SIZE - 1, channels, is_padded=True),
            taps=self._counted(Linear(weight[0].T.contiguous())),
            bias=bias,
        )

    def _unit(self, name: str, channels: int, dilation: int) -> ResidualUnit:
        weight, bias = self._weight_and_bias(f"{name}.conv2.conv", (channels, channels, 1), channels)
        return ResidualUnit(
            snake=self._snake(f"{name}.act1", channels),
            conv=self.conv(f"{name}.conv1", channels, channels, dilation=dilation),
            inner_snake=self._snake(f"{name}.act2", channels),
            point=self._counted(Linear(weight[:, :, 0], bias)),
        )

    def _snake(self, name: str, channels: int) -> Snake:
        return Snake(self.tensor(f"{name}.alpha", channels), self.tensor(f"{name}.beta", channels))

    def _linear(
        self,
        module: str,
        outputs: Mapping[str, int],
        in_features: int,
        *,
        bias: bool,
        scale: str | None = None,
    ) -> Linear:
        """Projections of one module in one.  scale: the name of a factor per output, multiplied in."""
        take = self._checkpoint
        shapes = [(f"{module}.{name}.weight", (size, in_features)) for name, size in outputs.items()]
        weight = take.take_fused(shapes, torch.float32)
        biases = None
        if bias:
            shapes_of_bias = [(f"{module}.{name}.bias", (size,)) for name, size in outputs.items()]
            biases = take.take_fused(shapes_of_bias, torch.float32)
        if scale is not None:
            factor = take.take(scale, (weight.shape[0],), torch.float32)
            weight = weight * factor[:, None]
            biases = None if biases is None else biases * factor
        return self._counted(Linear(self._place(weight), None if biases is None else self._place(biases)))

    def _weight_and_bias(self, name: str, shape: tuple[int, ...], num_outputs: int) -> tuple[Tensor, Tensor]:
        weight = self._checkpoint.take(f"{name}.weight", shape, self._dtype)
        bias = self._checkpoint.take(f"{name}.bias", (num_outputs,), self._dtype)
        return weight.to(self._device), bias.to(self._device)

    def _place(self, tensor: Tensor) -> Tensor:
        return tensor.to(device=self._device, dtype=self._dtype)

    def _past(self, num_rows: int, channels: int, *, is_padded: bool) -> PastRows:
        self.pasts.append(PastRows(len(self.pasts), num_rows, channels, is_padded))
        return self.pasts[-1]

    def _remembering(self, conv: CausalConv) -> CausalConv:
        """Counts a convolution whose slot is the next free one."""
        self.pasts.append(conv.past)
        return self._counted(conv)

    def _counted(self, layer: L) -> L:
        self.nbytes += layer.nbytes
        return layer
