"""Towers of any size behind the encoders, from raw media to payloads, against transformers built on the fly.

Each seed draws a configuration of both towers and of their preprocessing, and media of odd sizes.
"""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoProcessor
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeAudioEncoderConfig,
    Qwen3OmniMoeVisionEncoderConfig,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeAudioEncoder,
    Qwen3OmniMoeVisionEncoder,
)

from omnistage.models.loader import read_json
from omnistage.models.protocols import VideoFrames
from omnistage.models.registry import find_part, load_encoder
from omnistage.ops.tensors import to_torch
from omnistage.types import Payload
from tests.models.qwen_checkpoints import (
    init_weights,
    make_audio,
    make_image,
    make_video,
    published_tensors,
    result_of,
    save_shards,
    write_json,
)

SEEDS = range(24)
TOLERANCE = 5e-5  # a norm over few elements amplifies rounding
NEIGHBOUR_TOLERANCE = 5e-6
VISION_PREFIX, AUDIO_PREFIX = "thinker.visual.", "thinker.audio_tower."


def vision_values(dice: random.Random) -> dict[str, Any]:
    heads, depth = dice.randint(1, 4), dice.randint(1, 5)
    return {
        "depth": depth,
        "hidden_size": heads * dice.choice([8, 12, 16, 20]),
        "num_heads": heads,
        "intermediate_size": dice.randint(16, 90),
        "hidden_act": dice.choice(["gelu_pytorch_tanh", "gelu", "silu"]),
        "patch_size": dice.choice([14, 16, 20]),
        "spatial_merge_size": dice.randint(1, 3),
        "temporal_patch_size": dice.choice([1, 2, 2, 3]),
        "out_hidden_size": dice.randint(8, 70),
        "num_position_embeddings": dice.randint(2, 13) ** 2,
        "deepstack_visual_indexes": dice.sample(range(depth), dice.randint(0, depth)),
    }


def audio_values(dice: random.Random) -> dict[str, Any]:
    heads = dice.randint(1, 4)
    # The reference counts 13 positions a chunk, whatever its size: so chunks of 98 to 104 frames.
    n_window = dice.randint(49, 52)
    return {
        "num_mel_bins": dice.choice([40, 80, 128]),
        "d_model": heads * dice.choice([8, 16, 24]),
        "encoder_layers": dice.randint(1, 4),
        "encoder_attention_heads": heads,
        "encoder_ffn_dim": dice.randint(16, 90),
        "activation_function": dice.choice(["gelu", "relu", "silu"]),
        "n_window": n_window,
        "n_window_infer": 2 * n_window * dice.randint(1, 4) + dice.randint(0, 2 * n_window - 1),
        "downsample_hidden_size": dice.randint(4, 20),
        "output_dim": dice.randint(8, 70),
    }


@dataclass
class Model:
    """A model directory with towers only, and the same in transformers."""

    directory: Path
    processor: Any
    visual: Any
    audio_tower: Any

    @torch.inference_mode()
    def rows(self, raw: np.ndarray | VideoFrames) -> tuple[Tensor, Tensor | None]:
        """Rows [num_tokens, hidden] of one medium alone, and deepstack rows if there are any."""
        if isinstance(raw, np.ndarray) and raw.ndim == 1:
            made = self.processor(text=[self.processor.audio_token], audio=[raw], return_tensors="pt")
            length = made["feature_attention_mask"].sum(1)
            features = made["input_features"][0, :, : int(length)]
            return self.audio_tower(features, feature_lens=length).last_hidden_state, None
        if isinstance(raw, VideoFrames):
            settings = {"do_sample_frames": False, "fps": raw.fps, "cap_pixels_per_frame": False}
            made = self.processor(
                text=[self.processor.video_token],
                videos=[raw.frames],
                videos_kwargs=settings,
                return_tensors="pt",
            )
            out = self.visual(made["pixel_values_videos"], grid_thw=made["video_grid_thw"])
        else:
            made = self.processor(text=[self.processor.image_token], images=[raw], return_tensors="pt")
            out = self.visual(made["pixel_values"], grid_thw=made["image_grid_thw"])
        return out.pooler_output, torch.stack(out.deepstack_features) if out.deepstack_features else None


