"""The native kernels compute what the layers do, step by step, whatever the sizes and the pages' order."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from omnistage.models.decoder import load_decoder
from omnistage.models.qwen3_omni_talker import load_talker
from omnistage.models.qwen3_omni_thinker import load_thinker
from omnistage.models.qwen3_residual_codes import GREEDY, CodeSampling, drawing_arrays
from omnistage.ops.attention import AttentionMetadata, DecodeGroup, DecodeRows, length_mask
from omnistage.ops.native import library as native_library
from omnistage.ops.native.library import library

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C++ compiler here")
BLOCK = 4
COMMON = {"vocab_size": 320, "num_hidden_layers": 2, "max_position_embeddings": 512}
MODELS = {
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(
            **COMMON, hidden_size=72, intermediate_size=112, num_attention_heads=6, num_key_value_heads=2
        )
    ),
    "qwen2": lambda: Qwen2ForCausalLM(
        Qwen2Config(
            **COMMON, hidden_size=96, intermediate_size=80, num_attention_heads=6, num_key_value_heads=3
        )
    ),
    "qwen3": lambda: Qwen3ForCausalLM(
        Qwen3Config(
            **COMMON,
            hidden_size=50,
            intermediate_size=33,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=22,
        )
    ),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **COMMON,
            hidden_size=64,
            intermediate_size=96,
            moe_intermediate_size=40,
            num_experts=6,
            num_experts_per_tok=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            mlp_only_layers=[1],
        )
    ),
}


@pytest.fixture(scope="module", params=list(MODELS))
def model(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(4)
    reference = MODELS[request.param]()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            noise = torch.randn(parameter.shape)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.25 * noise)
    reference.save_pretrained(directory)
    loader = load_thinker if request.param == "qwen3_moe" else load_decoder
    return loader(directory, dtype=torch.float32)


@pytest.fixture(scope="module")
def talker(qwen3_omni_dir):
    return load_talker(qwen3_omni_dir, dtype=torch.float32)


def scene(model, lengths, seed=0):
    """A cache with random contexts in scattered blocks, and the tables that lead to them.

    lengths: rows of each context, the new one included.
    """
    generator = torch.Generator().manual_seed(seed)
    num_blocks = sum(-(-length // BLOCK) for length in lengths) + 3
    cache = model.new_kv_cache(num_blocks, BLOCK)
    for pages in cache.layers:
        pages.copy_(torch.randn(pages.shape, generator=generator))
    order = torch.randperm(num_blocks, generator=generator).tolist()
    width = max(-(-length // BLOCK) for length in lengths)
    tables = np.zeros((len(lengths), width), dtype=np.int64)
    slots = []
    for row, length in enumerate(lengths):
        used = [order.pop() for _ in range(-(-length // BLOCK))]
        tables[row, : len(used)] = used
        slots.append(used[-1] * BLOCK + (length - 1) % BLOCK)
    return cache, torch.from_numpy(tables), torch.tensor(slots)


def both(model, lengths, seed=0, **options):
    """(torch's result and pages, the kernels')."""
    results = []
    for is_native in (False, True):
        cache, tables, slots = scene(model, lengths, seed)
        counts = torch.tensor(lengths)
        if is_native:
            metadata = AttentionMetadata(cache, slots, (), (), DecodeRows(tables, counts))
        else:
            longest = max(lengths)
            mask = length_mask(counts, longest, torch.float32)
            group = DecodeGroup(0, len(lengths), tables.reshape(-1), longest, mask)
            metadata = AttentionMetadata(cache, slots, (group,), ())
        generator = torch.Generator().manual_seed(seed + 1)
        hidden = torch.randn(len(lengths), model.config.hidden_size, generator=generator)
        positions = counts - 1
        if model.num_position_axes > 1:
            positions = torch.stack([positions, positions + 3, 2 * positions])
        with torch.inference_mode():
            results.append((model.forward(hidden, positions, metadata, **options), cache.layers))
    return results


@pytest.mark.parametrize("lengths", [[1], [9], [5, 1, 17, 8], [3] * 7, list(range(1, 24))])
def test_steps_equal_the_layers(model, lengths):
    assert model.decodes_natively
    (expected, pages), (found, written) = both(model, lengths)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    for ours, theirs in zip(written, pages, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("capture_layer", [0, 1, 3])
def test_three_axes_a_shared_expert_and_captured_rows(talker, capture_layer):
    lengths = [4, 11, 1]
    (expected, _), (found, _) = both(talker, lengths, capture_layer=capture_layer)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)


def test_a_row_does_not_depend_on_the_others(model):
    _, (together, _) = both(model, [5, 1, 17, 8, 2, 2, 9])
    cache, tables, slots = scene(model, [5, 1, 17, 8, 2, 2, 9])
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(7, model.config.hidden_size, generator=generator)
    rows = DecodeRows(tables[2:3].contiguous(), torch.tensor([17]))
    with torch.inference_mode():
        alone = model.forward(
            hidden[2:3], torch.tensor([16]), AttentionMetadata(cache, slots[2:3].contiguous(), (), (), rows)
        )
    assert torch.equal(alone, together[2:3])


def test_bfloat16_stays_close(qwen3_omni_dir):
    model = load_talker(qwen3_omni_dir, dtype=torch.bfloat16)
    cache, tables, slots = scene(model, [6, 3])
    hidden = torch.randn(2, model.config.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16()
    results = []
    for is_native in (False, True):
        rows = DecodeRows(tables, torch.tensor([6, 3]))
        mask = length_mask(torch.tensor([6, 3]), 6, torch.bfloat16)
        group = DecodeGroup(0, 2, tables.reshape(-1), 6, mask)
        metadata = AttentionMetadata(
            cache, slots, () if is_native else (group,), (), rows if is_native else None
        )
        with torch.inference_mode():
            results.append(model.forward(hidden, torch.tensor([5, 2]), metadata).float())
    scale = results[0].square().mean().sqrt()
    assert (results[0] - results[1]).square().mean().sqrt() < 0.03 * scale


def predicted(talker, count, samplings):
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(count, talker.config.hidden_size, generator=generator)
    first = torch.randint(2048, (count,), generator=generator)
    with torch.inference_mode():
        return talker.next_input(hidden, first, samplings)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("count", [1, 2, 9])
def test_frames_equal_those_of_the_layers(talker, temperature, count, monkeypatch):
    samplings = [CodeSampling(temperature=temperature, seed=index) for index in range(count)]
    frames, rows = predicted(talker, count, samplings)
    monkeypatch.setattr(talker._predictor, "_native", None)
    expected, expected_rows = predicted(talker, count, samplings)
    assert frames.tolist() == expected.tolist()
    torch.testing.assert_close(rows, expected_rows, atol=1e-5, rtol=0)


class Fixed(CodeSampling):
    """Draws numbers given in advance."""

    def uniform(self, codebook: int) -> float:
        return self.position / 400


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 50, 0.8), (0.7, 5, 1.0), (1.3, 0, 0.5), (0.9, 0, 1.0), (1.0, 1, 0.8), (2.5, 5000, 0.99)],
)
def test_draws_equal_the_pickers(talker, temperature, top_k, top_p, monkeypatch):
    """The same numbers drawn for the same codes: 400 of them, spread evenly."""
    draws = [
        Fixed(temperature=temperature, top_k=top_k, top_p=top_p, position=position) for position in range(400)
    ]
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(1, talker.config.hidden_size, generator=generator).expand(400, -1)
    first = torch.full((400,), 7)
    with torch.inference_mode():
        frames, _ = talker.next_input(hidden, first, draws)
        monkeypatch.setattr(talker._predictor, "_native", None)
        expected, _ = talker.next_input(hidden, first, draws)
    same = (frames == expected).all(dim=1).float().mean()
    assert (len(set(frames[:, 1].tolist())) > 1) == (top_k != 1)
    assert same > 0.99  # a number may lie within rounding of the border between two codes


def test_greedy_and_drawn_rows_mix(talker):
    mixed = [GREEDY, CodeSampling(temperature=1.0, seed=4), GREEDY]
    frames, _ = predicted(talker, 3, mixed)
    greedy, _ = predicted(talker, 3, [GREEDY] * 3)
    assert frames[[0, 2]].tolist() == greedy[[0, 2]].tolist()
    assert drawing_arrays(mixed, 2)[3][0].tolist() == [-1.0, -1.0]


PROGRAM = """
import json, sys, torch
from pathlib import Path
torch.set_num_threads(1)
from omnistage.engine.engine import Engine, EngineConfig, EngineRequest, TokenRows
from omnistage.models.qwen3_omni_thinker import load_thinker
from omnistage.ops.native.library import library
from omnistage.types import SamplingParams
model = load_thinker(Path(sys.argv[1]), dtype=torch.float32)
engine = Engine(model, EngineConfig(num_blocks=32, max_model_len=128))
sampling = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
engine.add_request(EngineRequest(request_id="a", rows=(TokenRows(tuple(range(2, 19))),), sampling=sampling))
tokens = []
while engine.has_work:
    tokens += [token for output in engine.step() for token in output.token_ids]
