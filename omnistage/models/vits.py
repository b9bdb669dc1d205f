"""The acoustic half of VITS: a sentence to the latents its HiFi-GAN decoder turns into sound.

Text encoder, stochastic durations and prior flow (arXiv 2106.06103), without what only training
needs.  Knows sentences and voices; knows no request, no audio and no vocoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from omnistage.errors import InvalidRequest, NotFound, WeightsError
from omnistage.models.phonemes import EspeakPhonemizer, PhonemeMap, Phonemizer, split_phonemes
from omnistage.models.protocols import Sliced
from omnistage.models.registry import PartSource
from omnistage.models.vits_duration import DurationConfig, DurationPredictor
from omnistage.models.vits_files import PHONEMES_FILE, read_weights, require_float32
from omnistage.models.vits_flow import FlowConfig, PriorFlow
from omnistage.models.vits_text import TextEncoder, TextEncoderConfig

MODEL_TYPE = "vits_acoustic"
MIN_SPEED, MAX_SPEED = 0.25, 4.0
MAX_PIECE_PHONEMES = 240  # about 20 s of speech; bounds memory and the time of one slice
MAX_PHONEME_FRAMES = 400  # about 4.6 s; a spline far outside its training range must not exhaust memory


@dataclass(frozen=True)
class Inference:
    """How a voice is sampled.  noise_scale, duration_noise_scale: deviations of the noise; 0 is none.

    length_scale: factor on every duration; above 1 is slower.
    """

    noise_scale: float = 0.667
    length_scale: float = 1.0
    duration_noise_scale: float = 0.8


@dataclass(frozen=True)
class VitsConfig:
    """voices: name -> eSpeak NG voice that phonemizes for it.  frame_rate: latents per second."""

    text_encoder: TextEncoderConfig
    duration: DurationConfig
    flow: FlowConfig
    inference: Inference
    voices: Mapping[str, str]
    frame_rate: float

    @classmethod
    def from_json(cls, config: Mapping[str, Any]) -> VitsConfig:
        """From config.json's content.  Raises WeightsError if a setting is missing or unknown."""
        if config.get("model_type") != MODEL_TYPE:
            raise WeightsError(
                f"config.json has model_type {config.get('model_type')!r}, not {MODEL_TYPE!r}; "
                "name a directory that holds a converted voice"
            )
        try:
            flow = {**config["flow"], "dilations": tuple(config["flow"]["dilations"])}
            return cls(
                text_encoder=TextEncoderConfig(**config["text_encoder"]),
                duration=DurationConfig(**config["duration"]),
                flow=FlowConfig(**flow),
                inference=Inference(**config["inference"]),
                voices=dict(config["voices"]),
                frame_rate=float(config["frame_rate"]),
            )
        except (KeyError, TypeError) as error:
            raise WeightsError(f"the voice's config.json is incomplete: {error}; convert it again") from error


class VitsNetwork(nn.Module):
    """The three trained parts."""

    def __init__(self, config: VitsConfig) -> None:
        super().__init__()
        self.text_encoder = TextEncoder(config.text_encoder)
        self.durations = DurationPredictor(config.duration)
        self.flow = PriorFlow(config.flow)

    def latents(self, ids: Tensor, noise: np.random.Generator, inference: Inference) -> Sliced[Tensor]:
        """ids: [num_tokens], int64.  Returns [num_frames, latent_size], float32.

        Draws from `noise` 2 * num_tokens, then num_frames * latent_size normal numbers, on the CPU.
        """

        def draw(*shape: int, like: Tensor) -> Tensor:
            return torch.from_numpy(noise.standard_normal(shape, dtype=np.float32)).to(like)

        hidden, mean, log_deviation = yield from self.text_encoder.encode(ids)
        duration_noise = draw(2, len(ids), like=mean) * inference.duration_noise_scale
        log_durations = yield from self.durations.predict(hidden, duration_noise)
        frames = torch.ceil(log_durations.exp() * inference.length_scale).clamp(0, MAX_PHONEME_FRAMES).long()
        mean = mean.repeat_interleave(frames, dim=0)
        log_deviation = log_deviation.repeat_interleave(frames, dim=0)
        prior = mean + draw(*mean.shape, like=mean) * log_deviation.exp() * inference.noise_scale
        yield
        latents = yield from self.flow.invert(prior.T[None])
        return latents[0].T.float().contiguous()


