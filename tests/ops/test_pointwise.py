"""Norm, activation and rotary positions against the reference's own functions."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from omnistage.ops.activation import swiglu
from omnistage.ops.norm import rms_norm
from omnistage.ops.rotary import RotaryScaling, inverse_frequencies, rotary_angles, rotate_

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_rms_norm(dtype: torch.dtype) -> None:
    rows = (5 * torch.randn(7, 48)).to(dtype)
    reference = LlamaRMSNorm(48, eps=1e-3).to(dtype)
    reference.weight.data.copy_(torch.randn(48))
    result = rms_norm(rows, reference.weight, 1e-3)
    assert result.dtype == dtype
    assert torch.allclose(result, reference(rows), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_swiglu(dtype: torch.dtype) -> None:
    rows = torch.randn(5, 24).to(dtype)
    before = rows.clone()
    gate, up = rows.double().chunk(2, dim=-1)
    expected = gate / (1 + (-gate).exp()) * up
    result = swiglu(rows)
    assert result.dtype == dtype
    assert torch.allclose(result.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(rows, before)


ROPE = {
    "default": ({"rope_type": "default"}, RotaryScaling()),
    "linear": ({"rope_type": "linear", "factor": 4.0}, RotaryScaling("linear", factor=4.0)),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
        RotaryScaling("llama3", 8.0, 1.0, 4.0, 512),
    ),
}


@pytest.mark.parametrize("kind", list(ROPE))
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_rotary(kind: str, dtype: torch.dtype) -> None:
    parameters, scaling = ROPE[kind]
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=4096,
        rope_parameters={"rope_theta": 5000.0, **parameters},
    )
    positions = torch.tensor([0, 1, 17, 511, 512, 4095])
    query, key = torch.randn(2, 1, 3, 6, 64).to(dtype).unbind(0)  # [1, heads, tokens, head_dim]
    cosine, sine = LlamaRotaryEmbedding(config)(query, positions.unsqueeze(0))
    expected = torch.cat(apply_rotary_pos_emb(query, key, cosine, sine), dim=1)[0].transpose(0, 1)
    buffer = torch.zeros(6, 8, 64, dtype=dtype)  # heads are rotated inside a wider row
    heads = buffer[:, 1:7]
    heads.copy_(torch.cat((query, key), dim=1)[0].transpose(0, 1))
    rotate_(heads, *rotary_angles(positions, inverse_frequencies(64, 5000.0, scaling), dtype))
    tolerance = 2e-3 if dtype is torch.float32 else 5e-2  # float32 angles of 4095 rad are 2e-4 apart
    assert torch.allclose(heads, expected, atol=tolerance)
    assert not buffer[:, 0].any()
    assert not buffer[:, 7].any()
