"""Pictures, videos and sound to what the towers of Qwen3-Omni and Qwen3-VL take.

The arithmetic and its settings are those of transformers' processors and of the model directory;
this module gives them single items and turns their complaints into MediaError.
Knows no towers, no prompts and no media files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoProcessor, Qwen2VLVideoProcessor, Qwen3VLProcessor

from omnistage.errors import MediaError, WeightsError
from omnistage.models.qwen3_tokens import Grid, num_visual_tokens
from omnistage.models.qwen3_vision_tower import Patches

# Frames per second of a clip if nobody says: the rate at which the models' published tools take them.
VIDEO_FPS = 2.0
# Frames of a video processed at once; their float copies are several times the size of their pixels.
FRAMES_AT_ONCE = 32

Frames = Sequence[NDArray[np.uint8]] | NDArray[np.uint8]


@dataclass(frozen=True)
class VideoPatches:
    """A video for the vision tower.

    second_per_grid: seconds between its frame pairs.  The reference rounds it to float32 before it
    computes positions, but not before it sorts a sound track between the frames.
    """

    patches: Patches
    second_per_grid: float


class Qwen3Processing:
    """What precedes the towers.  Results equal the model's own processor given one item alone.

    sample_rate: Hz that sound must have; 0 if the model takes none.
    video_fps: frames per second to take of a clip; the checkpoint's, or VIDEO_FPS.
    writes_frame_times: the prompt has the time of every frame pair as text between their rows.
    merge_size: patches a side of the square that becomes one row.
    """

    def __init__(self, directory: Path) -> None:
        """directory: the model's.  Raises WeightsError if it has no usable processor."""
        try:
            processor = AutoProcessor.from_pretrained(directory, local_files_only=True)
            self._images, self._videos = processor.image_processor, processor.video_processor
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise WeightsError(
                f"{directory} has no processor for pictures and videos ({error}); fetch "
                "preprocessor_config.json and the tokenizer of the model again"
            ) from error
        self._sound = getattr(processor, "feature_extractor", None)
        # The processor's own settings precede those of its parts: the frame size of videos is one.
        self._video_settings = {**getattr(processor, "videos_kwargs", {}), **_uncapped(self._videos)}
        self._video_settings.pop("return_metadata", None)
        self._sound_settings = dict(getattr(processor, "audio_kwargs", {}))
        self.sample_rate = int(self._sound.sampling_rate) if self._sound is not None else 0
        self.merge_size = int(self._images.merge_size)
        self.video_fps = float(getattr(self._videos, "fps", None) or VIDEO_FPS)
        self.writes_frame_times = isinstance(processor, Qwen3VLProcessor)

    def image(self, pixels: NDArray[np.uint8]) -> Patches:
        """pixels: [height, width, 3].  Raises MediaError if the picture cannot be used."""
        _check_pixels(pixels, "a picture")
        planes = torch.from_numpy(np.array(pixels.transpose(2, 0, 1), order="C"))
        made = _attempt(
            lambda: self._images([planes], input_data_format="channels_first", return_tensors="pt"),
            f"a picture of {pixels.shape[1]} x {pixels.shape[0]} pixels",
        )
        return Patches(made["pixel_values"], _grid(made["image_grid_thw"]))

    def video(self, frames: Frames, fps: float) -> VideoPatches:
        """frames: the pictures to show, each [height, width, 3] of one size; none is left out.

        fps: frames per second of these (not of the file they come from).  The last frame is repeated
        until the frames fill whole pairs.  Raises MediaError if the video cannot be used.
        """
        if not len(frames) or not math.isfinite(fps) or fps <= 0:
            raise MediaError(
                f"a video needs a frame and a positive rate, not {len(frames)} frames at {fps} per second"
            )
        for frame in frames:
            _check_pixels(frame, "a frame")
            if frame.shape != frames[0].shape:
                raise MediaError(
                    f"frames must have one size, not {list(frame.shape)} after {list(frames[0].shape)}"
                )
        what = f"a video of {len(frames)} frames of {frames[0].shape[1]} x {frames[0].shape[0]} pixels"
        pairs = -(-len(frames) // self._videos.temporal_patch_size)
        pixels, rows = torch.empty(0), 0
        for piece in self._pieces(frames):
            made = self._few_frames(piece, what)
            _, height, width = _grid(made["video_grid_thw"])
            found: Tensor = made["pixel_values_videos"]
            if not rows:
                pixels = found.new_empty(pairs * height * width, found.shape[1])
            pixels[rows : rows + len(found)] = found
            rows += len(found)
        patches = Patches(pixels, (pairs, height, width))
        return VideoPatches(patches, second_per_grid=self._videos.temporal_patch_size / fps)

    def _pieces(self, frames: Frames) -> Iterator[Frames]:
        """Runs of whole frame pairs; or all frames, unless it is sure that each is resized by itself."""
        pair = int(self._videos.temporal_patch_size)
        step = max(1, FRAMES_AT_ONCE // pair) * pair
        cap = getattr(self._videos, "cap_pixels_per_frame", True)
        is_capped = self._video_settings.get("cap_pixels_per_frame", cap)
        if is_capped or type(self._videos) is not Qwen2VLVideoProcessor:
            step = len(frames)
        for first in range(0, len(frames), step):
            yield frames[first : first + step]

    def _few_frames(self, frames: Frames, what: str) -> Any:
        """What the model's processor makes of a video of these frames alone."""
        planes = torch.from_numpy(np.stack([frame.transpose(2, 0, 1) for frame in frames]))
        return _attempt(
            lambda: self._videos(
                [planes],
                input_data_format="channels_first",
                do_sample_frames=False,
                return_tensors="pt",
                **self._video_settings,
            ),
            what,
        )

    def audio(self, samples: NDArray[np.float32]) -> Tensor:
        """Log-mel features [num_mel_bins, num_frames], float32.

        samples: [num_samples], at `sample_rate`.  Raises MediaError for a clip too short to analyse
        and for any clip if the model takes no sound.
        """
        if self._sound is None:
            raise MediaError("this model takes no sound; send pictures, videos or text")
        shortest = self._sound.n_fft // 2 + 1  # the spectrum mirrors half a window at either end
        if samples.ndim != 1 or len(samples) < shortest:
            raise MediaError(
                f"sound must be [num_samples] with at least {shortest} samples at {self.sample_rate} Hz, "
                f"not {list(samples.shape)}; send a longer clip"
            )
        settings = {**self._sound_settings, "sampling_rate": self.sample_rate, "return_attention_mask": True}
        made = self._sound([np.asarray(samples, np.float32)], return_tensors="pt", **settings)
        features: Tensor = made["input_features"][0]
        return features[:, : int(made["attention_mask"].sum())]

    def num_frames(self, num_samples: int) -> int:
        """Log-mel frames of a clip of so many samples."""
        return num_samples // int(self._sound.hop_length) if self._sound is not None else 0

    def num_image_tokens(self, height: int, width: int) -> int:
        """Rows of a picture of that size in pixels.  Raises MediaError if it cannot be used."""
        count: int = _attempt(
            lambda: self._images.get_number_of_image_patches(height, width, {}),
            f"a picture of {width} x {height} pixels",
        )
        return count // self.merge_size**2

    def num_video_tokens(self, num_frames: int, height: int, width: int) -> int:
        """Rows of a video of so many frames of that size.  Raises MediaError if it cannot be used."""
        count: int = _attempt(
            lambda: self._videos.get_num_of_video_patches(num_frames, height, width, self._video_settings),
            f"a video of {num_frames} frames of {width} x {height} pixels",
        )
        return count // self.merge_size**2

    def num_visual_tokens(self, grid: Grid) -> int:
        """Rows of a picture or video from its grid of patches."""
        return num_visual_tokens(grid, self.merge_size)


def _uncapped(video_processor: Any) -> dict[str, bool]:
    """States what transformers otherwise decides by its version: no cap on a frame's pixels."""
    is_undecided = getattr(video_processor, "cap_pixels_per_frame", False) is None
    return {"cap_pixels_per_frame": False} if is_undecided else {}


def _check_pixels(pixels: NDArray[Any], what: str) -> None:
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or 0 in pixels.shape:
        raise MediaError(
            f"{what} must be uint8 [height, width, 3] and not empty, not {pixels.dtype} {list(pixels.shape)}"
        )


def _attempt(process: Callable[[], Any], what: str) -> Any:
    try:
        return process()
    except ValueError as error:
        raise MediaError(f"{what} cannot be used: {error}; send it in another size") from error


def _grid(grids: Tensor) -> Grid:
    """grids: [1, 3]."""
    frames, height, width = grids[0].tolist()
    return int(frames), int(height), int(width)
