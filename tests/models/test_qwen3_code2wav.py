"""Code2Wav as a stream against transformers' one-pass decode, for random sizes, chunkings and batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from omnistage.errors import StreamError, WeightsError
from omnistage.models import qwen3_code2wav, streaming_conv
from omnistage.models.qwen3_code2wav import Code2WavState, Qwen3Code2Wav, load_code2wav
from omnistage.models.qwen3_code2wav_config import Code2WavConfig
from omnistage.models.registry import PartSource

Samples = NDArray[np.float32]

CONFIG: dict[str, Any] = {
    "model_type": "",
    "codebook_size": 64,
    "codebook_dim": 24,
    "decoder_dim": 48,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_quantizers": 4,
    "sliding_window": 7,
    "upsample_rates": [8, 5, 4, 3],
    "upsampling_ratios": [2, 2],
    "max_position_embeddings": 8000,
    "layer_scale_initial_scale": 0.01,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
}
PREFIX = "code2wav."


@torch.no_grad()
def fill(model: nn.Module, seed: int) -> None:
    """Random weights under which signals neither vanish nor saturate and every parameter matters."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if name.endswith(("alpha", "beta")):
            noise *= 0.2
        elif name.endswith((".scale", "gamma")):
            noise = 0.4 + 0.1 * noise
        elif name.endswith("bias"):
            noise *= 0.05
        elif weight.ndim == 1:
            noise = 1.0 + 0.1 * noise
        elif weight.ndim == 3:
            taps = 2 if name.startswith("decoder") and ".1.conv." in name else weight.shape[2]
            inputs = weight.shape[0] if taps == 2 else weight.shape[1]
            noise *= 0.7 / math.sqrt(inputs * taps)
        elif "embedding" not in name:
            noise /= math.sqrt(weight.shape[1])
        weight.copy_(noise)
    model.decoder[-1].conv.weight.mul_(0.5)  # type: ignore[union-attr, operator]


def reference_of(config: dict[str, Any], seed: int = 0) -> Qwen3OmniMoeCode2Wav:
    values = {name: value for name, value in config.items() if name != "model_type"}
    model = Qwen3OmniMoeCode2Wav._from_config(Qwen3OmniMoeCode2WavConfig(**values)).eval()
    fill(model, seed)
    return model


def saved(reference: nn.Module, directory: Path) -> Path:
    state = {PREFIX + name: weight.contiguous() for name, weight in reference.state_dict().items()}
    save_file(state, directory / "model.safetensors")
    return directory


def load(directory: Path, config: dict[str, Any] = CONFIG, **options: str) -> Qwen3Code2Wav:
    return load_code2wav(PartSource(directory, config, PREFIX), **options)


@torch.inference_mode()
def one_pass(reference: Qwen3OmniMoeCode2Wav, frames: Tensor) -> Samples:
    samples: Samples = reference(frames.T[None])[0, 0].float().numpy()
    return samples


@pytest.fixture(scope="module")
def reference() -> Qwen3OmniMoeCode2Wav:
    return reference_of(CONFIG)


@pytest.fixture(scope="module")
def directory(reference: Qwen3OmniMoeCode2Wav, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(reference, tmp_path_factory.mktemp("code2wav"))


@pytest.fixture(scope="module")
def vocoder(directory: Path) -> Qwen3Code2Wav:
    return load(directory)


def codes(number: int, seed: int = 0, config: dict[str, Any] = CONFIG) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + number)
    return torch.randint(0, config["codebook_size"], (number, config["num_quantizers"]), generator=generator)


def cut(frames: Tensor, sizes: Sequence[int]) -> Iterator[tuple[Tensor, bool]]:
    """Chunks of the given sizes, over and over, and whether each is the last."""
    start = turn = 0
    while True:
        end = start + sizes[turn % len(sizes)]
        yield frames[start:end], end >= len(frames)
        if end >= len(frames):
            return
        start, turn = end, turn + 1


def decode(vocoder: Qwen3Code2Wav, frames: Tensor, sizes: Sequence[int] = (10**6,)) -> Samples:
    state = vocoder.start()
    pieces = [vocoder.decode(state, chunk, is_last=is_last) for chunk, is_last in cut(frames, sizes)]
    return np.concatenate(pieces)


chunk_sizes = st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(any)


