"""What a stage expects of the part of a model it runs.  A model knows no request and no transport.

Long work is a generator that yields None between slices of about 20 ms (on the reference machine),
so that the worker can hand a shared device to a more urgent stage; its return value is the result.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from omnistage.types import Payload, PortType, Scalar

T = TypeVar("T")
Sliced = Generator[None, None, T]


Modality = Literal["image", "audio", "video"]


@dataclass(frozen=True, eq=False)
class VideoFrames:
    """Frames chosen of a clip: uint8 [num_frames, height, width, 3], and how many there are per second."""

    frames: NDArray[np.uint8]
    fps: float


class EncoderModel(Protocol):
    """Media to text or embeddings.  Item results never depend on their batch neighbours.

    modalities: what it takes.  video_fps: frames per second taken of a clip that does not say; 0.0 if it
    takes no video.
    """

    modalities: tuple[Modality, ...]
    output: PortType
    sample_rate: int  # Hz the audio must have; 0 for images
    video_fps: float
    weight_bytes: int

    def preprocess(self, raw: NDArray[Any] | VideoFrames, options: dict[str, Scalar]) -> Any:
        """raw: image uint8 [height, width, 3], audio float32 [num_samples] at sample_rate, or a video.

        Raises MediaError if the item cannot be encoded.
        """

    def encode(self, items: Sequence[Any]) -> Sliced[list[Payload]]:
        """One Payload per item: text, or tensors {"embeddings": [num_rows, hidden]}."""


class AcousticModel(Protocol):
    """Sentences to vocoder frames."""

    voices: tuple[str, ...]
    num_channels: int
    frame_rate: float  # frames per second
    weight_bytes: int

    def synthesize(
        self, sentence: str, *, voice: str, seed: int, position: int, speed: float
    ) -> Sliced[Tensor]:
        """Latents [num_frames, num_channels], float32, of one sentence.

        position: the sentence's index in the answer; noise is keyed (seed, position) alone.
        """


class VocoderModel(Protocol):
    """Frames to sound, chunk by chunk; the state makes chunked output equal the one-pass decode."""

    sample_rate: int  # Hz
    hop: int  # samples per frame
    weight_bytes: int

    def start(self) -> Any:
        """A fresh streaming state for one utterance (sentence)."""

    def decode(self, state: Any, frames: Tensor, *, is_last: bool) -> NDArray[np.float32]:
        """frames: [num_frames, num_channels], may be empty if is_last.  Returns new samples in [-1, 1].

        Over an utterance exactly num_frames * hop samples come out (less a constant where the model
        says so), whatever the chunking.  A model of codec frames takes int64 codes
        [num_frames, num_codebooks] and raises StreamError for codes it does not have.
        """


class BatchVocoderModel(VocoderModel, Protocol):
    """A vocoder that decodes several utterances at once."""

    def decode_batch(
        self, states: Sequence[Any], frames_list: Sequence[Tensor], is_last_list: Sequence[bool]
    ) -> list[NDArray[np.float32]]:
        """`decode` for each, with the same results.  If it raises, no state has changed."""
