"""Hidden states, logits and greedy tokens equal transformers', for every mix of media and any chunking."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeTextConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeThinkerTextModel

from omnistage.errors import WeightsError
from omnistage.models.loader import read_json
from omnistage.models.qwen3_omni_positions import PositionRules, RopeIndex, rope_index, vl_rope_index
from omnistage.models.qwen3_omni_thinker import load_thinker, thinker_config
from omnistage.models.qwen3_text import DeepstackRows, TextModel
from tests.models.flat_rows import PagedRun, decode_together
from tests.models.qwen3_reference import (
    MAX_TOKENS,
    OMNI_CASES,
    RECORDED,
    VL_CASES,
    Answer,
    omni_answer,
    vl_answer,
)
from tests.models.qwen_checkpoints import init_weights, published_tensors, write_json

TOLERANCE = 1e-4
CHUNKS = (1, 7, 64)


@pytest.fixture(scope="module")
def thinker(qwen3_omni_dir) -> TextModel:
    return load_thinker(qwen3_omni_dir, dtype=torch.float32)


@pytest.fixture(scope="module")
def vl_text(qwen3_vl_dir) -> TextModel:
    return load_thinker(qwen3_vl_dir, dtype=torch.float32)


def greedy(model: TextModel, answer: Answer, index: RopeIndex, ends: tuple[int, ...]) -> list[int]:
    """Tokens after the prompt, its rows 64 at a time."""
    run = PagedRun(model, len(answer.prompt_ids) + MAX_TOKENS)
    hidden, _ = run.prefill(answer.embeddings, index.positions, 64, deepstack=answer.deepstack)
    tokens: list[int] = []
    while True:
        tokens.append(int(model.logits(hidden[-1:]).argmax()))
        if tokens[-1] in ends or len(tokens) == MAX_TOKENS:
            return tokens
        hidden = run.forward(model.embed(torch.tensor(tokens[-1:])), index.following(run.num_rows, 1))


@pytest.mark.parametrize("case", OMNI_CASES)
def test_positions_are_the_references(case, qwen3_omni_dir):
    answer = omni_answer(qwen3_omni_dir, case)
    rules = PositionRules.of_thinker(read_json(qwen3_omni_dir / "config.json"))
    index = rope_index(answer.prompt_ids, answer.media, rules)
    np.testing.assert_array_equal(index.positions, answer.positions.float().numpy())
    assert index.rope_delta == RECORDED["qwen3_omni"][case]["rope_delta"]


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("case", OMNI_CASES)
def test_prefill_equals_transformers(case, chunk, thinker, qwen3_omni_dir):
    answer = omni_answer(qwen3_omni_dir, case)
    assert answer.accepted is not None
    with torch.inference_mode():
        run = PagedRun(thinker, len(answer.prompt_ids))
        hidden, accepted = run.prefill(
            answer.embeddings, answer.positions, chunk, deepstack=answer.deepstack, capture_layer=4
        )
        torch.testing.assert_close(thinker.logits(hidden), answer.logits, atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(accepted, answer.accepted, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("case", OMNI_CASES)
def test_greedy_tokens_are_the_recorded_ones(case, thinker, qwen3_omni_dir):
    answer = omni_answer(qwen3_omni_dir, case)
    rules = PositionRules.of_thinker(read_json(qwen3_omni_dir / "config.json"))
    index = rope_index(answer.prompt_ids, answer.media, rules)
    with torch.inference_mode():
        tokens = greedy(thinker, answer, index, thinker.config.eos_token_ids)
    assert tokens == RECORDED["qwen3_omni"][case]["tokens"]
    assert len(answer.prompt_ids) == RECORDED["qwen3_omni"][case]["prompt_rows"]


@pytest.mark.parametrize("case", VL_CASES)
def test_qwen3_vl(case, vl_text, qwen3_vl_dir):
    answer = vl_answer(qwen3_vl_dir, case)
    config = read_json(qwen3_vl_dir / "config.json")
    index = vl_rope_index(
        answer.prompt_ids,
        answer.media,
        image_token_id=config["image_token_id"],
        video_token_id=config["video_token_id"],
        merge_size=config["vision_config"]["spatial_merge_size"],
    )
    np.testing.assert_array_equal(index.positions, answer.positions.float().numpy())
    with torch.inference_mode():
        hidden, _ = PagedRun(vl_text, len(answer.prompt_ids)).prefill(
            answer.embeddings, index.positions, 7, deepstack=answer.deepstack
        )
        torch.testing.assert_close(vl_text.logits(hidden), answer.logits, atol=TOLERANCE, rtol=0)
        assert greedy(vl_text, answer, index, vl_text.config.eos_token_ids) == answer.tokens
    assert answer.tokens == RECORDED["qwen3_vl"][case]["tokens"]


@pytest.mark.parametrize("tied", [False, True])
def test_qwen3_moe(tied, tmp_path):
    config = Qwen3MoeConfig(
        vocab_size=160,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
        attention_bias=tied,
        tie_word_embeddings=tied,
        eos_token_id=[5, 6],
    )
    reference = Qwen3MoeForCausalLM(config).eval()
    init_weights(reference)
    reference.tie_weights()
    tensors = published_tensors(reference)
    if tied:
        del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    write_json(tmp_path / "config.json", json.loads(config.to_json_string()))
    model = load_thinker(tmp_path, dtype=torch.float32)
    assert model.config.has_experts == (False, True, False, False)
    assert model.config.eos_token_ids == (5, 6)
    ids = torch.randint(160, (23,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = reference(input_ids=ids[None]).logits[0]
        hidden, _ = PagedRun(model, 23).prefill(model.embed(ids), torch.arange(23), 7)
        torch.testing.assert_close(model.logits(hidden), expected, atol=TOLERANCE, rtol=0)


def random_text_model(directory: Path, values: dict[str, Any]) -> tuple[Any, Tensor, TextModel]:
    """transformers' decoder, its head, and ours, of a directory laid out as Qwen3-Omni's."""
    thinker = nn.Module()
    thinker.model = Qwen3OmniMoeThinkerTextModel(Qwen3OmniMoeTextConfig(**values)).eval()
    thinker.lm_head = nn.Linear(values["hidden_size"], values["vocab_size"], bias=False)
    whole = nn.Module()
    whole.thinker = thinker
    init_weights(whole)
    save_file(published_tensors(whole), directory / "model.safetensors")
    config = {"model_type": "qwen3_omni_moe", "thinker_config": {"text_config": values}}
    write_json(directory / "config.json", config)
    return thinker.model, thinker.lm_head.weight, load_thinker(directory, dtype=torch.float32)


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)
@given(data=st.data())
def test_random_configurations(tmp_path_factory, data):
    draw = data.draw
    num_kv_heads, num_layers = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    half = draw(st.sampled_from([4, 8, 12]))
    rows, columns = draw(st.integers(0, half // 3)), draw(st.integers(0, half // 3))
    num_experts = draw(st.integers(1, 6))
    values = {
        "vocab_size": 64,
        "hidden_size": draw(st.sampled_from([24, 32, 56])),
        "intermediate_size": 40,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_kv_heads * draw(st.integers(1, 3)),
        "num_key_value_heads": num_kv_heads,
        "head_dim": 2 * half,
        "attention_bias": draw(st.booleans()),
        "num_experts": num_experts,
        "num_experts_per_tok": draw(st.integers(1, num_experts)),
        "moe_intermediate_size": 24,
        "norm_topk_prob": draw(st.booleans()),
        "decoder_sparse_step": draw(st.integers(1, 2)),
        "mlp_only_layers": draw(st.lists(st.integers(0, num_layers - 1), max_size=2)),
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": draw(st.sampled_from([1e4, 1e6])),
            "mrope_section": [half - rows - columns, rows, columns],
        },
    }
    reference, head, model = random_text_model(tmp_path_factory.mktemp("text"), values)
    num_rows = draw(st.integers(1, 20))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    hidden = torch.randn(num_rows, values["hidden_size"], generator=generator)
    positions = 40 * torch.rand(3, num_rows, generator=generator)
    is_picture = torch.rand(num_rows, generator=generator) < 0.4
    features = [
        torch.randn(int(is_picture.sum()), values["hidden_size"], generator=generator)
        for _ in range(draw(st.integers(0, num_layers)))
    ]
    capture_layer = draw(st.integers(0, num_layers))
    with torch.inference_mode():
        expected = reference(
            inputs_embeds=hidden[None],
            position_ids=positions[:, None],
            visual_pos_masks=is_picture[None],
            deepstack_visual_embeds=features or None,
            output_hidden_states=True,
        )
        deepstack = DeepstackRows(is_picture.nonzero().squeeze(1), features)
        run = PagedRun(model, num_rows)
        ours, captured = run.prefill(
            hidden, positions, draw(st.integers(1, 21)), deepstack=deepstack, capture_layer=capture_layer
        )
        logits = expected.last_hidden_state[0] @ head.T
        torch.testing.assert_close(model.logits(ours), logits, atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(captured, expected.hidden_states[capture_layer][0], atol=TOLERANCE, rtol=0)


def test_rows_do_not_depend_on_their_neighbours(thinker, qwen3_omni_dir):
    answers = [omni_answer(qwen3_omni_dir, case) for case in ("text", "image", "audio")]
    cache = thinker.new_kv_cache(64, 4)
    blocks = torch.randperm(64, generator=torch.Generator().manual_seed(0)).split(16)
    with torch.inference_mode():
        together, alone = [], []
        for answer, own_blocks in zip(answers, blocks, strict=False):
            for runs, pages in ((together, cache), (alone, None)):
                run = PagedRun(thinker, 60, cache=pages)
                run.blocks = own_blocks if pages is not None else run.blocks
                run.prefill(answer.embeddings, answer.positions, 64, deepstack=answer.deepstack)
                runs.append(run)
        hidden = thinker.embed(torch.tensor([5, 6, 7]))
        positions = torch.tensor([[27.0, 34.5, 49.0]]).expand(3, -1)
        joint = decode_together(together, hidden, positions)
        for index, run in enumerate(alone):
            single = run.forward(hidden[index : index + 1], positions[:, index : index + 1])
            torch.testing.assert_close(joint[index : index + 1], single, atol=1e-5, rtol=0)


def test_bfloat16(thinker, qwen3_omni_dir):
    half = load_thinker(qwen3_omni_dir, dtype=torch.bfloat16)
    answer = omni_answer(qwen3_omni_dir, "image")
    with torch.inference_mode():
        hidden, accepted = PagedRun(half, 60).prefill(
            answer.embeddings.bfloat16(), answer.positions, 7, deepstack=answer.deepstack, capture_layer=1
        )
        _, expected = PagedRun(thinker, 60).prefill(
            answer.embeddings, answer.positions, 64, deepstack=answer.deepstack, capture_layer=1
        )
    assert half.logits(hidden).dtype == torch.bfloat16
    assert half.weight_bytes == thinker.weight_bytes / 2
    assert accepted is not None
    assert expected is not None
    # rows that pick another expert differ; the others differ by rounding
    assert ((accepted.float() - expected).abs().amax(-1) < 0.1).float().mean() > 0.8


def test_sizes(thinker):
    cache = thinker.new_kv_cache(3, 16)
    assert sum(layer.nbytes for layer in cache.layers) == 3 * thinker.kv_bytes_per_block(16)
    embedding, head = 2 * [1024 * 64 * 4]
    assert thinker.weight_bytes > embedding + head


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"thinker_config": {}}, "lacks 'text_config'"),
        ({"text": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}}, "rope_type 'yarn'"),
        ({"text": {"hidden_act": "gelu"}}, "hidden_act is 'gelu'"),
        ({"text": {"quantization_config": {"bits": 4}}}, "quantised"),
        ({"text": {"num_experts": 9}}, "has shape"),
        ({"text": {"num_hidden_layers": 6}}, "layers.5.* is missing"),
        ({"text": {"num_hidden_layers": 4}}, "does not ask for"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message, qwen3_omni_dir, tmp_path):
    config = read_json(qwen3_omni_dir / "config.json")
    config["thinker_config"]["text_config"].update(changes.pop("text", {}))
    write_json(tmp_path / "config.json", {**config, **changes})
    for path in qwen3_omni_dir.glob("model*"):
        shutil.copy(path, tmp_path)
    with pytest.raises(WeightsError, match=message):
        load_thinker(tmp_path, dtype=torch.float32)


def test_a_layer_that_does_not_exist_cannot_be_captured(thinker):
    hidden = torch.zeros(2, 64)
    with pytest.raises(WeightsError, match="after 6 layers, but there are 5"):
        PagedRun(thinker, 2).forward(hidden, torch.arange(2), capture_layer=6)


def test_the_configuration_is_read_without_weights(qwen3_omni_dir, tmp_path):
    shutil.copy(qwen3_omni_dir / "config.json", tmp_path)
    assert thinker_config(tmp_path).rope_sections == (4, 2, 2)
