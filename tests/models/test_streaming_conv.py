"""Streaming convolutions against torch's whole ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from omnistage.models import streaming_conv
from omnistage.models.streaming_conv import CausalConv, PastRows, Snake


def stream(conv: CausalConv, inputs: Tensor, sizes: list[int]) -> Tensor:
    """inputs: [num_streams, num_rows, channels], in chunks of the given sizes."""
    streams = [[conv.past.new_history(inputs)] for _ in inputs]
    outputs = []
    for chunk in inputs.split(sizes, dim=1):
        window, new = conv.past.window(streams, chunk.shape[1])
        new.copy_(chunk)
        outputs.append(conv.push(streams, window))
    return torch.cat(outputs, dim=1)


@pytest.fixture(params=[True, False], ids=["packed", "plain"])
def packing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr(streaming_conv, "can_pack", lambda weight: False)


@pytest.mark.usefixtures("packing")
@pytest.mark.parametrize("sizes", [[40], [1] * 40, [3, 0, 20, 17], [39, 1]], ids=str)
@pytest.mark.parametrize(
    ("kernel_size", "dilation", "groups"), [(7, 1, 1), (7, 9, 1), (3, 2, 1), (1, 1, 1), (7, 1, 6)]
)
@torch.inference_mode()
def test_causal_convolution(kernel_size: int, dilation: int, groups: int, sizes: list[int]) -> None:
    torch.manual_seed(0)
    whole = nn.Conv1d(6, 12, kernel_size, dilation=dilation, groups=groups)
    inputs = torch.randn(3, 40, 6)
    expected = whole(F.pad(inputs.transpose(1, 2), ((kernel_size - 1) * dilation, 0))).transpose(1, 2)
    conv = CausalConv(whole.weight, whole.bias, slot=0, dilation=dilation, groups=groups)
    assert conv.context == (kernel_size - 1) * dilation
    torch.testing.assert_close(stream(conv, inputs, sizes), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("packing")
@pytest.mark.parametrize("sizes", [[11], [1] * 11, [2, 0, 5, 4]], ids=str)
@pytest.mark.parametrize(("kernel_size", "stride"), [(16, 8), (4, 2), (2, 1), (3, 3), (9, 3), (1, 1)])
@torch.inference_mode()
def test_transposed_convolution_without_incomplete_outputs(
    kernel_size: int, stride: int, sizes: list[int]
) -> None:
    torch.manual_seed(0)
    whole = nn.ConvTranspose1d(4, 6, kernel_size, stride)
    inputs = torch.randn(2, 11, 4)
    outputs = whole(inputs.transpose(1, 2)).transpose(1, 2)
    edge = kernel_size - stride
    expected = outputs[:, edge : outputs.shape[1] - edge]
    conv = CausalConv.transposed(whole.weight, whole.bias, stride=stride, slot=0)
    torch.testing.assert_close(stream(conv, inputs, sizes), expected, atol=1e-5, rtol=1e-5)


def test_a_history_holds_no_more_than_its_rows() -> None:
    past = PastRows(slot=0, num_rows=5, channels=3, is_padded=False)
    histories = [past.new_history(torch.zeros(1))]
    assert histories[0].shape == (0, 3)
    rows = torch.arange(60.0).view(20, 3)
    for chunk in rows.split([2, 9, 0, 9]):
        past.extend(histories, chunk)
        assert histories[0].untyped_storage().nbytes() <= 5 * 3 * 4
    assert torch.equal(histories[0], rows[-5:])


def test_snake_may_write_over_its_input() -> None:
    torch.manual_seed(0)
    rows, alpha, beta = 3 * torch.randn(2, 50, 6), torch.randn(6), torch.randn(6)
    expected = rows + (rows * alpha.exp()).sin().square() / (beta.exp() + 1e-9)
    Snake(alpha, beta)(rows, out=rows)
    torch.testing.assert_close(rows, expected, atol=2e-6, rtol=1e-5)
