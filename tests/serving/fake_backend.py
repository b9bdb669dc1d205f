"""A Backend without workers: answers by script, deterministically, and counts what it is asked and told."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from omnistage.serving.requests import AudioDelta, BackendInfo, Done, Event, GenerateRequest, TextDelta
from omnistage.serving.tokenizer import Tokenizer
from omnistage.types import FinishReason, StageTiming, TokenLogprob, Usage

SAMPLE_RATE = 22_050
ANSWER = ("Two", " cats", " sleep", ".", " One", " wakes", ".")
TRANSCRIPT = (" What is", " in the", " picture?")
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and message['role'] != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
    "{% if message['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('the system message must come first') }}{% endif %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Hold:
    """In a script: nothing more comes until the stream is closed."""


Step = Event | Exception | Hold
Script = Callable[[GenerateRequest], Iterable[Step]]


def write_model(directory: Path) -> None:
    """A small byte-level BPE tokenizer and a ChatML template under directory/thinker."""
    thinker = directory / "thinker"
    thinker.mkdir()
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = [
        "Two cats sleep. One wakes.",
        "What is in this picture? Picture of a cat.",
        "user assistant system",
    ]
    tokenizer.train_from_iterator(corpus * 20, trainer)
    tokenizer.save(str(thinker / "tokenizer.json"))
    config = {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (thinker / "tokenizer_config.json").write_text(json.dumps(config))
    (thinker / "chat_template.jinja").write_text(TEMPLATE)


class FakeStream:
    def __init__(self, backend: FakeBackend, request: GenerateRequest, steps: Iterator[Step]) -> None:
        self.request_id = request.request_id
        self._backend = backend
        self._steps = steps
        self._is_over = False

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> Event:
        if self._is_over:
            raise StopAsyncIteration
        await asyncio.sleep(0)
        step = next(self._steps)
        if isinstance(step, Hold):
            self._backend.holding.set()
            await asyncio.Event().wait()
        if isinstance(step, Exception):
            self._is_over = True
            raise step
        assert not isinstance(step, Hold)
        self._is_over = isinstance(step, Done)
        self._backend.num_pulled += 1
        return step

    async def aclose(self) -> None:
        self._backend.num_open -= 1
        if not self._is_over:
            self._is_over = True
            self._backend.aborted.append(self.request_id)
            self._backend.has_aborted.set()


class FakeBackend:
    """script: what each request gets, `say` by default.  refusal: raised by submit."""

    def __init__(self, model_dir: Path) -> None:
        self.is_ready = True
        self.script: Script = self.say
        self.refusal: Exception | None = None
        self.requests: list[GenerateRequest] = []
        self.aborted: list[str] = []
        self.has_aborted = threading.Event()
        self.holding = threading.Event()
        self.num_open = 0
        self.num_pulled = 0
        self.tokenizer = Tokenizer(model_dir / "thinker")
        self.info = BackendInfo(
            model="starter",
            model_dir=str(model_dir),
            outputs=("text", "audio"),
            prompt_directory=str(model_dir / "thinker"),
            speech_entry="talker",
            transcriber="hearing",
            encoders={"image": "vision", "audio": "hearing"},
            max_model_len=512,
            voices=("joe", "amy"),
            sample_rate=SAMPLE_RATE,
            entry="thinker",
            llm_stages=("thinker", "talker"),
        )

    def submit(self, request: GenerateRequest) -> FakeStream:
        if self.refusal is not None:
            raise self.refusal
        self.requests.append(request)
        self.num_open += 1
        return FakeStream(self, request, iter(self.script(request)))

    def gauges(self) -> Mapping[str, Mapping[str, float]]:
        return {"thinker": {"kv_blocks_used": 3.0, "running": 1.0}, "vocoder": {"running": 0.0}}

    def say(self, request: GenerateRequest) -> Iterator[Step]:
        """The fixed answer, cut at max_tokens; a tenth of a second of sound after every word."""
        if request.outputs == ("hearing",):
            yield from (TextDelta(text) for text in TRANSCRIPT)
            yield done(completion_tokens=len(TRANSCRIPT))
            return
        words = (request.text or "").split() if request.entry else ANSWER[: request.sampling.max_tokens]
        token_count = 0
        for position, word in enumerate(words):
            token_ids = self.tokenizer.encode(word)
            token_count += len(token_ids)
            if "text" in request.outputs:
                yield TextDelta(word, token_ids, self._logprobs(request, token_ids))
            if "audio" in request.outputs:
                yield AudioDelta(tone(position), SAMPLE_RATE)
        is_cut = len(words) < len(ANSWER) and not request.entry
        yield done(
            finish_reason=FinishReason.LENGTH if is_cut else FinishReason.STOP,
            completion_tokens=token_count,
            cached_tokens=16,
        )

    def _logprobs(self, request: GenerateRequest, token_ids: tuple[int, ...]) -> tuple[TokenLogprob, ...]:
        wanted = request.sampling.logprobs
        if wanted is None:
            return ()
        return tuple(
            TokenLogprob(token_id, -0.5, tuple((token_id + rank, -0.5 - rank) for rank in range(wanted)))
            for token_id in token_ids
        )


def tone(position: int) -> np.ndarray:
    """A tenth of a second, float32; the pitch tells the position."""
    instants = np.arange(SAMPLE_RATE // 10, dtype=np.float32) / SAMPLE_RATE
    return (0.3 * np.sin(2 * np.pi * (200 + 40 * position) * instants)).astype(np.float32)


def done(
    *,
    finish_reason: FinishReason = FinishReason.STOP,
    completion_tokens: int = 0,
    cached_tokens: int = 0,
    audio_tokens: int = 0,
    truncated: tuple[str, ...] = (),
) -> Done:
    now = time.monotonic()
    timings = (
        StageTiming(
            stage="vocoder",
            received=now - 0.2,
            started=now - 0.15,
            first_output=now - 0.1,
            finished=now,
            computed=0.1,
        ),
        StageTiming(
            stage="thinker",
            received=now - 0.5,
            started=now - 0.4,
            first_output=now - 0.3,
            finished=now - 0.1,
            computed=0.25,
            transferred=0.01,
        ),
    )
    usage = Usage(prompt_tokens=20, completion_tokens=completion_tokens, cached_tokens=cached_tokens)
    return Done(
        finish_reason,
        usage,
        timings,
        arrived=now - 0.5,
        audio_tokens=audio_tokens,
        truncated=truncated,
    )
