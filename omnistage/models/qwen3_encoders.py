"""The towers of Qwen3-Omni and Qwen3-VL as encoders: media to rows for the thinker's prompt.

Joins the model's own preprocessing to a tower and its rows to a payload.
Knows neither how a tower computes nor who asked; imports transformers only when a part is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray
from torch import Tensor

from omnistage.errors import MediaError, WeightsError
from omnistage.models.protocols import Modality, Sliced, VideoFrames
from omnistage.models.qwen3_audio_tower import Qwen3AudioTower, load_audio_tower
from omnistage.models.qwen3_tokens import num_visual_tokens
from omnistage.models.qwen3_vision_tower import Patches, Qwen3VisionTower, VisualRows, load_vision_tower
from omnistage.models.weights import dtype_of
from omnistage.ops.tensors import to_host
from omnistage.types import Payload, PortType, Scalar

if TYPE_CHECKING:
    from omnistage.models.qwen3_processing import Qwen3Processing
    from omnistage.models.registry import PartSource


@dataclass(frozen=True)
class VisualItem:
    """A picture, or a video with the seconds between its frame pairs."""

    patches: Patches
    second_per_grid: float | None = None


class Qwen3VisionEncoder:
    """See omnistage.models.protocols.EncoderModel.

    Takes videos if the model's prompt holds one as a single run of rows, but not if the prompt has the
    time of every frame pair as text between them.
    """

    output = PortType.EMBEDDINGS
    sample_rate = 0

    def __init__(self, tower: Qwen3VisionTower, processing: Qwen3Processing) -> None:
        """Raises WeightsError if the processing merges other squares of patches than the tower."""
        if processing.merge_size != tower.config.merge_size:
            raise WeightsError(
                f"preprocessor_config.json merges {processing.merge_size} patches a side, config.json "
                f"{tower.config.merge_size}; take both files of one model"
            )
        self.modalities: tuple[Modality, ...] = ("image",)
        self.video_fps = 0.0
        if not processing.writes_frame_times:
            self.modalities = ("image", "video")
            self.video_fps = processing.video_fps
        self.weight_bytes = tower.weight_bytes
        self._tower = tower
        self._processing = processing

    def preprocess(self, raw: NDArray[Any] | VideoFrames, options: dict[str, Scalar]) -> VisualItem:
        """raw: a picture, uint8 [height, width, 3], or a video.  options: none are used.

        Raises MediaError for what the model's processor refuses, and for a video if the model takes none.
        """
        if not isinstance(raw, VideoFrames):
            return VisualItem(self._processing.image(raw))
        if "video" not in self.modalities:
            raise MediaError("this model takes no videos here; send frames as pictures")
        video = self._processing.video(raw.frames, raw.fps)
        return VisualItem(video.patches, video.second_per_grid)

    def encode(self, items: Sequence[VisualItem]) -> Sliced[list[Payload]]:
        """Per item the tensors "embeddings" [num_tokens, hidden] and, if the tower has such blocks,
        "deepstack" [num_deepstack, num_tokens, hidden], in the tower's dtype.

        info: "modality", "num_tokens", and "t", "h", "w": frame pairs, rows and columns of patches before
        merging; for a video also "second_per_grid", the seconds between frame pairs.
        """
        encoded = yield from self._tower.encode([item.patches for item in items])
        return [self._payload(item, rows) for item, rows in zip(items, encoded, strict=True)]

    def _payload(self, item: VisualItem, rows: VisualRows) -> Payload:
        tensors = {"embeddings": to_host(rows.embeddings)}
        if len(rows.deepstack):
            tensors["deepstack"] = to_host(rows.deepstack)
        frames, height, width = item.patches.grid
        num_tokens = num_visual_tokens(item.patches.grid, self._tower.config.merge_size)
        info: dict[str, Scalar] = {"num_tokens": num_tokens, "t": frames, "h": height, "w": width}
        if item.second_per_grid is None:
            info["modality"] = "image"
        else:
            info.update(modality="video", second_per_grid=item.second_per_grid)
        return Payload(type=PortType.EMBEDDINGS, tensors=tensors, info=info)


class Qwen3AudioEncoder:
    """See omnistage.models.protocols.EncoderModel."""

    modalities: tuple[Modality, ...] = ("audio",)
    output = PortType.EMBEDDINGS
    video_fps = 0.0

    def __init__(self, tower: Qwen3AudioTower, processing: Qwen3Processing) -> None:
        """Raises WeightsError if the processing makes no features of sound."""
        if not processing.sample_rate:
            raise WeightsError(
                "the model has an audio tower but no feature extractor for it; fetch its "
                "preprocessor_config.json again"
            )
        self.sample_rate = processing.sample_rate
        self.weight_bytes = tower.weight_bytes
        self._tower = tower
        self._processing = processing

    def preprocess(self, raw: NDArray[Any] | VideoFrames, options: dict[str, Scalar]) -> Tensor:
        """raw: float32 [num_samples] at sample_rate.  options: none are used.

        Returns log-mel features [num_mel_bins, num_frames].  Raises MediaError for a clip too short, and
        for the frames of a video.
        """
        if isinstance(raw, VideoFrames):
            raise MediaError("the audio tower takes sound, not videos; give it the sound track")
        return self._processing.audio(raw)

    def encode(self, items: Sequence[Tensor]) -> Sliced[list[Payload]]:
        """Per clip the tensor "embeddings" [num_tokens, hidden] in the tower's dtype.

        info: "modality", "num_tokens".
        """
        encoded = yield from self._tower.encode(items)
        return [
            Payload(
                type=PortType.EMBEDDINGS,
                tensors={"embeddings": to_host(rows)},
                info={"modality": "audio", "num_tokens": len(rows)},
            )
            for rows in encoded
        ]


def load_vision_encoder(
    source: PartSource, *, device: str = "cpu", dtype: str = "float32"
) -> Qwen3VisionEncoder:
    """Load the part: source.config is vision_config; source.directory holds the processor's files too.

    Raises WeightsError if a file, a tensor or a setting is missing or wrong.
    """
    tower = load_vision_tower(
        source.directory, source.config, prefix=source.prefix, device=device, dtype=dtype_of(dtype)
    )
    return Qwen3VisionEncoder(tower, _processing(source))


def load_audio_encoder(
    source: PartSource, *, device: str = "cpu", dtype: str = "float32"
) -> Qwen3AudioEncoder:
    """As load_vision_encoder; source.config is audio_config."""
    tower = load_audio_tower(
        source.directory, source.config, prefix=source.prefix, device=device, dtype=dtype_of(dtype)
    )
    return Qwen3AudioEncoder(tower, _processing(source))


def _processing(source: PartSource) -> Qwen3Processing:
    from omnistage.models.qwen3_processing import Qwen3Processing

    return Qwen3Processing(source.directory)