@pytest.mark.parametrize("number", [1, 2, 3, 6, 7, 8, 40, 300])
def test_one_pass_equals_transformers(
    vocoder: Qwen3Code2Wav, reference: Qwen3OmniMoeCode2Wav, number: int
) -> None:
    frames = codes(number)
    expected = one_pass(reference, frames)
    assert expected.std() > 0.02  # something to compare
    assert (np.abs(expected) == 1.0).mean() < 0.05  # and not only the clamp
    samples = decode(vocoder, frames)
    assert samples.dtype == np.float32
    assert samples.shape == expected.shape == (number * vocoder.hop - vocoder.trim,)
    assert np.abs(samples - expected).max() < 1e-5


@settings(max_examples=35, deadline=None, derandomize=True)
@given(number=st.integers(1, 60), sizes=chunk_sizes)
def test_any_chunking_equals_one_pass(
    vocoder: Qwen3Code2Wav, reference: Qwen3OmniMoeCode2Wav, number: int, sizes: list[int]
) -> None:
    frames = codes(number)
    samples, expected = decode(vocoder, frames, sizes), one_pass(reference, frames)
    assert samples.shape == expected.shape
    assert np.abs(samples - expected).max() < 1e-5


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 2))
    rates = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    return CONFIG | {
        "codebook_size": draw(st.integers(2, 40)),
        "num_quantizers": draw(st.integers(1, 6)),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_size": heads * 2 * draw(st.integers(1, 5)),
        "intermediate_size": draw(st.integers(1, 40)),
        "sliding_window": draw(st.integers(1, 12)),
        "upsampling_ratios": draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)),
        "upsample_rates": rates,
        "decoder_dim": draw(st.integers(2 ** len(rates), 2 ** len(rates) + 30)),
        "attention_bias": draw(st.booleans()),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-3])),
        "rope_theta": draw(st.sampled_from([100.0, 10000.0])),
    }


@settings(max_examples=35, deadline=None, derandomize=True)
@given(config=configs(), number=st.integers(1, 40), sizes=chunk_sizes, seed=st.integers(0, 99))
def test_random_configurations_equal_transformers(
    tmp_path_factory: pytest.TempPathFactory,
    config: dict[str, Any],
    number: int,
    sizes: list[int],
    seed: int,
) -> None:
    reference = reference_of(config, seed)
    vocoder = load(saved(reference, tmp_path_factory.mktemp("random")), config)
    frames = codes(number, seed, config)
    wanted = vocoder.config.num_samples(number)
    for samples in (decode(vocoder, frames), decode(vocoder, frames, sizes)):
        assert samples.shape == (wanted,)
        if wanted:  # transformers cannot convolve nothing
            assert np.abs(samples - one_pass(reference, frames)).max() < 1e-5


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=2, max_size=6),
    delays=st.lists(st.integers(0, 4), min_size=6, max_size=6),
    sizes=chunk_sizes,
)
def test_a_batch_changes_no_result(
    vocoder: Qwen3Code2Wav, lengths: list[int], delays: list[int], sizes: list[int]
) -> None:
    """Utterances join after `delays` steps, take chunks of their own sizes and end on their own."""
    utterances = [codes(number, seed) for seed, number in enumerate(lengths)]
    alone: list[list[Samples]] = []
    chunks = []
    for index, frames in enumerate(utterances):
        chunks.append(list(cut(frames, [*sizes[index % len(sizes) :], *sizes])))
        state = vocoder.start()
        alone.append([vocoder.decode(state, chunk, is_last=is_last) for chunk, is_last in chunks[-1]])
    states = [vocoder.start() for _ in lengths]
    found: list[list[Samples]] = [[] for _ in lengths]
    step = 0
    while any(len(pieces) < len(own) for pieces, own in zip(found, chunks, strict=True)):
        active = [i for i, own in enumerate(chunks) if step >= delays[i] and len(found[i]) < len(own)]
        now = [chunks[i][len(found[i])] for i in active]
        pieces = vocoder.decode_batch(
            [states[i] for i in active], [chunk for chunk, _ in now], [is_last for _, is_last in now]
        )
        for i, samples in zip(active, pieces, strict=True):
            found[i].append(samples)
        step += 1
    for pieces, expected in zip(found, alone, strict=True):
        for samples, wanted in zip(pieces, expected, strict=True):
            assert samples.shape == wanted.shape
            assert np.abs(samples - wanted).max(initial=0.0) < 1e-6


