"""Qwen3-Omni against transformers on one checkpoint, in one run: picture in, text and speech out.

    python benchmarks/omni.py [MODEL_DIR] [--dtype bfloat16 float32] [--rounds 3] [--check] [--profile]

Prints a Markdown table.  Both sides have the same weights, dtype, questions and token counts, greedy;
end tokens are ignored, so that lengths are fixed.  The reference has 2 threads and the machine to
itself, and so has the server.  Rounds alternate; each row is a median.
- one:     a picture and a question; 32 tokens of text and the speech of 40 frames, end to end;
- first:   until the first sound of the same request, against the reference's whole answer;
- eight:   eight such requests at once, against the reference one after another;
- talker:  frames per second at batch 1 and 8, residual codes included, the engine alone;
- text:    a text-only request through the omni pipeline, against its thinker served alone.
--profile prints, instead, where the time of one such request goes by stage, and how eight that arrive
together are heard: first sound, and seconds that a player without a buffer would stall.
--check exits with 1 and names each row that falls short of its goal.
"""

from __future__ import annotations

import argparse
import base64
import functools
import io
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from omnistage.graph import Graph
from omnistage.serving.omni import Omni
from omnistage.serving.requests import AudioDelta, Done, TextDelta

NUM_TOKENS, NUM_FRAMES, THREADS = 32, 40, 2
QUESTION = "Describe the picture in one short sentence."
TEXT_TOKENS = 96


@dataclass(frozen=True)
class Row:
    """One line of the table.  goal: the least `ratio`; None is only told."""

    what: str
    theirs: str
    ours: str
    ratio: float | None = None
    goal: float | None = None

    def markdown(self) -> str:
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}x"
        goal = "" if self.goal is None else f"{self.goal:.4g}x"
        return f"| {self.what} | {self.theirs} | {self.ours} | {ratio} | {goal} |"

    @property
    def falls_short(self) -> bool:
        return self.ratio is not None and self.goal is not None and self.ratio < self.goal


def picture(seed: int) -> np.ndarray:
    """uint8 [448, 448, 3]; every seed another, so that no cache helps."""
    y, x = np.mgrid[0:448, 0:448].astype(np.float32)
    waves = (np.sin(x / (9 + seed)), np.cos(y / 7 - seed), np.sin((x + y) / 13 + seed))
    return (127 + 120 * np.stack(waves, -1)).clip(0, 255).astype(np.uint8)


# --- the reference, in a process of its own: its threads and memory are not the server's


@functools.cache
def reference(directory: str, dtype: str) -> tuple[Any, Any]:
    import torch
    import transformers

    torch.set_num_threads(THREADS)
    kind = transformers.AutoConfig.from_pretrained(directory).architectures[0]
    model = getattr(transformers, kind).from_pretrained(directory, dtype=getattr(torch, dtype)).eval()
    # What its talker's code reads and its configuration class lacks.
    model.talker.config.audio_config = model.config.thinker_config.audio_config
    return model, transformers.AutoProcessor.from_pretrained(directory)


def reference_answer(directory: str, dtype: str, seed: int) -> float:
    """Seconds for one request, preprocessing included."""
    import torch

    model, processor = reference(directory, dtype)
    started = time.perf_counter()
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}]
    prompt = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    inputs = processor(text=[prompt], images=[picture(seed)], return_tensors="pt")
    inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
    with torch.inference_mode():
        _, wave = model.generate(
            **inputs,
            thinker_max_new_tokens=NUM_TOKENS,
            thinker_do_sample=False,
            thinker_eos_token_id=None,
            talker_max_new_tokens=NUM_FRAMES + 1,
            talker_do_sample=False,
            return_audio=True,
        )
    assert wave.numel() > 0
    return time.perf_counter() - started


def reference_talker(directory: str, dtype: str) -> float:
    """Frames per second inside generate(), the prompt's step left out."""
    import torch

    model, processor = reference(directory, dtype)
    chat = [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]
    prompt = processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    inputs = processor(text=[prompt], return_tensors="pt")
    times: list[float] = []

    def stamp(token_ids: Any, scores: Any, **kwargs: Any) -> Any:
        times.append(time.perf_counter())
        return torch.zeros(token_ids.shape[0], dtype=torch.bool)

    with torch.inference_mode():
        model.generate(
            **inputs,
            thinker_max_new_tokens=8,
            thinker_do_sample=False,
            thinker_eos_token_id=None,
            talker_max_new_tokens=NUM_FRAMES,
            talker_do_sample=False,
            talker_stopping_criteria=[stamp],
            return_audio=True,
        )
    return 1 / statistics.median(later - earlier for earlier, later in itertools.pairwise(times))


