"""Packed products equal plain ones."""

from __future__ import annotations

import pytest
import torch

from omnistage.ops.linear import GatedLinear, Linear, can_pack

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("num_rows", [0, 1, 3, 32, 65])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("form", ["native", "onednn", "plain", None])
def test_equals_the_product_in_double(
    dtype: torch.dtype, num_rows: int, with_bias: bool, with_residual: bool, form: str | None
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
        linear = Linear(weight, bias, form=form)
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


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("form", ["native", "onednn", "plain"])
@pytest.mark.parametrize(
    ("num_rows", "size", "num_inputs"), [(1, 32, 40), (7, 33, 41), (200, 96, 17), (0, 5, 8)]
)
def test_gated_products_equal_the_parts(dtype, form, num_rows, size, num_inputs) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = (torch.randn(2 * size, num_inputs, generator=generator) / num_inputs**0.5).to(dtype)
    rows = torch.randn(num_rows, num_inputs, generator=generator).to(dtype)
    gate, up = (rows.double() @ weight.double().t()).chunk(2, dim=-1)
    result = GatedLinear(weight, form=form)(rows)
    expected = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(result.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 1), (64, 2), (65, 3), (130, 257), (63, 64)])
def test_any_size_fits_the_panels(dtype, num_outputs, num_inputs) -> None:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(num_outputs, num_inputs, generator=generator).to(dtype)
    for num_rows in range(1, 9):
        rows = torch.randn(num_rows, num_inputs, generator=generator).to(dtype)
        result = Linear(weight, form="native")(rows)
        expected = rows.double() @ weight.double().t()
        scale = num_inputs**0.5
        torch.testing.assert_close(
            result.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * scale
        )


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_a_row_does_not_depend_on_the_others(dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    linear = Linear(torch.randn(200, 150, generator=generator).to(dtype), form="native")
    rows = torch.randn(230, 150, generator=generator).to(dtype)
    together = linear(rows)
    for start, stop in ((0, 1), (3, 5), (100, 113), (229, 230)):
        assert torch.equal(linear(rows[start:stop]), together[start:stop])


def test_more_dimensions_are_rows() -> None:
    weight, rows = torch.randn(8, 16), torch.randn(2, 3, 5, 16)
    torch.testing.assert_close(Linear(weight)(rows), rows @ weight.t())