class VitsAcoustic:
    """See omnistage.models.protocols.AcousticModel.  Owns the phonemizer: close() ends it."""

    def __init__(
        self, network: VitsNetwork, config: VitsConfig, phoneme_map: PhonemeMap, phonemizer: Phonemizer
    ) -> None:
        self.voices = tuple(config.voices)
        self.num_channels = config.flow.latent_size
        self.frame_rate = config.frame_rate
        self.inference = config.inference
        self.weight_bytes = sum(parameter.nbytes for parameter in network.parameters())
        self._network = network
        self._config = config
        self._phoneme_map = phoneme_map
        self._phonemizer = phonemizer

    def synthesize(
        self, sentence: str, *, voice: str, seed: int, position: int, speed: float = 1.0
    ) -> Sliced[Tensor]:
        """Latents [num_frames, num_channels], float32, of one sentence; zero frames if it has no sound.

        position: the sentence's index in the answer; noise is keyed (seed, position) alone, so equal
        arguments give equal latents.  speed: 1.0 is the voice's own; 0.25 to 4.
        Raises NotFound for an unknown voice and InvalidRequest for a speed out of range, both at once;
        the generator raises RequestFailed if the phonemizer fails.
        """
        if voice not in self._config.voices:
            raise NotFound(
                f"unknown voice {voice!r}; the voices are {', '.join(map(repr, self.voices))}", param="voice"
            )
        if not MIN_SPEED <= speed <= MAX_SPEED:
            raise InvalidRequest(
                f"speed {speed} is out of range; it must be from {MIN_SPEED} to {MAX_SPEED}", param="speed"
            )
        inference = Inference(
            noise_scale=self.inference.noise_scale,
            length_scale=self.inference.length_scale / speed,
            duration_noise_scale=self.inference.duration_noise_scale,
        )
        return self._synthesize(sentence, self._config.voices[voice], keyed_noise(seed, position), inference)

    def close(self) -> None:
        """End the phonemizer's process."""
        self._phonemizer.close()

    @torch.inference_mode()
    def _synthesize(
        self, sentence: str, espeak_voice: str, noise: np.random.Generator, inference: Inference
    ) -> Sliced[Tensor]:
        phonemes = self._phonemizer.phonemize(sentence, espeak_voice)
        device = next(self._network.parameters()).device
        pieces = []
        for piece in split_phonemes(phonemes, MAX_PIECE_PHONEMES):
            ids = self._phoneme_map.encode(piece)
            if ids:
                pieces.append(
                    (yield from self._network.latents(torch.tensor(ids, device=device), noise, inference))
                )
        return torch.cat(pieces) if pieces else torch.zeros(0, self.num_channels, device=device)


def keyed_noise(seed: int, position: int) -> np.random.Generator:
    """The noise of one sentence: a counter-based stream for each (seed, position), the same everywhere."""
    key = np.array([seed & (2**64 - 1), position], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def load_acoustic(
    source: PartSource,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    phonemizer: Phonemizer | None = None,
) -> VitsAcoustic:
    """Load a converted voice: config.json, model.safetensors and phonemes.json in source.directory.

    phonemizer: replaces the eSpeak NG process, which otherwise starts here.
    Raises WeightsError if a file is missing, damaged or of another shape, or dtype is not float32.
    """
    require_float32(dtype, "VITS voice")
    config = VitsConfig.from_json(source.config)
    phoneme_map = PhonemeMap.read(source.directory / PHONEMES_FILE)
    with torch.device("meta"):
        network = VitsNetwork(config)
    weights = read_weights(
        source.directory, {name: tensor.shape for name, tensor in network.state_dict().items()}
    )
    network.load_state_dict(weights, assign=True)
    network.to(device).eval().requires_grad_(requires_grad=False)
    if phonemizer is None:
        phonemizer = EspeakPhonemizer()
        phonemizer.start()
    return VitsAcoustic(network, config, phoneme_map, phonemizer)
