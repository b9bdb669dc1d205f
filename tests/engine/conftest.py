"""Tiny random models in the formats transformers writes, and engines over them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from omnistage.engine.engine import Engine, EngineConfig, EngineOutput, EngineRequest, TokenRows
from omnistage.models.decoder import Decoder, load_decoder
from omnistage.types import SamplingParams

torch.set_num_threads(1)

VOCAB = 320
COMMON = {"vocab_size": VOCAB, "num_hidden_layers": 3, "max_position_embeddings": 512, "eos_token_id": 0}
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama-tied-gqa": lambda: LlamaForCausalLM(
        LlamaConfig(
            **COMMON,
            hidden_size=64,
            intermediate_size=112,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
    ),
    "qwen2": lambda: Qwen2ForCausalLM(
        Qwen2Config(
            **COMMON, hidden_size=96, intermediate_size=80, num_attention_heads=6, num_key_value_heads=2
        )
    ),
    "qwen3-mqa": lambda: Qwen3ForCausalLM(
        Qwen3Config(
            **COMMON,
            hidden_size=48,
            intermediate_size=80,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=32,
            tie_word_embeddings=True,
        )
    ),
}


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Weights large enough that logits differ clearly; biases and norms too, which start at 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = "norm" in name
            parameter.copy_(1 + 0.3 * noise if is_norm else 0.25 * noise)


@dataclass
class Tiny:
    """One model twice: as the reference runs it, and as the engine does."""

    reference: PreTrainedModel
    decoder: Decoder
    counter: itertools.count = field(default_factory=itertools.count)

    def prompts(self, lengths: Sequence[int], seed: int = 0) -> list[tuple[int, ...]]:
        generator = torch.Generator().manual_seed(seed)
        return [tuple(torch.randint(1, VOCAB, (n,), generator=generator).tolist()) for n in lengths]

    def engine(self, **limits: object) -> Engine:
        defaults = {"num_blocks": 256, "max_model_len": 512, "max_num_batched_tokens": 128}
        return Engine(self.decoder, EngineConfig(**{**defaults, **limits}))

    def request(self, *rows: object, max_tokens: int = 64, request_id: str = "", **kwargs: object):
        """A greedy request; rows: tuples of ids, or EmbeddingRows."""
        sampling = kwargs.pop(
            "sampling", SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        )
        return EngineRequest(
            request_id=request_id or f"request-{next(self.counter)}",
            rows=tuple(TokenRows(row) if isinstance(row, tuple) else row for row in rows),
            sampling=sampling,
            **kwargs,
        )

    def embeds(self, request: EngineRequest) -> Tensor:
        """The prompt of a request as the reference's input embeddings, [num_rows, hidden]."""
        table = self.reference.get_input_embeddings()
        with torch.no_grad():
            return torch.cat(
                [
                    table(torch.tensor(r.token_ids)) if isinstance(r, TokenRows) else r.embeddings
                    for r in request.rows
                ]
            )

    def assert_greedy(self, request: EngineRequest, token_ids: Sequence[int]) -> None:
        """Every token is the reference's argmax given the tokens before it.

        By induction that is the reference's own greedy output.  Excused only where its two best
        logits differ by less than 1e-4.
        """
        assert len(token_ids) == request.sampling.max_tokens
        prompt = self.embeds(request)
        with torch.no_grad():
            output = self.reference.get_input_embeddings()(torch.tensor(list(token_ids[:-1]), dtype=int))
            logits = self.reference(inputs_embeds=torch.cat([prompt, output]).unsqueeze(0)).logits[0]
        logits = logits[len(prompt) - 1 :]
        best = logits.topk(2, dim=-1).values
        is_tie = best[:, 0] - best[:, 1] < 1e-4
        matches = logits.argmax(-1) == torch.tensor(token_ids)
        assert bool((matches | is_tie).all()), f"differs at {(~matches).nonzero().flatten().tolist()}"


@pytest.fixture(scope="session", params=list(FAMILIES))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return build_tiny(request.param, tmp_path_factory)


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return build_tiny("llama-tied-gqa", tmp_path_factory)


def build_tiny(family: str, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    directory: Path = tmp_path_factory.mktemp(family)
    reference = FAMILIES[family]().eval()
    randomise(reference, seed=1)
    reference.save_pretrained(directory)
    return Tiny(reference, load_decoder(directory, dtype=torch.float32))


class Collected:
    """Runs an engine until it is idle and gathers what each request got."""

    def __init__(self) -> None:
        self.token_ids: dict[str, list[int]] = {}
        self.outputs: dict[str, list[EngineOutput]] = {}

    def step(self, engine: Engine) -> None:
        for output in engine.step():
            self.outputs.setdefault(output.request_id, []).append(output)
            self.token_ids.setdefault(output.request_id, []).extend(output.token_ids)

    def drain(self, engine: Engine, max_steps: int = 5000) -> Collected:
        for _ in range(max_steps):
            if not engine.has_work:
                return self
            self.step(engine)
        raise AssertionError(f"not idle after {max_steps} steps: {engine.stats()}")

    def last(self, request_id: str) -> EngineOutput:
        return self.outputs[request_id][-1]


@pytest.fixture
def collected() -> Collected:
    return Collected()
