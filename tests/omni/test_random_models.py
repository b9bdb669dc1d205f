"""Whole models of random small sizes against transformers, built on the fly.

A mismatch of a token is excused only where the reference's two best logits are closer than 1e-4; the
number of excused answers is bounded.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from tests.models.qwen3_reference import omni_answer
from tests.models.qwen_checkpoints import build_qwen3_omni
from tests.omni.asking import ask, assert_equals_reference, omni_graph, question, running

SEEDS = range(5)


def random_changes(seed: int) -> dict[str, Any]:
    """Sizes of every part, drawn from a seed."""
    draw = random.Random(seed)
    hidden = draw.choice([32, 48, 64])
    depth = draw.choice([3, 4, 6])
    deepstack = sorted(draw.sample(range(depth), draw.choice([1, 2, 3])))
    kv_heads = draw.choice([1, 2])
    layers = max(draw.choice([3, 4, 5]), len(deepstack))
    experts = draw.choice([2, 4, 8])
    groups = draw.choice([2, 3, 5])
    head_dim = draw.choice([16, 24, 32])
    sections = {16: [4, 2, 2], 24: [4, 4, 4], 32: [8, 4, 4]}[head_dim]
    talker_hidden = draw.choice([24, 32, 40])
    rope = {"mrope_interleaved": True, "interleaved": True, "mrope_section": sections, "rope_type": "default"}
    text = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": kv_heads * draw.choice([1, 2, 3]),
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "num_experts": experts,
        "num_experts_per_tok": draw.randint(1, experts),
        "rope_scaling": rope,
    }
    vocoder_heads = draw.choice([1, 2, 3])
    return {
        "thinker_config": {
            "text_config": text,
            "vision_config": {
                "depth": depth,
                "hidden_size": draw.choice([32, 64]),
                "num_heads": draw.choice([1, 2, 4]),
                "out_hidden_size": hidden,
                "deepstack_visual_indexes": deepstack,
            },
            "audio_config": {
                "d_model": draw.choice([32, 64]),
                "encoder_layers": draw.choice([1, 2]),
                "encoder_attention_heads": draw.choice([2, 4]),
                "n_window_infer": draw.choice([100, 200, 400]),
                "output_dim": hidden,
            },
        },
        "talker_config": {
            "num_code_groups": groups,
            "thinker_hidden_size": hidden,
            "accept_hidden_layer": draw.randint(0, layers),
            "text_config": {
                "hidden_size": talker_hidden,
                "num_hidden_layers": draw.choice([1, 2, 3]),
                "num_attention_heads": 4,
                "num_key_value_heads": draw.choice([1, 2, 4]),
                "num_experts": draw.choice([2, 4]),
            },
            "code_predictor_config": {
                "hidden_size": talker_hidden,
                "num_code_groups": groups,
                "num_hidden_layers": draw.choice([1, 2]),
            },
        },
        "code2wav_config": {
            "num_quantizers": groups,
            "num_hidden_layers": draw.choice([1, 2]),
            "hidden_size": 16 * vocoder_heads,
            "num_attention_heads": vocoder_heads,
            "num_key_value_heads": vocoder_heads,
            "sliding_window": draw.choice([5, 12]),
        },
    }


def flat(changes: dict[str, Any], path: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} as {"a.b": 1}, but for rope_scaling, which is replaced whole."""
    result: dict[str, Any] = {}
    for key, value in changes.items():
        if isinstance(value, dict) and key != "rope_scaling":
            result.update(flat(value, f"{path}{key}."))
        else:
            result[path + key] = value
    return result


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_model_answers_as_transformers_does(seed, tmp_path_factory):
    directory = build_qwen3_omni(Path(tmp_path_factory.mktemp(f"model{seed}")), flat(random_changes(seed)))
    cases = ("all", "audio_in_video", "image")
    settings = {"max_num_batched_tokens": 13, "max_num_seqs": 8}
    changes = dict.fromkeys(("thinker", "talker"), settings)

    async def scenario():
        async with running(omni_graph(directory, changes=changes, first_chunk=2, chunk=5)) as pipeline:
            return await asyncio.gather(*(ask(pipeline, question(directory, case)) for case in cases))

    for case, heard in zip(cases, asyncio.run(scenario()), strict=True):
        assert len(omni_answer(directory, case).tokens) > 1
        assert_equals_reference(heard, directory, case)