def engine_talker(directory: str, dtype: str, batch: int) -> float:
    """Frames per second of our engine with so many requests."""
    import torch

    from omnistage.engine.engine import EmbeddingRows, Engine, EngineConfig, EngineRequest
    from omnistage.models.qwen3_omni_talker import load_talker
    from omnistage.types import SamplingParams

    torch.set_num_threads(THREADS)
    talker = load_talker(Path(directory), dtype=getattr(torch, dtype))
    engine = Engine(talker, EngineConfig(num_blocks=64 * batch, max_model_len=1024))
    sampling = SamplingParams(
        max_tokens=NUM_FRAMES, temperature=0.0, repetition_penalty=1.05, ignore_eos=True
    )
    with torch.inference_mode():
        for index in range(batch):
            rows = talker.text_rows(torch.arange(20 + index, 60 + index))
            request = EngineRequest(
                request_id=str(index), rows=(EmbeddingRows(rows, digest=None),), sampling=sampling
            )
            engine.add_request(request)
            engine.feed(str(index), talker.closing_row.unsqueeze(0), filler=talker.pad_row)
    engine.step()
    times = []
    while engine.has_work:
        started = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - started)
    return batch / statistics.median(times)


# --- ours


def omni_graph(model: str, dtype: str, *, with_speech: bool = True) -> Graph:
    graph = Graph("omni" if with_speech else "alone", model=model)
    llm = {"kv_cache": "256MiB", "max_model_len": 2048, "dtype": dtype}
    thinker = graph.llm("thinker", part="thinker", **llm)
    if with_speech:
        graph.connect(graph.encoder("vision", part="visual", dtype=dtype), thinker)
        graph.connect(graph.encoder("hearing", part="audio_tower", dtype=dtype), thinker)
        talker = graph.llm("talker", part="talker", **llm)
        vocoder = graph.vocoder("vocoder", part="code2wav", dtype=dtype)
        graph.connect(thinker, talker, stream=True)
        graph.connect(talker, vocoder, stream=True, first_chunk=2, chunk=25)
        graph.output(audio=vocoder)
    graph.output(text=thinker)
    return graph


def question(seed: int) -> dict[str, Any]:
    buffer = io.BytesIO()
    Image.fromarray(picture(seed)).save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]
    return {
        "messages": [{"role": "user", "content": parts}],
        "modalities": ["text", "audio"],
        "audio": {"format": "pcm16"},
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stage_params": {"talker": {"temperature": 0, "max_tokens": NUM_FRAMES + 1}},
    }


def spoken(omni: Omni, seed: int) -> tuple[float, float]:
    """Seconds until the first sound and until the end."""
    request = question(seed)
    started = time.perf_counter()
    first = 0.0
    for event in omni.stream(request):
        if isinstance(event, AudioDelta):
            first = first or time.perf_counter() - started
    return first, time.perf_counter() - started


def eight(omni: Omni, seed: int) -> float:
    requests = [question(seed + index) for index in range(8)]
    started = time.perf_counter()
    answers = omni.generate(requests)
    assert all(answer.token_ids for answer in answers)
    return time.perf_counter() - started


def text_only(omni: Omni) -> float:
    """Seconds for a text-only request."""
    message = {"role": "user", "content": "Tell a story about a river in four sentences."}
    request = {"messages": [message], "max_tokens": TEXT_TOKENS, "temperature": 0, "ignore_eos": True}
    started = time.perf_counter()
    count = sum(len(event.token_ids) for event in omni.stream(request) if isinstance(event, TextDelta))
    assert count == TEXT_TOKENS
    return time.perf_counter() - started


def _pair(alone: Omni, omni: Omni, turn: int) -> tuple[float, float]:
    """Seconds of the same request on both, by turns one or the other first."""
    if turn % 2:
        second = text_only(omni)
        return text_only(alone), second
    return text_only(alone), text_only(omni)


