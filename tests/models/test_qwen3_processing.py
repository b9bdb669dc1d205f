"""Single items come out as the model's own processor makes them, and take as many places in the prompt."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoProcessor

from omnistage.errors import MediaError, WeightsError
from omnistage.models.loader import read_json
from omnistage.models.qwen3_processing import Qwen3Processing
from omnistage.models.qwen3_tokens import num_audio_tokens
from tests.models.qwen_checkpoints import make_audio, make_image, make_video, write_json

PICTURE_SIZES = [(160, 128), (96, 200), (1, 1), (3, 40), (40, 3), (1, 190), (31, 33), (448, 448), (640, 20)]
VIDEO_SIZES = [(8, 112, 112), (5, 64, 48), (1, 33, 40), (2, 300, 20), (40, 128, 96)]
NUM_SAMPLES = [201, 320, 321, 799, 16000, 16001, 24079, 84800, 160000]


@dataclass
class Family:
    """A model's processor, and ours."""

    directory: Path
    theirs: Any
    own: Qwen3Processing

    def count(self, made: Any, name: str) -> int:
        token: int = getattr(self.theirs, f"{name}_token_id")
        return int((made["input_ids"] == token).sum())


@pytest.fixture(scope="module", params=["omni", "vl"])
def family(request: pytest.FixtureRequest, qwen3_omni_dir: Path, qwen3_vl_dir: Path) -> Family:
    directory = qwen3_omni_dir if request.param == "omni" else qwen3_vl_dir
    return Family(directory, AutoProcessor.from_pretrained(directory), Qwen3Processing(directory))


@pytest.fixture(scope="module")
def omni(qwen3_omni_dir: Path) -> Family:
    theirs = AutoProcessor.from_pretrained(qwen3_omni_dir)
    return Family(qwen3_omni_dir, theirs, Qwen3Processing(qwen3_omni_dir))


def assert_same_picture(family: Family, pixels: np.ndarray) -> None:
    own = family.own.image(pixels)
    made = family.theirs(
        text=[family.theirs.image_token],
        images=[pixels],
        images_kwargs={"input_data_format": "channels_last"},  # three rows of pixels look like three colours
        return_tensors="pt",
    )
    assert torch.equal(own.pixels, made["pixel_values"])
    assert list(own.grid) == made["image_grid_thw"][0].tolist()
    num_tokens = family.count(made, "image")
    assert family.own.num_visual_tokens(own.grid) == num_tokens
    assert family.own.num_image_tokens(*pixels.shape[:2]) == num_tokens


@pytest.mark.parametrize(("width", "height"), PICTURE_SIZES)
def test_picture(family: Family, width: int, height: int) -> None:
    assert_same_picture(family, make_image(width, height, seed=width))


@settings(max_examples=20, deadline=None)
@given(width=st.integers(1, 300), height=st.integers(1, 300))
def test_any_picture(omni: Family, width: int, height: int) -> None:
    if max(width, height) <= 200 * min(width, height):
        assert_same_picture(omni, make_image(width, height))


def test_a_picture_that_must_not_be_written_to(omni: Family) -> None:
    pixels = make_image()
    expected = omni.own.image(pixels)
    pixels.flags.writeable = False
    assert torch.equal(omni.own.image(pixels).pixels, expected.pixels)


@pytest.mark.parametrize(("num_frames", "width", "height"), VIDEO_SIZES)
@pytest.mark.parametrize("fps", [2.0, 0.7])
def test_video(family: Family, num_frames: int, width: int, height: int, fps: float) -> None:
    frames = make_video(num_frames, width, height)
    is_omni = family.own.sample_rate > 0
    if not is_omni and num_frames == 1:
        with pytest.raises(MediaError, match="a video of 1 frames of 33 x 40 pixels cannot be used"):
            family.own.video(list(frames), fps)
        return
    own = family.own.video(list(frames), fps)
    settings: dict[str, Any] = {"do_sample_frames": False, "cap_pixels_per_frame": False}
    if is_omni:
        settings["fps"] = fps
    else:
        metadata = {"fps": fps, "total_num_frames": num_frames, "frames_indices": list(range(num_frames))}
        settings["video_metadata"] = [metadata]
    made = family.theirs(
        text=[family.theirs.video_token], videos=[frames], videos_kwargs=settings, return_tensors="pt"
    )
    assert torch.equal(own.patches.pixels, made["pixel_values_videos"])
    assert list(own.patches.grid) == made["video_grid_thw"][0].tolist()
    num_tokens = family.count(made, "video")
    assert family.own.num_visual_tokens(own.patches.grid) == num_tokens
    assert family.own.num_video_tokens(num_frames, height, width) == num_tokens
    assert own.second_per_grid == pytest.approx(2 / fps)
    if is_omni:
        assert np.float32(own.second_per_grid) == made["video_second_per_grid"][0].numpy()


