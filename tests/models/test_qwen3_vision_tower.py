"""Every picture and video gets what transformers' vision towers give it alone, whatever is beside it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import Qwen3OmniMoeForConditionalGeneration, Qwen3VLForConditionalGeneration
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeVisionEncoderConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeVisionEncoder
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from omnistage.errors import WeightsError
from omnistage.models import packed_blocks
from omnistage.models.loader import read_json
from omnistage.models.qwen3_tokens import Grid
from omnistage.models.qwen3_vision_tower import (
    Patches,
    Qwen3VisionTower,
    VisionTowerConfig,
    VisualRows,
    load_vision_tower,
)
from tests.models.qwen_checkpoints import result_of, save_tower
from tests.models.qwen_configs import VISION

GRIDS: list[Grid] = [(1, 8, 10), (1, 2, 2), (3, 12, 6), (1, 28, 28), (2, 6, 12), (1, 2, 40), (5, 8, 10)]
TOLERANCE = 1e-5
RANDOM_TOLERANCE = 5e-5  # a norm over four elements amplifies rounding
ENCODERS = {
    "omni": (Qwen3OmniMoeVisionEncoder, Qwen3OmniMoeVisionEncoderConfig),
    "vl": (Qwen3VLVisionModel, Qwen3VLVisionConfig),
}


def patches(grid: Grid, patch_dim: int = 1536, seed: int = 0) -> Patches:
    generator = torch.Generator().manual_seed(seed + sum(grid))
    return Patches(torch.randn(math.prod(grid), patch_dim, generator=generator), grid)


@dataclass
class Family:
    """A small checkpoint's tower, and the same in transformers."""

    directory: Path
    prefix: str
    values: dict[str, Any]
    tower: Qwen3VisionTower
    reference: Any


@pytest.fixture(scope="module", params=["omni", "vl"])
def family(request: pytest.FixtureRequest, qwen3_omni_dir: Path, qwen3_vl_dir: Path) -> Family:
    if request.param == "omni":
        directory, prefix = qwen3_omni_dir, "thinker.visual."
        values = read_json(directory / "config.json")["thinker_config"]["vision_config"]
        model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(directory).thinker.model
    else:
        directory, prefix = qwen3_vl_dir, "model.visual."
        values = read_json(directory / "config.json")["vision_config"]
        model = Qwen3VLForConditionalGeneration.from_pretrained(directory).model
    tower = load_vision_tower(directory, values, prefix=prefix)
    return Family(directory, prefix, values, tower, model.visual.eval())


@torch.inference_mode()
def encode_alone(reference: Any, item: Patches) -> VisualRows:
    output = reference(item.pixels, grid_thw=torch.tensor([item.grid]))
    deepstack = output.deepstack_features
    empty = output.pooler_output.new_empty(0, *output.pooler_output.shape)
    return VisualRows(output.pooler_output, torch.stack(deepstack) if deepstack else empty)


def assert_close(own: VisualRows, expected: VisualRows, tolerance: float = TOLERANCE) -> None:
    torch.testing.assert_close(own.embeddings, expected.embeddings, atol=tolerance, rtol=0)
    torch.testing.assert_close(own.deepstack, expected.deepstack, atol=tolerance, rtol=0)


def test_a_batch_of_pictures_and_videos(family: Family) -> None:
    items = [patches(grid) for grid in GRIDS]
    for own, item in zip(result_of(family.tower.encode(items)), items, strict=True):
        num_tokens = family.tower.num_tokens(item.grid)
        assert own.embeddings.shape == (num_tokens, 64)
        assert own.deepstack.shape == (3, num_tokens, 64)
        assert_close(own, encode_alone(family.reference, item))


def test_no_items(family: Family) -> None:
    assert result_of(family.tower.encode([])) == []


@pytest.mark.parametrize("seed", range(2))
def test_neighbours_change_nothing(family: Family, seed: int) -> None:
    items = [patches(grid) for grid in GRIDS]
    alone = [result_of(family.tower.encode([item]))[0] for item in items]
    order = torch.randperm(len(items), generator=torch.Generator().manual_seed(seed)).tolist()
    for start, end in ((0, 3), (3, 7)):
        rows = result_of(family.tower.encode([items[index] for index in order[start:end]]))
        for own, index in zip(rows, order[start:end], strict=True):
            assert_close(own, alone[index], 1e-6)