def profile(directory: str, dtype: str, rounds: int) -> list[str]:
    """Markdown tables: seconds by stage of one request, and of listening to eight."""
    with Omni(omni_graph(directory, dtype)) as omni:
        spoken(omni, 0)
        by_stage: dict[str, list[float]] = {}
        for turn in range(1, rounds + 1):
            started = time.perf_counter()
            for event in omni.stream(question(turn)):
                if isinstance(event, Done):
                    by_stage.setdefault("end to end", []).append(time.perf_counter() - started)
                    for timing in event.timings:
                        by_stage.setdefault(timing.stage, []).append(timing.computed)
        heard: list[tuple[float, float]] = []
        for turn in range(rounds):
            with ThreadPoolExecutor(8) as pool:
                heard += pool.map(functools.partial(listen, omni), range(100 * turn + 100, 100 * turn + 108))
    rows = [f"| {dtype}, {stage} | {statistics.median(times):.3f} s |" for stage, times in by_stage.items()]
    first, stalls = (list(values) for values in zip(*heard, strict=True))
    return [
        *rows,
        f"| {dtype}, eight: first sound, median | {statistics.median(first):.2f} s |",
        f"| {dtype}, eight: stalls, mean / most | {statistics.mean(stalls):.2f} / {max(stalls):.2f} s |",
    ]


def listen(omni: Omni, seed: int) -> tuple[float, float]:
    """Seconds until the first sound, and those in which nothing is left to play before the end."""
    started = time.perf_counter()
    first = played = stalled = 0.0
    for event in omni.stream(question(seed)):
        if isinstance(event, AudioDelta):
            now = time.perf_counter() - started
            first = first or now
            stalled += max(0.0, now - played) if played else 0.0
            played = max(played, now) + len(event.pcm) / event.sample_rate
    return first, stalled


def apart(function: Callable[..., float], *arguments: Any) -> float:
    """The result of a call in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def measure(directory: str, dtype: str, rounds: int) -> list[Row]:
    theirs, whole, first, together = [], [], [], []
    with (
        ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool,
        Omni(omni_graph(directory, dtype)) as omni,
    ):
        ask = functools.partial(pool.submit, reference_answer, directory, dtype)
        ask(0).result()
        spoken(omni, 0)
        eight(omni, 0)
        for turn in range(1, rounds + 1):
            theirs.append(ask(100 * turn).result())
            sound, end = spoken(omni, 100 * turn)
            first.append(sound)
            whole.append(end)
            together.append(eight(omni, 100 * turn + 1))
        their_rate = [pool.submit(reference_talker, directory, dtype).result() for _ in range(rounds)]
    with (
        Omni(omni_graph(directory, dtype)) as omni,
        Omni(omni_graph(directory, dtype, with_speech=False)) as alone,
    ):
        for each in (omni, alone):
            text_only(each)
        pairs = [_pair(alone, omni, turn) for turn in range(8 * rounds)]
    rates = {batch: apart(engine_talker, directory, dtype, batch) for batch in (1, 8)}
    one, rate = statistics.median(theirs), statistics.median(their_rate)
    ours, sound, eights = (statistics.median(times) for times in (whole, first, together))
    plain, through = (statistics.median(times) for times in zip(*pairs, strict=True))
    share = statistics.median(before / after for before, after in pairs)
    return [
        Row(f"{dtype}, one request, end to end", f"{one:.2f} s", f"{ours:.2f} s", one / ours, 3),
        Row(f"{dtype}, first sound", f"{one:.2f} s (whole)", f"{sound:.2f} s", one / sound, 10),
        Row(
            f"{dtype}, eight at once, requests a minute",
            f"{60 / one:.1f}",
            f"{480 / eights:.1f}",
            8 * one / eights,
            6,
        ),
        Row(f"{dtype}, talker frames/s", f"{rate:.1f}", f"{rates[1]:.1f}", rates[1] / rate, 3),
        Row(f"{dtype}, talker frames/s, 8 requests", f"{rate:.1f}", f"{rates[8]:.1f}", rates[8] / rate, 10),
        Row(
            f"{dtype}, text only, thinker alone / in the pipeline",
            f"{plain:.3f} s",
            f"{through:.3f} s",
            share,
            0.97,
        ),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", help="directory of a Qwen3-Omni checkpoint")
    parser.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args(arguments)
    if options.model is None:
        print("needs the directory of a Qwen3-Omni checkpoint; this project brings none", file=sys.stderr)
        return 0
    if options.profile:
        print("| where | seconds |\n|---|---|", flush=True)
        for dtype in options.dtype:
            print("\n".join(profile(options.model, dtype, options.rounds)), flush=True)
        return 0
    print("| what | transformers | omnistage | ratio | reach |\n|---|---|---|---|---|", flush=True)
    short: list[Row] = []
    for dtype in options.dtype:
        rows = measure(options.model, dtype, options.rounds)
        print("\n".join(row.markdown() for row in rows), flush=True)
        short += [row for row in rows if row.falls_short]
    for row in short:
        print(f"short of its goal: {row.what}", file=sys.stderr)
    return 1 if options.check and short else 0


if __name__ == "__main__":
    raise SystemExit(main())