@pytest.mark.parametrize("num_frames", [1, 4, 5, 8, 11])
def test_a_long_video_is_processed_in_pieces(
    family: Family, num_frames: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which must not show; Qwen3-VL sizes its frames by how many there are, so it gets them all at once."""
    is_omni = family.own.sample_rate > 0
    frames = make_video(max(num_frames, 1 if is_omni else 2), 200, 120)
    whole = family.own.video(frames, 2.0)
    monkeypatch.setattr("omnistage.models.qwen3_processing.FRAMES_AT_ONCE", 5)
    calls: list[int] = []
    few_frames = family.own._few_frames

    def counted(piece: Any, what: str) -> Any:
        calls.append(len(piece))
        return few_frames(piece, what)

    monkeypatch.setattr(family.own, "_few_frames", counted)
    pieces = family.own.video(frames, 2.0)
    assert torch.equal(pieces.patches.pixels, whole.patches.pixels)
    assert pieces.patches.grid == whole.patches.grid
    assert calls == (
        [min(4, len(frames) - first) for first in range(0, len(frames), 4)] if is_omni else [len(frames)]
    )


def test_frames_that_share_a_budget(omni: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cap on all pixels of a video makes the size of a frame depend on their number."""
    monkeypatch.setattr("omnistage.models.qwen3_processing.FRAMES_AT_ONCE", 4)
    settings = {**omni.own._video_settings, "cap_pixels_per_frame": True}
    monkeypatch.setattr(omni.own, "_video_settings", settings)
    for processor in (omni.own._videos, omni.theirs.video_processor):
        monkeypatch.setattr(processor, "max_video_tokens", 600)
    frames = make_video(40, 500, 500)
    own = omni.own.video(frames, 2.0)
    made = omni.theirs.video_processor(
        [torch.from_numpy(frames.transpose(0, 3, 1, 2).copy())],
        do_sample_frames=False,
        return_tensors="pt",
        **settings,
    )
    assert torch.equal(own.patches.pixels, made["pixel_values_videos"])
    alone = omni.own.video(frames[:4], 2.0)
    assert alone.patches.grid[1:] != own.patches.grid[1:]


@pytest.mark.parametrize("num_samples", NUM_SAMPLES)
def test_sound(omni: Family, num_samples: int) -> None:
    samples = make_audio(num_samples / 16000 + 1e-5, seed=num_samples)[:num_samples]
    own = omni.own.audio(samples)
    made = omni.theirs(text=[omni.theirs.audio_token], audio=[samples], return_tensors="pt")
    assert torch.equal(own, made["input_features"][0])
    num_frames = int(made["feature_attention_mask"].sum())
    assert own.shape == (128, num_frames)
    assert omni.own.num_frames(num_samples) == num_frames
    assert num_audio_tokens(num_frames, 100) == omni.count(made, "audio")


def test_sound_does_not_depend_on_longer_sound(omni: Family) -> None:
    """The processor pads a short clip of a batch with zeros, which changes its last frames."""
    short, long = make_audio(0.53), make_audio(2.0, seed=1)
    text = [omni.theirs.audio_token] * 2
    batch = omni.theirs(text=text, audio=[short, long], padding=True, return_tensors="pt")
    own = omni.own.audio(short)
    difference = (batch["input_features"][0, :, : own.shape[1]] - own).abs().amax(0)
    assert difference[-1] > 1e-3
    assert difference[:-2].max() < 1e-5


def test_nested_settings(qwen3_omni_dir: Path, omni: Family, tmp_path: Path) -> None:
    """A model directory that transformers has written again keeps its settings in processor_config.json."""
    omni.theirs.save_pretrained(tmp_path)
    write_json(tmp_path / "config.json", read_json(qwen3_omni_dir / "config.json"))
    again = Qwen3Processing(tmp_path)
    frames = list(make_video(4))
    assert torch.equal(again.image(make_image()).pixels, omni.own.image(make_image()).pixels)
    assert torch.equal(again.video(frames, 2.0).patches.pixels, omni.own.video(frames, 2.0).patches.pixels)
    assert torch.equal(again.audio(make_audio()), omni.own.audio(make_audio()))


def test_frames_per_second(qwen3_omni_dir: Path, omni: Family, tmp_path: Path) -> None:
    """The checkpoint's, where it says so."""
    assert omni.own.video_fps == 2.0
    for path in qwen3_omni_dir.glob("*"):
        if path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
    videos = {**omni.theirs.video_processor.to_dict(), "fps": 4}
    write_json(tmp_path / "video_preprocessor_config.json", {**videos, "resample": 3})
    assert Qwen3Processing(tmp_path).video_fps == 4.0


def test_unusable_media(family: Family) -> None:
    own = family.own
    with pytest.raises(MediaError, match=r"a picture of 2 x 401 pixels cannot be used: .*200"):
        own.image(make_image(2, 401))
    with pytest.raises(MediaError, match=r"a picture of 2 x 401 pixels cannot be used: .*200"):
        own.num_image_tokens(401, 2)
    with pytest.raises(MediaError, match=r"a picture must be uint8 .*, not float32 \[4, 4, 3\]"):
        own.image(np.zeros((4, 4, 3), np.float32))  # type: ignore[arg-type]
    with pytest.raises(MediaError, match=r"not uint8 \[0, 4, 3\]"):
        own.image(np.zeros((0, 4, 3), np.uint8))
    with pytest.raises(MediaError, match=r"not 0 frames at 2\.0 per second"):
        own.video([], 2.0)
    with pytest.raises(MediaError, match="not 2 frames at nan per second"):
        own.video(list(make_video(2)), float("nan"))
    with pytest.raises(MediaError, match=r"not \[40, 32, 3\] after \[32, 32, 3\]"):
        own.video([make_image(32, 32), make_image(32, 40)], 2.0)


def test_unusable_sound(omni: Family, qwen3_vl_dir: Path) -> None:
    for samples in (np.zeros(200, np.float32), np.zeros((2, 16000), np.float32)):
        with pytest.raises(MediaError, match="at least 201 samples at 16000 Hz"):
            omni.own.audio(samples)
    with pytest.raises(MediaError, match="takes no sound"):
        Qwen3Processing(qwen3_vl_dir).audio(make_audio())


def test_directory_without_settings(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="has no processor for pictures and videos"):
        Qwen3Processing(tmp_path)
