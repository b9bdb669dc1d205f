"""What Qwen3-Omni's thinker tells its talker of a prompt, and its form on the wire.

Knows neither of the two stages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from omnistage.errors import StreamError
from omnistage.models.qwen3_omni_positions import PromptMedia
from omnistage.types import HostTensor, Payload, PortType

HIDDEN = "hidden"  # the tensor of exported rows, beside those of the prompt


@dataclass(frozen=True, eq=False)
class HeardPrompt:
    """token_ids: int64 [num_rows], placeholders repeated."""

    token_ids: NDArray[np.int64]
    media: PromptMedia

    def payload(self) -> Payload:
        """As tensors; those without entries are left out."""
        media = self.media
        arrays = {
            "prompt_ids": self.token_ids,
            "image_grids": np.array(media.image_grids, dtype=np.int64),
            "video_grids": np.array(media.video_grids, dtype=np.int64),
            "seconds_per_grid": np.array(media.seconds_per_grid, dtype=np.float64),
            "audio_lengths": np.array(media.audio_lengths, dtype=np.int64),
        }
        tensors = {name: HostTensor.from_numpy(array) for name, array in arrays.items() if array.size}
        return Payload(type=PortType.HIDDEN_STATES, tensors=tensors)

    @classmethod
    def of(cls, payload: Payload) -> HeardPrompt:
        """Raises StreamError if the payload holds no prompt."""

        def rows(name: str) -> NDArray[np.generic]:
            tensor = payload.tensors.get(name)
            return np.empty(0) if tensor is None else tensor.numpy().copy()

        if "prompt_ids" not in payload.tensors:
            raise StreamError("a talker's stream must begin with the prompt; connect it to its own thinker")
        media = PromptMedia(
            image_grids=[_grid(row) for row in rows("image_grids")],
            video_grids=[_grid(row) for row in rows("video_grids")],
            seconds_per_grid=[float(value) for value in rows("seconds_per_grid")],
            audio_lengths=[int(value) for value in rows("audio_lengths")],
        )
        return cls(rows("prompt_ids").astype(np.int64), media)


def _grid(row: NDArray[np.int64]) -> tuple[int, int, int]:
    frames, height, width = (int(value) for value in row)
    return frames, height, width
