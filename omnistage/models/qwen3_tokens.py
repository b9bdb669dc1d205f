"""How many rows of a prompt a picture, a video or a clip takes in Qwen3-Omni and Qwen3-VL.

Arithmetic on sizes alone; imports no torch, so that a prompt can be measured anywhere.
"""

from __future__ import annotations

NUM_CONVOLUTIONS = 3  # of stride 2, in the audio tower

Grid = tuple[int, int, int]  # frame pairs, rows and columns of patches


def num_visual_tokens(grid: Grid, merge_size: int) -> int:
    """Rows of a picture or a video whose patches are merged in squares of `merge_size` a side."""
    frames, height, width = grid
    return frames * (height // merge_size) * (width // merge_size)


def num_audio_tokens(num_frames: int, chunk_frames: int) -> int:
    """Rows of a clip of `num_frames` log-mel frames, convolved in chunks of `chunk_frames` (2 * n_window)."""
    whole, rest = divmod(num_frames, chunk_frames)
    return whole * convolved_length(chunk_frames) + convolved_length(rest)


def convolved_length(num_frames: int) -> int:
    """Positions that the audio tower's convolutions make of one chunk."""
    for _ in range(NUM_CONVOLUTIONS):
        num_frames = (num_frames + 1) // 2
    return num_frames
