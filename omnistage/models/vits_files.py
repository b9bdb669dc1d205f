"""The files of a converted voice's part: where they are and whether they fit the network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from omnistage.errors import WeightsError

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
PHONEMES_FILE = "phonemes.json"


def read_weights(directory: Path, shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """All tensors of a part, on the CPU.

    shapes: every name the network needs, with its shape.  Raises WeightsError if the file is missing
    or damaged, or if a name or a shape differs.
    """
    path = directory / WEIGHTS_FILE
    try:
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"cannot read {path}: {error}; fetch or convert the voice again") from error
    missing, unknown = sorted(shapes.keys() - weights.keys()), sorted(weights.keys() - shapes.keys())
    if missing or unknown:
        raise WeightsError(
            f"{path} does not fit its config.json: missing {missing[:3]}, unknown {unknown[:3]}; "
            "convert the voice again"
        )
    for name, shape in shapes.items():
        if tuple(weights[name].shape) != tuple(shape):
            raise WeightsError(
                f"{path}: {name} has shape {tuple(weights[name].shape)}, config.json wants {tuple(shape)}; "
                "convert the voice again"
            )
    return weights


def require_float32(dtype: str, what: str) -> None:
    """Raises WeightsError unless dtype is "float32"."""
    if dtype != "float32":
        raise WeightsError(
            f"the {what} runs in float32 only, not in {dtype}; set its stage's dtype to float32"
        )
