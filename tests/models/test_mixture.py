"""Mixtures of experts equal transformers' blocks, touch only the experts picked, and keep rows apart."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerTextConfig,
    Qwen3OmniMoeTextConfig,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeTalkerTextSparseMoeBlock,
    Qwen3OmniMoeThinkerTextSparseMoeBlock,
)

from omnistage.errors import WeightsError
from omnistage.models.fused_weights import FusedWeights
from omnistage.models.layers import GatedMLP
from omnistage.models.loader import Checkpoint
from omnistage.models.mixture import Mixture, MixtureConfig, load_mixture
from tests.models.qwen_checkpoints import init_weights, published_tensors

TOLERANCE = 1e-5
NEIGHBOUR_TOLERANCE = 1e-6
BLOCKS = {
    False: (Qwen3OmniMoeThinkerTextSparseMoeBlock, Qwen3OmniMoeTextConfig),
    True: (Qwen3OmniMoeTalkerTextSparseMoeBlock, Qwen3OmniMoeTalkerTextConfig),
}
VALUES = {
    "hidden_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}


def build(directory: Path, has_shared: bool, **changes: Any) -> tuple[Any, Mixture]:
    """transformers' block, and ours from its published tensors."""
    values = {**VALUES, **({"shared_expert_intermediate_size": 40} if has_shared else {}), **changes}
    block_class, config_class = BLOCKS[has_shared]
    layer = nn.Module()
    layer.mlp = block_class(config_class(**values)).eval()
    init_weights(layer)
    with torch.no_grad():
        layer.mlp.gate.weight.mul_(3)  # rows differ in the experts they pick
    save_file(published_tensors(layer), directory / "model.safetensors")
    checkpoint = Checkpoint(directory)
    weights = FusedWeights(checkpoint, torch.float32)
    config = MixtureConfig.from_json(values, has_shared=has_shared)
    mixture = load_mixture(config, weights, "mlp", values["hidden_size"])
    checkpoint.finish()
    return layer.mlp, mixture


def rows_of(count: int, size: int, seed: int = 0) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("has_shared", [False, True])
@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)
@given(data=st.data())
def test_equals_transformers(has_shared, tmp_path_factory, data):
    num_experts = data.draw(st.integers(1, 12))
    changes = {
        "hidden_size": data.draw(st.sampled_from([8, 33, 48])),
        "num_experts": num_experts,
        "num_experts_per_tok": data.draw(st.integers(1, num_experts)),
        "moe_intermediate_size": data.draw(st.sampled_from([5, 16, 24])),
        "norm_topk_prob": data.draw(st.booleans()),
    }
    reference, mixture = build(tmp_path_factory.mktemp("mixture"), has_shared, **changes)
    rows = rows_of(data.draw(st.sampled_from([1, 2, 7, 40])), changes["hidden_size"])
    residual = rows_of(*rows.shape, seed=1)
    with torch.inference_mode():
        expected = residual + reference(rows.unsqueeze(0)).squeeze(0)
        torch.testing.assert_close(mixture(rows, residual), expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("has_shared", [False, True])
def test_rows_do_not_depend_on_their_neighbours(has_shared, tmp_path):
    _, mixture = build(tmp_path, has_shared)
    rows, residual = rows_of(50, 48), rows_of(50, 48, seed=1)
    with torch.inference_mode():
        together = mixture(rows, residual)
        for start, stop in [(0, 1), (7, 8), (49, 50), (3, 5), (10, 43)]:
            part = mixture(rows[start:stop], residual[start:stop])
            torch.testing.assert_close(part, together[start:stop], atol=NEIGHBOUR_TOLERANCE, rtol=0)


@pytest.mark.parametrize("num_rows", [1, 2, 3])
def test_only_picked_experts_multiply(num_rows, tmp_path, monkeypatch):
    reference, mixture = build(tmp_path, False)
    touched: list[tuple[int, int]] = []

    def watched(index: int, mlp: GatedMLP) -> Any:
        def gate_up(rows: Tensor) -> Tensor:
            touched.append((index, rows.shape[0]))
            return mlp.gate_up(rows)

        return SimpleNamespace(gate_up=gate_up, down=mlp.down)

    monkeypatch.setattr(
        mixture, "experts", [watched(index, mlp) for index, mlp in enumerate(mixture.experts)]
    )
    rows = rows_of(num_rows, 48)
    with torch.inference_mode():
        mixture(rows, rows)
        picked = reference.gate(rows)[2].flatten().tolist()
    assert sorted(touched) == sorted((expert, picked.count(expert)) for expert in set(picked))


def test_more_active_experts_than_there_are_is_refused():
    with pytest.raises(WeightsError, match="num_experts_per_tok is 9, but there are 8 experts"):
        MixtureConfig.from_json({**VALUES, "num_experts_per_tok": 9})