def test_slices(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """However finely the work is cut, and however few rows run together, the rows stay."""
    items = [patches(grid) for grid in GRIDS]
    whole = result_of(family.tower.encode(items))
    monkeypatch.setattr(packed_blocks, "CPU_SLICE_FLOPS", 1e6)
    monkeypatch.setattr(packed_blocks, "MIN_SLICE_ROWS", 16)
    monkeypatch.setattr("omnistage.models.qwen3_vision_tower.CPU_PACK_ROWS", 100)
    num_slices = sum(1 for _ in family.tower.encode(items))
    assert num_slices > 500
    for own, expected in zip(result_of(family.tower.encode(items)), whole, strict=True):
        assert_close(own, expected)


def test_bfloat16_is_as_close_as_the_reference(family: Family) -> None:
    item = patches((2, 12, 16))
    item = Patches(item.pixels.bfloat16().float(), item.grid)
    kind, configuration = ENCODERS["omni" if "omni" in family.values["model_type"] else "vl"]
    rounded = kind(configuration(**VISION)).eval()
    rounded.load_state_dict({name: t.bfloat16().float() for name, t in family.reference.state_dict().items()})
    exact = encode_alone(rounded, item)
    theirs = encode_alone(rounded.bfloat16(), item)
    tower = load_vision_tower(family.directory, family.values, prefix=family.prefix, dtype=torch.bfloat16)
    own = result_of(tower.encode([item]))[0]
    assert own.embeddings.dtype == own.deepstack.dtype == torch.bfloat16

    def error(rows: Tensor, expected: Tensor) -> float:
        return float((rows.float() - expected).square().mean().sqrt())

    assert error(own.embeddings, exact.embeddings) < 1.2 * error(theirs.embeddings, exact.embeddings)
    assert error(own.deepstack, exact.deepstack) < 1.2 * error(theirs.deepstack, exact.deepstack)


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    heads, depth = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    chosen = draw(st.lists(st.integers(0, depth - 1), unique=True, max_size=depth))  # in any order
    return {
        "depth": depth,
        "hidden_size": heads * draw(st.sampled_from([4, 8, 12, 20])),
        "num_heads": heads,
        "intermediate_size": draw(st.integers(5, 90)),
        "hidden_act": draw(st.sampled_from(["gelu_pytorch_tanh", "gelu", "silu"])),
        "in_channels": draw(st.integers(1, 3)),
        "patch_size": draw(st.sampled_from([2, 5, 14, 16])),
        "spatial_merge_size": draw(st.integers(1, 3)),
        "temporal_patch_size": draw(st.integers(1, 3)),
        "out_hidden_size": draw(st.integers(1, 70)),
        "num_position_embeddings": draw(st.integers(1, 13)) ** 2,
        "deepstack_visual_indexes": chosen,
        "rope_parameters": draw(st.sampled_from([None, {"rope_type": "axial", "rope_theta": 500.0}])),
    }


sizes = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 7), st.integers(1, 7)), min_size=1, max_size=5)


@settings(max_examples=25, deadline=None)
@given(kind=st.sampled_from(["omni", "vl"]), values=configurations(), squares=sizes)
def test_any_configuration(
    tmp_path_factory: pytest.TempPathFactory, kind: str, values: dict[str, Any], squares: list[Grid]
) -> None:
    encoder, configuration = ENCODERS[kind]
    reference = encoder(configuration(**values)).eval()
    directory = tmp_path_factory.mktemp("tower")
    save_tower(reference, directory, "part.")
    tower = load_vision_tower(directory, values, prefix="part.")
    merge = values["spatial_merge_size"]
    grids: list[Grid] = [(frames, merge * height, merge * width) for frames, height, width in squares]
    items = [patches(grid, tower.config.patch_dim, seed) for seed, grid in enumerate(grids)]
    for own, item in zip(result_of(tower.encode(items)), items, strict=True):
        assert_close(own, encode_alone(reference, item), RANDOM_TOLERANCE)


@pytest.mark.parametrize("kind", ["omni", "vl"])
def test_what_the_configuration_leaves_out(kind: str) -> None:
    """A checkpoint that transformers has written again names only what differs from its defaults."""
    full = ENCODERS[kind][1](hidden_size=640).to_dict()
    assert VisionTowerConfig.from_json({"hidden_size": 640}) == VisionTowerConfig.from_json(full)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"depth": 7}, r"blocks\.6\.norm1\.weight is missing"),
        ({"depth": 5}, "tensors that its config.json does not ask for"),
        ({"out_hidden_size": 65}, r"shape \[64, 256\].* asks for \[65, 256\]"),
        ({"hidden_act": "tanh"}, "activation 'tanh' is not supported"),
        ({"num_heads": 32}, "hidden_size 64 must be a multiple of four times num_heads 32"),
        ({"num_position_embeddings": 143}, "143, which is no square"),
        ({"deepstack_visual_indexes": [1, 6]}, r"\[1, 6\] must be distinct and below depth 6"),
        ({"deepstack_visual_indexes": [1, 1]}, r"\[1, 1\] must be distinct"),
    ],
)
def test_unfit_configuration(family: Family, change: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        load_vision_tower(family.directory, {**family.values, **change}, prefix=family.prefix)


@pytest.mark.parametrize("item", [patches((1, 3, 4)), patches((1, 4, 4), patch_dim=1176)])
def test_patches_of_another_model(family: Family, item: Patches) -> None:
    with pytest.raises(WeightsError, match="do not fit a vision tower"):
        result_of(family.tower.encode([item]))
