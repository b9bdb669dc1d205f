"""Packed products equal plain ones."""

from __future__ import annotations

import pytest
import torch

from omnistage.ops.linear import Linear, can_pack

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 3, 32, 65])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("packed", [False, None])
def test_equals_the_product_in_double(
    dtype: torch.dtype, num_rows: int, with_bias: bool, with_residual: bool, packed: bool | None
) -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    weight, rows, residual = random(48, 40) / 6, random(num_rows, 40), random(num_rows, 48)
    bias = random(48) if with_bias else None
    expected = rows.double() @ weight.double().t()
    expected = expected + (0 if bias is None else bias.double()) + (residual if with_residual else 0)
    before = residual.clone()
    with torch.inference_mode():
        linear = Linear(weight, bias, packed=packed)
        result = linear(rows, residual) if with_residual else linear(rows)
    assert result.dtype == dtype
    assert torch.allclose(result.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(residual, before)
    assert linear.nbytes == weight.nbytes + (bias.nbytes if bias is not None else 0)


def test_rows_may_be_strided() -> None:
    weight, wide = torch.randn(8, 16), torch.randn(5, 40)
    assert torch.allclose(Linear(weight)(wide[:, 3:19]), wide[:, 3:19] @ weight.t(), atol=1e-5)


def test_what_cannot_be_packed_runs_plainly() -> None:
    weight = torch.randn(4, 4, dtype=torch.float64)
    assert not can_pack(weight)
    assert torch.allclose(Linear(weight)(torch.eye(4, dtype=torch.float64)), weight.t())
