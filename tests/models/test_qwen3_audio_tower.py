"""Every clip gets what transformers' audio tower gives it alone, whatever else is encoded with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeAudioEncoderConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder

from omnistage.errors import WeightsError
from omnistage.models import packed_blocks
from omnistage.models.loader import read_json
from omnistage.models.qwen3_audio_tower import AudioTowerConfig, Qwen3AudioTower, load_audio_tower
from tests.models.qwen_checkpoints import result_of, save_tower
from tests.models.qwen_configs import AUDIO

PREFIX = "thinker.audio_tower."
# Log-mel frames: within a chunk of 100, at its ends, over a window of 200, over several.
LENGTHS = (1, 7, 53, 99, 100, 101, 108, 199, 200, 203, 330, 997)
TOLERANCE = 1e-5
RANDOM_TOLERANCE = 5e-5  # a norm over four elements amplifies rounding


def features(num_frames: int, num_bins: int = 128, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + num_frames)
    return torch.randn(num_bins, num_frames, generator=generator)


@pytest.fixture(scope="module")
def values(qwen3_omni_dir: Path) -> dict[str, Any]:
    config: dict[str, Any] = read_json(qwen3_omni_dir / "config.json")["thinker_config"]["audio_config"]
    return config


@pytest.fixture(scope="module")
def tower(qwen3_omni_dir: Path, values: dict[str, Any]) -> Qwen3AudioTower:
    return load_audio_tower(qwen3_omni_dir, values, prefix=PREFIX)


@pytest.fixture(scope="module")
def reference(qwen3_omni_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Qwen3OmniMoeAudioEncoder:
    from transformers import Qwen3OmniMoeForConditionalGeneration

    model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(qwen3_omni_dir)
    encoder: Qwen3OmniMoeAudioEncoder = model.thinker.model.audio_tower.eval()
    return encoder


@torch.inference_mode()
def encode_alone(reference: Qwen3OmniMoeAudioEncoder, clip: Tensor) -> Tensor:
    rows: Tensor = reference(clip, feature_lens=torch.tensor([clip.shape[1]])).last_hidden_state
    return rows


def assert_equal(
    rows: list[Tensor],
    reference: Qwen3OmniMoeAudioEncoder,
    clips: list[Tensor],
    tolerance: float = TOLERANCE,
) -> None:
    for own, clip in zip(rows, clips, strict=True):
        torch.testing.assert_close(own, encode_alone(reference, clip), atol=tolerance, rtol=0)


def test_a_batch_of_clips(tower: Qwen3AudioTower, reference: Qwen3OmniMoeAudioEncoder) -> None:
    clips = [features(length) for length in LENGTHS]
    rows = result_of(tower.encode(clips))
    assert [len(own) for own in rows] == [tower.num_tokens(length) for length in LENGTHS]
    assert_equal(rows, reference, clips)


def test_no_clips(tower: Qwen3AudioTower) -> None:
    assert result_of(tower.encode([])) == []


def test_a_short_clip_does_not_depend_on_a_longer_one(
    tower: Qwen3AudioTower, reference: Qwen3OmniMoeAudioEncoder
) -> None:
    """The reference pads a clip shorter than a chunk to the longest of the batch: there it changes."""
    short, long = features(53), features(330)
    own = result_of(tower.encode([long, short]))[1]
    lengths = torch.tensor([53, 330])
    with torch.inference_mode():
        batched = reference(torch.cat((short, long), 1), feature_lens=lengths).last_hidden_state
    alone = encode_alone(reference, short)
    assert (batched[: len(alone)] - alone).abs().max() > 1e-4
    torch.testing.assert_close(own, alone, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("seed", range(3))
def test_neighbours_change_nothing(tower: Qwen3AudioTower, seed: int) -> None:
    clips = [features(length) for length in LENGTHS]
    alone = [result_of(tower.encode([clip]))[0] for clip in clips]
    order = torch.randperm(len(clips), generator=torch.Generator().manual_seed(seed)).tolist()
    for start, end in ((0, 5), (5, 12)):
        rows = result_of(tower.encode([clips[index] for index in order[start:end]]))
        for own, index in zip(rows, order[start:end], strict=True):
            torch.testing.assert_close(own, alone[index], atol=1e-6, rtol=0)


def test_slices(tower: Qwen3AudioTower, monkeypatch: pytest.MonkeyPatch) -> None:
    """However finely the work is cut, and however few rows run together, the rows stay."""
    clips = [features(length) for length in (997, 53, 1200)]
    whole = result_of(tower.encode(clips))
    monkeypatch.setattr(packed_blocks, "CPU_SLICE_FLOPS", 1.0)
    monkeypatch.setattr(packed_blocks, "MIN_SLICE_ROWS", 1)
    monkeypatch.setattr("omnistage.models.qwen3_audio_tower.CPU_PACK_ROWS", 30)
    num_slices = sum(1 for _ in tower.encode(clips))
    assert num_slices > 1000
    for own, expected in zip(result_of(tower.encode(clips)), whole, strict=True):
        torch.testing.assert_close(own, expected, atol=TOLERANCE, rtol=0)


def test_bfloat16_is_as_close_as_the_reference(
    qwen3_omni_dir: Path, values: dict[str, Any], reference: Qwen3OmniMoeAudioEncoder, tmp_path: Path
) -> None:
    clips = [features(length).bfloat16().float() for length in (53, 330)]
    rounded = Qwen3OmniMoeAudioEncoder(Qwen3OmniMoeAudioEncoderConfig(**AUDIO)).eval()
    rounded.load_state_dict({name: t.bfloat16().float() for name, t in reference.state_dict().items()})
    exact = [encode_alone(rounded, clip) for clip in clips]
    rounded.bfloat16()
    tower = load_audio_tower(qwen3_omni_dir, values, prefix=PREFIX, dtype=torch.bfloat16)
    for own, clip, expected in zip(result_of(tower.encode(clips)), clips, exact, strict=True):
        assert own.dtype == torch.bfloat16
        own_error = (own.float() - expected).square().mean().sqrt()
        assert own_error < 1.2 * (encode_alone(rounded, clip).float() - expected).square().mean().sqrt()


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    heads = draw(st.integers(1, 4))
    # The reference counts 13 positions a chunk, whatever its size: so chunks of 98 to 104 frames.
    n_window = draw(st.integers(49, 52))
    return {
        "num_mel_bins": draw(st.sampled_from([40, 80, 128, 129])),
        "d_model": heads * draw(st.sampled_from([4, 6, 16, 24])),
        "encoder_layers": draw(st.integers(1, 3)),
        "encoder_attention_heads": heads,
        "encoder_ffn_dim": draw(st.integers(8, 90)),
        "activation_function": draw(st.sampled_from(["gelu", "relu", "silu", "gelu_pytorch_tanh"])),
        "n_window": n_window,
        "n_window_infer": 2 * n_window * draw(st.integers(1, 4)) + draw(st.integers(0, 2 * n_window - 1)),
        "downsample_hidden_size": draw(st.integers(1, 20)),
        "output_dim": draw(st.integers(1, 70)),
    }


@settings(max_examples=15, deadline=None)
@given(values=configurations(), lengths=st.lists(st.integers(1, 700), min_size=1, max_size=5))
def test_any_configuration(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any], lengths: list[int]
) -> None:
    reference = Qwen3OmniMoeAudioEncoder(Qwen3OmniMoeAudioEncoderConfig(**values)).eval()
    directory = tmp_path_factory.mktemp("tower")
    save_tower(reference, directory, "part.")
    tower = load_audio_tower(directory, values, prefix="part.")
    clips = [features(length, values["num_mel_bins"], seed) for seed, length in enumerate(lengths)]
    assert_equal(result_of(tower.encode(clips)), reference, clips, RANDOM_TOLERANCE)


def test_what_the_configuration_leaves_out() -> None:
    """A checkpoint that transformers has written again names only what differs from its defaults."""
    config = Qwen3OmniMoeAudioEncoderConfig(encoder_layers=2)
    assert AudioTowerConfig.from_json({"encoder_layers": 2}) == AudioTowerConfig.from_json(config.to_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"encoder_layers": 4}, r"layers\.3\.self_attn_layer_norm\.weight is missing"),
        ({"encoder_layers": 2}, "tensors that its config.json does not ask for"),
        ({"output_dim": 65}, r"proj2\.weight .* shape \[64, 64\].* asks for \[65, 64\]"),
        ({"activation_function": "tanh"}, "activation 'tanh' is not supported; known: gelu"),
        ({"n_window_infer": 99}, "99 frames, but must hold at least one chunk"),
        ({"encoder_attention_heads": 5}, "d_model 64 must be a multiple"),
    ],
)
def test_unfit_configuration(
    qwen3_omni_dir: Path, values: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(WeightsError, match=message):
        load_audio_tower(qwen3_omni_dir, {**values, **change}, prefix=PREFIX)


def test_features_of_another_model(tower: Qwen3AudioTower) -> None:
    with pytest.raises(WeightsError, match="80 mel bins, the audio tower needs 128"):
        result_of(tower.encode([features(100, num_bins=80)]))