def build(dice: random.Random, source: Path, directory: Path) -> Model:
    """source: a whole checkpoint, for its tokenizer and the layout of its files."""
    for path in source.iterdir():
        if not path.name.startswith("model"):
            shutil.copy(path, directory / path.name)
    vision, audio = vision_values(dice), audio_values(dice)
    config = read_json(source / "config.json")
    config["thinker_config"]["vision_config"].update(vision)
    config["thinker_config"]["audio_config"].update(audio)
    write_json(directory / "config.json", config)
    smallest = dice.choice([1, 56 * 56])
    settings = {
        **read_json(source / "preprocessor_config.json"),
        "patch_size": vision["patch_size"],
        "merge_size": vision["spatial_merge_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
        "feature_size": audio["num_mel_bins"],
        "min_pixels": smallest,
        "max_pixels": dice.choice([200 * 200, 1000 * 1000]),
    }
    write_json(directory / "preprocessor_config.json", settings)
    visual = Qwen3OmniMoeVisionEncoder(Qwen3OmniMoeVisionEncoderConfig(**vision)).eval()
    audio_tower = Qwen3OmniMoeAudioEncoder(Qwen3OmniMoeAudioEncoderConfig(**audio)).eval()
    tensors = {}
    for tower, prefix in ((visual, VISION_PREFIX), (audio_tower, AUDIO_PREFIX)):
        init_weights(tower)
        tensors.update({prefix + name: tensor for name, tensor in published_tensors(tower).items()})
    save_shards(tensors, directory)
    return Model(directory, AutoProcessor.from_pretrained(directory), visual, audio_tower)


@pytest.mark.parametrize("seed", SEEDS)
def test_any_towers(seed: int, qwen3_omni_dir: Path, tmp_path: Path) -> None:
    dice = random.Random(seed)
    model = build(dice, qwen3_omni_dir, tmp_path)
    seen: list[np.ndarray | VideoFrames] = [
        make_image(dice.randint(5, 300), dice.randint(5, 300), seed + index) for index in range(3)
    ]
    seen += [
        VideoFrames(make_video(dice.randint(1, 5), dice.randint(20, 200), dice.randint(20, 200)), fps)
        for fps in (2.0, dice.uniform(0.3, 9))
    ]
    dice.shuffle(seen)
    check(load_encoder(find_part(tmp_path, "visual")), model, seen)
    heard = [make_audio(dice.choice([0.02, 0.3, 1.0, 2.5]) + dice.random(), index) for index in range(4)]
    check(load_encoder(find_part(tmp_path, "audio_tower")), model, heard)


def check(encoder: Any, model: Model, raws: list[Any]) -> None:
    """Together and alone, each item gives what the reference gives for it alone."""
    prepared = [encoder.preprocess(raw, {}) for raw in raws]
    together: list[Payload] = result_of(encoder.encode(prepared))
    for raw, item, payload in zip(raws, prepared, together, strict=True):
        (alone,) = result_of(encoder.encode([item]))
        assert alone.info == payload.info
        assert alone.tensors.keys() == payload.tensors.keys()
        for name, tensor in payload.tensors.items():
            close(to_torch(alone.tensors[name]), to_torch(tensor), NEIGHBOUR_TOLERANCE)
        rows, deepstack = model.rows(raw)
        assert payload.info["num_tokens"] == len(rows)
        close(to_torch(payload.tensors["embeddings"]), rows, TOLERANCE)
        assert ("deepstack" in payload.tensors) == (deepstack is not None)
        if deepstack is not None:
            close(to_torch(payload.tensors["deepstack"]), deepstack, TOLERANCE)


def close(own: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(own, expected, atol=tolerance, rtol=0)
