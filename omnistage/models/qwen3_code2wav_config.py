"""What config.json says about Code2Wav, and the sample counts that follow.  Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import prod
from typing import Any

from omnistage.errors import WeightsError

DEFAULT_SAMPLE_RATE = 24_000  # Hz; the published config.json does not state it


@dataclass(frozen=True, kw_only=True)
class Code2WavConfig:
    """Sizes in elements, window in frames, sample_rate in Hz.

    upsampling_ratios: of the ConvNeXt stages.  upsample_rates: of the decoder blocks, whose channels
    halve from decoder_dim on.
    """

    num_codebooks: int
    codebook_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int
    rope_theta: float
    rms_norm_eps: float
    attention_bias: bool
    upsampling_ratios: tuple[int, ...]
    upsample_rates: tuple[int, ...]
    decoder_dim: int
    sample_rate: int

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Code2WavConfig:
        """From the `code2wav_config` of config.json.

        Raises WeightsError for a missing key or anything this module would compute wrongly.
        """
        try:
            config = _parse(values)
        except KeyError as error:
            raise WeightsError(
                f"code2wav_config in config.json lacks {error.args[0]!r}, which Code2Wav needs"
            ) from error
        except (TypeError, ValueError) as error:
            raise WeightsError(f"code2wav_config in config.json is wrong: {error}") from error
        config._check()
        return config

    @property
    def hop(self) -> int:
        """Samples per frame."""
        return prod(self.upsampling_ratios) * prod(self.upsample_rates)

    @property
    def trim(self) -> int:
        """Samples that the last frames of a stream lack: each decoder block needs one row more."""
        return sum(prod(self.upsample_rates[block:]) for block in range(len(self.upsample_rates)))

    @property
    def last_channels(self) -> int:
        """Channels at the sample rate."""
        return self.channels(len(self.upsample_rates))

    def channels(self, block: int) -> int:
        """What decoder block `block` takes in."""
        return self.decoder_dim >> block

    def num_samples(self, num_frames: int) -> int:
        """Samples of a whole utterance: num_frames * hop - trim, and never less than 0."""
        num_rows = num_frames * prod(self.upsampling_ratios)
        for rate in self.upsample_rates:
            num_rows = max(num_rows - 1, 0) * rate
        return num_rows

    def _check(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            numbers = value if isinstance(value, tuple) else (value,)
            if field.name != "attention_bias" and any(number <= 0 for number in numbers):
                raise WeightsError(f"code2wav_config: {field.name} is {value}; it must be positive")
        if self.num_heads % self.num_kv_heads:
            raise WeightsError(
                f"code2wav_config: num_attention_heads {self.num_heads} is no multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise WeightsError(f"code2wav_config: head_dim {self.head_dim} is odd; it is rotated in halves")
        if not self.last_channels:
            raise WeightsError(
                f"code2wav_config: decoder_dim {self.decoder_dim} cannot be halved "
                f"{len(self.upsample_rates)} times"
            )


def _parse(values: Mapping[str, Any]) -> Code2WavConfig:
    activation = values.get("hidden_act", "silu")
    if activation != "silu":
        raise ValueError(f"hidden_act is {activation!r}; only 'silu' is supported")
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind != "default":
        raise ValueError(f"rope_type is {kind!r}; only 'default' is supported")
    num_heads = int(values["num_attention_heads"])
    hidden_size = int(values["hidden_size"])
    return Code2WavConfig(
        num_codebooks=int(values["num_quantizers"]),
        codebook_size=int(values["codebook_size"]),
        hidden_size=hidden_size,
        intermediate_size=int(values["intermediate_size"]),
        num_layers=int(values["num_hidden_layers"]),
        num_heads=num_heads,
        num_kv_heads=int(values.get("num_key_value_heads") or num_heads),
        head_dim=int(values.get("head_dim") or hidden_size // num_heads),
        window=int(values["sliding_window"]),
        rope_theta=float(rope["rope_theta"] if "rope_theta" in rope else values["rope_theta"]),
        rms_norm_eps=float(values["rms_norm_eps"]),
        attention_bias=bool(values.get("attention_bias", False)),
        upsampling_ratios=tuple(map(int, values["upsampling_ratios"])),
        upsample_rates=tuple(map(int, values["upsample_rates"])),
        decoder_dim=int(values["decoder_dim"]),
        sample_rate=int(values.get("sample_rate") or DEFAULT_SAMPLE_RATE),
    )