print(json.dumps([library() is not None, tokens]))
"""


def answer(directory, **environment):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(directory)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**os.environ, **environment},
    )
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_without_a_compiler_torch_answers_the_same(qwen3_omni_dir, tmp_path):
    (is_native, tokens), _ = answer(qwen3_omni_dir)
    assert is_native
    for environment in (
        {"OMNISTAGE_NATIVE": "0"},
        {"CXX": str(tmp_path / "no-such-compiler")},
        {"CXX": "false", "OMNISTAGE_HOME": str(tmp_path)},
    ):
        assert answer(qwen3_omni_dir, **environment)[0] == [False, tokens]


def test_a_failing_build_is_said_and_leaves_nothing(tmp_path, monkeypatch, caplog):
    compiler = tmp_path / "broken"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho no such header >&2\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("OMNISTAGE_HOME", str(tmp_path))
    assert native_library.library.__wrapped__() is None
    assert "no such header" in caplog.text
    assert list((tmp_path / "native").iterdir()) == []


@pytest.mark.parametrize("num_rows", [1, 7, 90])
def test_experts_of_many_rows_in_one_call(talker, num_rows):
    """Of a layer with a shared expert."""
    generator = torch.Generator().manual_seed(6)
    rows = torch.randn(num_rows, talker.config.hidden_size, generator=generator)
    residual = torch.randn(num_rows, talker.config.hidden_size, generator=generator)
    layers = talker._layers
    with torch.inference_mode():
        expected = layers._layers[1].mlp(rows, residual)
        found = layers.native.mlp(1, rows, residual)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
