"""Turns the starter's vision weights, a PyTorch state dict, into a safetensors part.

Folds the batch norms into the convolutions, and looks the class names up in the thinker's embedding
table so that no projection has to be trained.  Knows nothing of where the files came from.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from omnistage.errors import WeightsError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor

NORM_EPSILON = 1e-3
NUM_SLOTS = 6  # rows of one picture in the thinker's prompt
MIN_CONFIDENCE = 0.3  # of the best class; below it the picture is called unclear
MIN_CANDIDATE_MASS = 0.7  # of the five best classes together; as above
UNCLEAR = " something unclear"

# Our name -> (convolution, batch norm) of the state dict, inside a block.
BLOCK_PAIRS = {
    "expand": ("_expand_conv", "_bn0"),
    "depthwise": ("_depthwise_conv", "_bn1"),
    "project": ("_project_conv", "_bn2"),
}
OTHER_PAIRS = {"stem": ("_conv_stem", "_bn0"), "head": ("_conv_head", "_bn1")}


def convert_vision(state_path: Path, class_names_path: Path, thinker: Path, target: Path) -> None:
    """Write config, float32 weights, class names and projector of EfficientNet-Lite0 into `target`.

    thinker: the converted thinker's directory, whose token embeddings the projector holds.
    target: an existing, empty directory.  Raises WeightsError for an unexpected state dict.
    """
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file
    from tokenizers import Tokenizer

    state = torch.load(state_path, map_location="cpu", weights_only=True)
    save_file(fold_weights(state), target / "model.safetensors", metadata={"format": "pt"})

    names = json.loads(class_names_path.read_text(encoding="utf-8"))
    with safe_open(thinker / "model.safetensors", "pt") as weights:
        embeddings = weights.get_tensor("model.embed_tokens.weight")  # [vocab, hidden]
    tokenizer = Tokenizer.from_file(str(thinker / "tokenizer.json"))
    projector = build_projector(names, tokenizer, embeddings)
    save_file(projector, target / "projector.safetensors", metadata={"format": "pt"})

    (target / "labels.json").write_text(json.dumps(names, ensure_ascii=False) + "\n", encoding="utf-8")
    config = {
        "model_type": "efficientnet_lite0",
        "image_size": 224,
        "crop_ratio": 0.875,
        "num_classes": len(names),
        "num_slots": NUM_SLOTS,
        "hidden_size": embeddings.shape[1],
        "min_confidence": MIN_CONFIDENCE,
        "min_candidate_mass": MIN_CANDIDATE_MASS,
        "dtype": "float32",
    }
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def fold_weights(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convolutions with their batch norms folded in, under the names of EfficientNetLite0."""
    blocks = sorted({int(name.split(".")[1]) for name in state if name.startswith("_blocks.")})
    pairs = dict(OTHER_PAIRS)
    for block in blocks:
        for ours, (convolution, norm) in BLOCK_PAIRS.items():
            theirs = f"_blocks.{block}.{convolution}"
            if f"{theirs}.weight" in state:
                pairs[f"blocks.{block}.{ours}"] = (theirs, f"_blocks.{block}.{norm}")
    folded: dict[str, Tensor] = {}
    try:
        for ours, (convolution, norm) in pairs.items():
            scale = state[f"{norm}.weight"] / (state[f"{norm}.running_var"] + NORM_EPSILON).sqrt()
            weight = state[f"{convolution}.weight"] * scale[:, None, None, None]
            folded[f"{ours}.weight"] = weight.contiguous()
            folded[f"{ours}.bias"] = state[f"{norm}.bias"] - state[f"{norm}.running_mean"] * scale
        folded["classifier.weight"] = state["_fc.weight"].contiguous()  # stored transposed
        folded["classifier.bias"] = state["_fc.bias"]
    except KeyError as error:
        raise WeightsError(f"the EfficientNet-Lite0 state dict has no {error}; fetch it again") from error
    return folded


def build_projector(names: list[str], tokenizer: Tokenizer, embeddings: Tensor) -> dict[str, Tensor]:
    """The thinker's embeddings of each class name's first tokens.

    embeddings: [vocab, hidden].  Returns "names" [num_classes, NUM_SLOTS, hidden] float32, zero past
    a name's end; "lengths" [num_classes] int64; "unclear" [num_rows, hidden] float32, the words
    that stand for a picture that no class fits.
    """
    import torch

    slots = torch.zeros(len(names), NUM_SLOTS, embeddings.shape[1])
    lengths = torch.zeros(len(names), dtype=torch.int64)
    for index, name in enumerate(names):
        # A remark in brackets tells two classes of one name apart; it is no part of the name.
        plain = re.sub(r"\s*\(.*\)", "", name)
        ids = tokenizer.encode(" " + plain, add_special_tokens=False).ids[:NUM_SLOTS]
        slots[index, : len(ids)] = embeddings[ids].float()
        lengths[index] = len(ids)
    unclear = embeddings[tokenizer.encode(UNCLEAR, add_special_tokens=False).ids].float()
    return {"names": slots, "lengths": lengths, "unclear": unclear}