def test_samples_lag_by_the_trim_and_the_end_flushes_nothing(
    vocoder: Qwen3Code2Wav, reference: Qwen3OmniMoeCode2Wav
) -> None:
    assert (vocoder.hop, vocoder.trim, vocoder.sample_rate) == (1920, 555, 24_000)
    state, frames = vocoder.start(), codes(7)
    counts = [len(vocoder.decode(state, frames[i : i + 1], is_last=False)) for i in range(7)]
    assert counts == [1920 - 555] + 6 * [1920]  # sound comes with the first frame
    assert vocoder.decode(state, frames[:0], is_last=True).shape == (0,)
    assert sum(counts) == len(one_pass(reference, frames)) == vocoder.config.num_samples(7)


def test_long_utterances_run_in_passes_and_slices(
    vocoder: Qwen3Code2Wav, reference: Qwen3OmniMoeCode2Wav, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = codes(90)
    monkeypatch.setattr(qwen3_code2wav, "_FRAMES_PER_PASS", 16)
    monkeypatch.setattr(qwen3_code2wav, "_SLICE_BYTES", 4 * 1920 * 3 * 5)
    assert np.abs(decode(vocoder, frames) - one_pass(reference, frames)).max() < 1e-5


def test_an_utterance_without_frames_is_silent(vocoder: Qwen3Code2Wav) -> None:
    assert vocoder.decode(vocoder.start(), codes(0), is_last=True).shape == (0,)
    assert vocoder.decode_windows(codes(0)).shape == (0,)
    assert vocoder.decode_batch([], [], []) == []


@pytest.mark.parametrize(
    ("number", "chunk", "left_context"), [(70, 30, 5), (31, 30, 25), (60, 20, 0), (20, 7, 9)]
)
def test_windows_equal_the_chunked_decode_of_transformers(
    vocoder: Qwen3Code2Wav,
    reference: Qwen3OmniMoeCode2Wav,
    number: int,
    chunk: int,
    left_context: int,
) -> None:
    frames = codes(number)
    with torch.inference_mode():
        expected = reference.chunked_decode(frames.T[None], chunk, left_context)[0, 0].numpy()
    samples = vocoder.decode_windows(frames, chunk=chunk, left_context=left_context)
    assert samples.shape == expected.shape
    assert len(samples) < len(decode(vocoder, frames))  # every window lacks its last samples
    assert np.abs(samples - expected).max() < 1e-5


def test_state_does_not_grow(vocoder: Qwen3Code2Wav) -> None:
    state, sizes = vocoder.start(), []
    for step in range(40):
        vocoder.decode(state, codes(1 + step % 5), is_last=False)
        sizes.append(state.nbytes)
    assert max(sizes) == sizes[-1] == vocoder.max_state_bytes
    vocoder.decode(state, codes(100), is_last=False)
    assert state.nbytes == vocoder.max_state_bytes


@pytest.mark.parametrize(
    "end",
    [
        lambda vocoder, state: state.release(),
        lambda vocoder, state: vocoder.decode(state, codes(2), is_last=True),
        lambda vocoder, state: vocoder.decode(state, codes(0), is_last=True),
    ],
    ids=["released", "last frames", "end without frames"],
)
def test_the_end_frees_the_state(
    vocoder: Qwen3Code2Wav, end: Callable[[Qwen3Code2Wav, Code2WavState], Any]
) -> None:
    state = vocoder.start()
    vocoder.decode(state, codes(3), is_last=False)
    assert state.nbytes > 0
    end(vocoder, state)
    assert state.nbytes == 0
    state.release()
    with pytest.raises(StreamError, match=r"ended after \d frames; start\(\) a new state"):
        vocoder.decode(state, codes(1), is_last=False)


@pytest.mark.parametrize(
    ("frames", "message"),
    [
        (torch.zeros(2, 3, dtype=torch.int64), r"\(2, 3\).*\[num_frames, 4\]"),
        (torch.zeros(4, dtype=torch.int64), r"shape \(4,\)"),
        (torch.zeros(2, 4), "float32"),
        (torch.full((2, 4), 64), "codes are 64 to 64.*0 to 63"),
        (torch.full((2, 4), -1), "codes are -1 to -1"),
    ],
)
def test_unfit_frames_are_named_and_change_nothing(
    vocoder: Qwen3Code2Wav, frames: Tensor, message: str
) -> None:
    states = [vocoder.start(), vocoder.start()]
    good = codes(20)
    first = vocoder.decode(states[0], good[:10], is_last=False)
    with pytest.raises(StreamError, match=message):
        vocoder.decode_batch(states, [good[10:], frames], [True, True])
    second = vocoder.decode(states[0], good[10:], is_last=True)
    assert np.abs(np.concatenate([first, second]) - decode(vocoder, good)).max() < 1e-5
    assert states[1].num_frames == 0


def test_windows_of_no_size_are_refused(vocoder: Qwen3Code2Wav) -> None:
    with pytest.raises(StreamError, match="chunk is 0"):
        vocoder.decode_windows(codes(3), chunk=0)


def test_bfloat16_is_as_close_as_the_reference(directory: Path, reference: Qwen3OmniMoeCode2Wav) -> None:
    half, frames = load(directory, dtype="bfloat16"), codes(30)
    exact = one_pass(reference, frames)
    theirs = one_pass(reference_of(CONFIG).to(torch.bfloat16), frames)
    ours = decode(half, frames, [4])
    assert half.weight_bytes < 0.6 * load(directory).weight_bytes
    assert 0 < np.square(ours - exact).mean() < 1.5 * np.square(theirs - exact).mean()
    assert np.square(theirs - exact).mean() < 0.1 * exact.var()


def test_without_packing_and_native_kernels(
    directory: Path, reference: Qwen3OmniMoeCode2Wav, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming_conv, "can_pack", lambda weight: False)
    monkeypatch.setattr(streaming_conv, "library", lambda: None)
    plain, frames = load(directory), codes(30)
    assert np.abs(decode(plain, frames, [3, 8]) - one_pass(reference, frames)).max() < 1e-5


def test_sharded_weights_and_derived_buffers(tmp_path: Path, directory: Path, vocoder: Qwen3Code2Wav) -> None:
    state = load_file(directory / "model.safetensors")
    state[PREFIX + "pre_transformer.rotary_emb.inv_freq"] = torch.ones(4)
    state["talker.some.weight"] = torch.ones(1)  # another part's
    save_file(state, tmp_path / "model.safetensors")
    loaded = load(tmp_path)
    assert np.array_equal(decode(loaded, codes(5)), decode(vocoder, codes(5)))
    total = sum(weight.nbytes for name, weight in load_file(directory / "model.safetensors").items())
    assert 0.8 * total < loaded.weight_bytes < 1.2 * total


def test_unfit_weights_are_named(tmp_path: Path, directory: Path) -> None:
    with pytest.raises(WeightsError, match="float16"):
        load(directory, dtype="float16")
    with pytest.raises(WeightsError, match=r"code_embedding\.weight.*\[256, 32\].*\[320, 32\]"):
        load(directory, CONFIG | {"num_quantizers": 5})
    with pytest.raises(WeightsError, match=r"layers\.2\..*missing"):
        load(directory, CONFIG | {"num_hidden_layers": 3})
    with pytest.raises(WeightsError, match="does not ask for"):
        load(directory, CONFIG | {"num_hidden_layers": 1})
    state = load_file(directory / "model.safetensors")
    state[PREFIX + "decoder.0.conv.weight"][0, 0, 0] = torch.nan
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"decoder\.0\.conv\.weight.*NaN"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sliding_window": None}, "wrong"),
        ({"sliding_window": 0}, "window is 0"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "'yarn'"),
        ({"num_key_value_heads": 3}, "no multiple"),
        ({"head_dim": 7}, "odd"),
        ({"upsample_rates": [2, 0]}, "upsample_rates"),
        ({"decoder_dim": 8}, "halved 4 times"),
    ],
)
def test_unfit_settings_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        Code2WavConfig.from_json(CONFIG | change)


@pytest.mark.parametrize("name", ["num_quantizers", "rope_theta", "upsample_rates", "sliding_window"])
def test_missing_settings_are_named(name: str) -> None:
    with pytest.raises(WeightsError, match=name):
        Code2WavConfig.from_json({key: value for key, value in CONFIG.items() if key != name})


def test_both_spellings_of_the_rotary_base() -> None:
    new = {key: value for key, value in CONFIG.items() if key != "rope_theta"}
    new["rope_parameters"] = {"rope_theta": 500.0, "rope_type": "default"}
    assert Code2WavConfig.from_json(new).rope_theta == 500.0
    assert Code2WavConfig.from_json(CONFIG).rope_theta == 10000.0
