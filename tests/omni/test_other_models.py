"""What falls out of the same parts: Qwen3-VL's pictures, and language models alone, by their directory."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

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

from omnistage.serving.choose import Wishes, choose_pipeline
from omnistage.serving.requests import GenerateRequest
from omnistage.types import Media, MediaSegment, SamplingParams, TokenSegment
from tests.models.qwen3_reference import MAX_TOKENS, load, vl_answer
from tests.models.qwen_checkpoints import build_tokenizer, chat_template, make_image
from tests.omni.asking import ask, png, running

SIZES = {
    "vocab_size": 1024,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=24)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, head_dim=16, moe_intermediate_size=40, num_experts=6, num_experts_per_tok=2)
    ),
}
WISHES = Wishes(dtype="float32")


def answers(directory: Path, requests: list[GenerateRequest], **changes):
    async def scenario():
        spec = choose_pipeline(directory, dataclasses.replace(WISHES, **changes)).spec
        async with running(spec) as pipeline:
            return await asyncio.gather(*(ask(pipeline, request) for request in requests))

    return asyncio.run(scenario())


def vl_request(directory: Path, case: str) -> GenerateRequest:
    picture = load(directory).config.image_token_id
    sizes = [(160, 128, 0), (96, 200, 3)]
    segments, text, count, previous = [], [], 0, -1
    for token_id in vl_answer(directory, case).prompt_ids:
        if token_id != picture:
            text.append(token_id)
        elif previous != picture:
            segments += [TokenSegment(tuple(text)), MediaSegment("vision", count)]
            text, count = [], count + 1
        previous = token_id
    media = tuple(
        Media(key=f"picture-{index}", data=png(make_image(*size))) for index, size in enumerate(sizes[:count])
    )
    return GenerateRequest(
        request_id=case,
        outputs=("text",),
        segments=(*segments, TokenSegment(tuple(text))),
        media={"vision": media} if media else {},
        sampling=SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS),
    )


def test_qwen3_vl_answers_as_transformers(qwen3_vl_dir):
    cases = ("text", "image", "two_images", "image")
    requests = [vl_request(qwen3_vl_dir, case) for case in cases]
    for case, heard in zip(cases, answers(qwen3_vl_dir, requests), strict=True):
        assert heard.token_ids == vl_answer(qwen3_vl_dir, case).tokens


@pytest.mark.parametrize("family", list(MODELS))
def test_language_models_answer_as_transformers(family, tmp_path):
    torch.manual_seed(11)
    model = MODELS[family]().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.25 * noise)
    model.save_pretrained(tmp_path)
    build_tokenizer(chat_template(image="")).save_pretrained(tmp_path)
    prompts = [tuple(torch.randint(3, 1000, (length,)).tolist()) for length in (5, 40, 130)]
    requests = [
        GenerateRequest(
            request_id=str(len(prompt)),
            outputs=("text",),
            segments=(TokenSegment(prompt),),
            sampling=SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
        )
        for prompt in prompts
    ]
    for prompt, heard in zip(prompts, answers(tmp_path, requests), strict=True):
        ids = torch.tensor([[*prompt, *heard.token_ids[:-1]]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 :]
        best = logits.topk(2, dim=-1).values
        is_tie = best[:, 0] - best[:, 1] < 1e-4
        matches = logits.argmax(-1) == torch.tensor(heard.token_ids)
        assert len(heard.token_ids) == 24
        assert bool((matches | is_tie).all())
