"""The streaming vocoder against a plain HiFi-GAN generator, at every chunking."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from omnistage.errors import StreamError, WeightsError
from omnistage.models.hifigan import Conv, Hifigan, HifiganConfig, load_vocoder
from omnistage.models.registry import PartSource, find_part

CONFIG: dict[str, Any] = {
    "model_type": "vits_hifigan",
    "sample_rate": 22050,
    "num_channels": 6,
    "initial_channels": 16,
    "kernel_size": 7,
    "upsample_rates": [8, 4],
    "upsample_kernel_sizes": [16, 8],
    "resblock_kernel_sizes": [3, 5, 7],
    "resblock_dilations": [[1, 2], [2, 6], [3, 12]],
}


class Generator(nn.Module):
    """HiFi-GAN's generator as published, in one pass."""

    def __init__(self, config: HifiganConfig) -> None:
        super().__init__()
        channels, padding = config.initial_channels, config.kernel_size // 2
        self.conv_pre = nn.Conv1d(config.num_channels, channels, config.kernel_size, padding=padding)
        self.ups, self.resblocks = nn.ModuleList(), nn.ModuleList()
        self.num_blocks = len(config.resblock_kernel_sizes)
        for rate, size in zip(config.upsample_rates, config.upsample_kernel_sizes, strict=True):
            self.ups.append(nn.ConvTranspose1d(channels, channels // 2, size, rate, (size - rate) // 2))
            channels //= 2
            for width, dilations in zip(config.resblock_kernel_sizes, config.resblock_dilations, strict=True):
                block = nn.Module()
                block.convs = nn.ModuleList(
                    nn.Conv1d(channels, channels, width, dilation=d, padding=(width - 1) * d // 2)
                    for d in dilations
                )
                self.resblocks.append(block)
        self.conv_post = nn.Conv1d(channels, 1, config.kernel_size, padding=padding, bias=False)

    @torch.inference_mode()
    def forward(self, latents: Tensor) -> NDArray[np.float32]:
        """latents: [num_frames, num_channels]."""
        hidden = self.conv_pre(latents.T[None])
        for stage, up in enumerate(self.ups):
            hidden = up(F.leaky_relu(hidden, 0.1))
            total = torch.zeros_like(hidden)
            for block in self.resblocks[stage * self.num_blocks : (stage + 1) * self.num_blocks]:
                inner = hidden
                for conv in block.convs:
                    inner = inner + conv(F.leaky_relu(inner, 0.1))
                total = total + inner
            hidden = total / self.num_blocks
        samples: NDArray[np.float32] = torch.tanh(self.conv_post(F.leaky_relu(hidden)))[0, 0].numpy()
        return samples


@pytest.fixture(scope="module")
def generator() -> Generator:
    torch.manual_seed(0)
    return Generator(HifiganConfig.from_json(CONFIG)).eval()


@pytest.fixture(scope="module")
def vocoder(generator: Generator) -> Hifigan:
    weights = {name: weight.detach() for name, weight in generator.state_dict().items()}
    return Hifigan(HifiganConfig.from_json(CONFIG), weights)


def frames(number: int, channels: int = 6) -> Tensor:
    return 2.0 * torch.randn(number, channels, generator=torch.Generator().manual_seed(number))


def decode(vocoder: Hifigan, latents: Tensor, sizes: list[int]) -> NDArray[np.float32]:
    """Chunks of the given sizes, over and over."""
    state, start, pieces = vocoder.start(), 0, []
    turn = 0
    while True:
        end = start + sizes[turn % len(sizes)]
        pieces.append(vocoder.decode(state, latents[start:end], is_last=end >= len(latents)))
        if end >= len(latents):
            return np.concatenate(pieces)
        start, turn = end, turn + 1


CHUNKINGS = [[1000], [1], [3], [25], [64], [1, 7, 2, 30], [5, 0, 11]]


@pytest.mark.parametrize("sizes", CHUNKINGS, ids=str)
@pytest.mark.parametrize("number", [1, 2, 5, 40, 101])
def test_any_chunking_equals_one_pass(
    vocoder: Hifigan, generator: Generator, number: int, sizes: list[int]
) -> None:
    latents = frames(number)
    expected = generator(latents)
    assert np.abs(expected).max() > 1e-2  # something to compare
    samples = decode(vocoder, latents, sizes)
    assert samples.dtype == np.float32
    assert samples.shape == expected.shape == (number * vocoder.hop,)
    assert np.abs(samples - expected).max() < 1e-5


def test_the_end_may_come_without_frames(vocoder: Hifigan, generator: Generator) -> None:
    latents = frames(30)
    state = vocoder.start()
    first = vocoder.decode(state, latents, is_last=False)
    last = vocoder.decode(state, latents[:0], is_last=True)
    assert 0 < len(last) < len(first)
    assert np.abs(np.concatenate([first, last]) - generator(latents)).max() < 1e-5


def test_sound_comes_before_the_end(vocoder: Hifigan) -> None:
    state = vocoder.start()
    counts = [len(vocoder.decode(state, frames(8), is_last=False)) for _ in range(8)]
    assert counts[-1] == 8 * vocoder.hop  # a steady stream once the context is there
    assert sum(counts) > 5 * 8 * vocoder.hop


def test_an_utterance_without_frames_is_silent(vocoder: Hifigan) -> None:
    assert vocoder.decode(vocoder.start(), frames(0), is_last=True).shape == (0,)


def test_utterances_do_not_disturb_each_other(vocoder: Hifigan) -> None:
    first, second = frames(40), frames(41)
    states = vocoder.start(), vocoder.start()
    pieces: tuple[list[Any], list[Any]] = ([], [])
    for start in range(0, 41, 4):
        for state, latents, found in zip(states, (first, second), pieces, strict=True):
            if not state.is_finished:
                is_last = start + 4 >= len(latents)
                found.append(vocoder.decode(state, latents[start : start + 4], is_last=is_last))
    assert np.array_equal(np.concatenate(pieces[0]), decode(vocoder, first, [4]))
    assert np.array_equal(np.concatenate(pieces[1]), decode(vocoder, second, [4]))


def test_state_does_not_grow(vocoder: Hifigan) -> None:
    def held(state: Any) -> int:
        streams = [state._entry, state._exit]
        waiting = 0
        for upsample, fusion in state._stages:
            streams += [upsample, *(stream for block in fusion._blocks for stream in block)]
            waiting += sum(rows.untyped_storage().nbytes() for rows in fusion._waiting)
        return waiting + sum(stream.history.untyped_storage().nbytes() for stream in streams)

    state = vocoder.start()
    sizes = []
    for _ in range(12):
        vocoder.decode(state, frames(16), is_last=False)
        sizes.append(held(state))
    assert sizes[-1] == sizes[3]


def test_misuse_is_named(vocoder: Hifigan) -> None:
    state = vocoder.start()
    with pytest.raises(StreamError, match=r"\(4, 5\).*\[num_frames, 6\]"):
        vocoder.decode(state, torch.zeros(4, 5), is_last=False)
    vocoder.decode(state, frames(3), is_last=True)
    with pytest.raises(StreamError, match="ended after 3 frames"):
        vocoder.decode(state, frames(1), is_last=False)


@pytest.mark.parametrize(("kernel_size", "stride"), [(16, 8), (8, 4), (4, 4), (6, 2), (7, 3), (20, 4)])
def test_transposed_convolution_as_phases(kernel_size: int, stride: int) -> None:
    torch.manual_seed(1)
    reference = nn.ConvTranspose1d(3, 5, kernel_size, stride, (kernel_size - stride) // 2)
    rows = torch.randn(11, 3)
    conv = Conv.transposed(reference.weight, reference.bias, stride=stride, slope=1.0)
    padding = torch.zeros(conv.context, 3)
    with torch.inference_mode():
        outputs = conv(torch.cat([padding, rows, padding]))
        torch.testing.assert_close(outputs, reference(rows.T[None])[0].T, atol=1e-5, rtol=1e-5)


def test_load_vocoder(tmp_path: Path, generator: Generator, vocoder: Hifigan) -> None:
    save_file(dict(generator.state_dict()), tmp_path / "model.safetensors")
    loaded = load_vocoder(PartSource(tmp_path, CONFIG))
    assert (loaded.hop, loaded.sample_rate) == (32, 22050)
    assert np.array_equal(decode(loaded, frames(9), [4]), decode(vocoder, frames(9), [4]))
    with pytest.raises(WeightsError, match="float32 only"):
        load_vocoder(PartSource(tmp_path, CONFIG), dtype="bfloat16")
    with pytest.raises(WeightsError, match=r"conv_pre\.weight has shape"):
        load_vocoder(PartSource(tmp_path, CONFIG | {"num_channels": 7}))
    with pytest.raises(WeightsError, match="unexpected keyword argument 'hop'"):
        load_vocoder(PartSource(tmp_path, CONFIG | {"hop": 3}))


@pytest.mark.starter
@pytest.mark.parametrize("sizes", [[1], [3], [25], [64], [24, 64, 7]], ids=str)
def test_the_starters_vocoder_streams_exactly(starter_dir: Path, sizes: list[int]) -> None:
    vocoder = load_vocoder(find_part(starter_dir, "vocoder"))
    latents = frames(90, vocoder.num_channels)
    whole = decode(vocoder, latents, [90])
    streamed = decode(vocoder, latents, sizes)
    assert len(streamed) == 90 * vocoder.hop
    assert np.abs(streamed - whole).max() < 1e-5
