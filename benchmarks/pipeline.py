"""What the pipeline itself costs: per token, per waiting stage, and until the first answer.

    python benchmarks/pipeline.py [--rounds 5]

Prints a Markdown table.  Three measurements, each the median over rounds:
- token: a null model through processes, sockets and orchestrator, less the same engine in a loop;
- idle:  decode speed of the thinker alone against the whole starter with its other stages waiting,
         both alive, in turn;
- start: from `Omni("starter")` to the first answer, by phase, with weights in the page cache;
- sound: first audio of a two-sentence answer against the end of its text.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from omnistage.graph import Graph
from omnistage.serving.omni import Omni
from omnistage.serving.requests import AudioDelta, TextDelta

NUM_TOKENS = 1000
STORY = "Tell a story about a river in four sentences."


def llm_graph(model: str, name: str) -> Graph:
    graph = Graph(name, model=model)
    graph.output(text=graph.llm("thinker", dtype="float32", kv_cache="256MiB", max_model_len=2048))
    return graph


def chat(text: str, max_tokens: int, **fields: Any) -> dict[str, Any]:
    message = {"role": "user", "content": text}
    return {"messages": [message], "max_tokens": max_tokens, "temperature": 0, "seed": 0, **fields}


def seconds_per_token(omni: Omni, max_tokens: int) -> float:
    """Between the first and the last token of one stream, read as a client reads it."""
    first = last = 0.0
    count = 0
    for event in omni.stream(chat(STORY, max_tokens, ignore_eos=True)):
        if isinstance(event, TextDelta):
            last = time.perf_counter()
            first = first or last
            count += len(event.token_ids)
    return (last - first) / (count - 1)


def null_model(folder: Path, thinker: Path) -> Path:
    """A model directory whose thinker is the null model with the starter's tokenizer."""
    part = folder / "thinker"
    part.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(thinker / name, part / name)
    config = {
        "model_type": "null",
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "token_id": 500,
    }
    (part / "config.json").write_text(json.dumps(config))
    return folder


def engine_seconds_per_token(model: Path) -> float:
    """The same null model and engine without stage, process and transport."""
    import torch

    from omnistage.engine.engine import Engine, EngineConfig, EngineRequest, TokenRows
    from omnistage.models.null import load_null
    from omnistage.types import SamplingParams

    engine = Engine(
        load_null(model / "thinker", dtype=torch.float32), EngineConfig(kv_bytes=2**28, max_model_len=2048)
    )
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
    engine.add_request(EngineRequest(request_id="a", rows=(TokenRows(tuple(range(40))),), sampling=sampling))
    engine.step()
    started = time.perf_counter()
    steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
    return (time.perf_counter() - started) / steps


def measure_token(rounds: int, thinker: Path) -> list[tuple[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        model = null_model(Path(folder) / "null", thinker)
        with Omni(llm_graph(str(model), "null")) as omni:
            seconds_per_token(omni, 100)
            through = [seconds_per_token(omni, NUM_TOKENS) for _ in range(rounds)]
        alone = [engine_seconds_per_token(model) for _ in range(rounds)]
    cost = statistics.median(through) - statistics.median(alone)
    return [
        ("token, null model through the pipeline", f"{statistics.median(through) * 1e3:.3f} ms"),
        ("token, its engine alone", f"{statistics.median(alone) * 1e3:.3f} ms"),
        ("**graph and transport per token** (reach: under 0.3 ms)", f"**{cost * 1e3:.3f} ms**"),
    ]


def measure_idle(rounds: int) -> list[tuple[str, str]]:
    with Omni(llm_graph("starter", "alone")) as alone, Omni("starter") as whole:
        for omni in (alone, whole):
            seconds_per_token(omni, 16)
        pairs = [(seconds_per_token(alone, 128), seconds_per_token(whole, 128)) for _ in range(rounds)]
    ratio = statistics.median(with_idle / without for without, with_idle in pairs)
    rate = 1 / statistics.median(without for without, _ in pairs)
    return [
        ("one stream, thinker alone", f"{rate:.1f} tokens/s"),
        ("**slower with the other stages waiting** (reach: under 3 %)", f"**{(ratio - 1) * 100:+.1f} %**"),
    ]


def measure_start(rounds: int) -> list[tuple[str, str]]:
    ready, answered = [], []
    phases: dict[str, list[float]] = {}
    for _ in range(rounds):
        started = time.perf_counter()
        with Omni("starter") as omni:
            ready.append(time.perf_counter() - started)
            next(iter(omni.stream(chat("Say hello.", 8))))
            answered.append(time.perf_counter() - started)
            for replica in omni.pipeline.orchestrator.replicas.all():
                for phase, seconds in replica.phases.items():
                    phases.setdefault(f"{replica.stage.name}: {phase}", []).append(seconds)
    rows = [(f"start, {name}", f"{statistics.median(times):.2f} s") for name, times in phases.items()]
    return [
        *rows,
        ("start, all stages ready", f"{statistics.median(ready):.2f} s"),
        ("**start to first answer** (reach: under 8 s)", f"**{statistics.median(answered):.2f} s**"),
    ]


def measure_sound(rounds: int) -> list[tuple[str, str]]:
    question = "What is the capital of France, and what is it known for? Answer in two long sentences."
    first_sound, last_text, factors = [], [], []
    with Omni("starter") as omni:
        for _ in range(rounds + 1):
            started = time.perf_counter()
            sound = text = end = samples = 0.0
            for event in omni.stream(
                chat(question, 80, modalities=["text", "audio"], audio={"format": "wav"})
            ):
                now = time.perf_counter() - started
                if isinstance(event, AudioDelta):
                    sound = sound or now
                    samples += len(event.pcm) / event.sample_rate
                elif isinstance(event, TextDelta):
                    text = now
                end = now
            first_sound.append(sound)
            last_text.append(text)
            factors.append(end / samples)
    return [  # the first round warms up
        ("first audio of a two-sentence answer", f"{statistics.median(first_sound[1:]):.2f} s"),
        ("end of its text", f"{statistics.median(last_text[1:]):.2f} s"),
        ("real-time factor of the whole answer", f"{statistics.median(factors[1:]):.2f}"),
    ]


def main() -> None:
    from omnistage.models.fetch import fetch_starter

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["token", "idle", "start", "sound"])
    options = parser.parse_args()
    thinker = fetch_starter() / "thinker"
    measures = {
        "token": lambda: measure_token(options.rounds, thinker),
        "idle": lambda: measure_idle(options.rounds),
        "start": lambda: measure_start(options.rounds),
        "sound": lambda: measure_sound(options.rounds),
    }
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
        f"load {os.getloadavg()[0]:.1f}, commit {commit.stdout.strip() or 'unknown'}, "
        f"medians of {options.rounds}\n"
    )
    print("| what | median |\n|---|---|")
    for name, measure in measures.items():
        if options.only in (None, name):
            for label, value in measure():
                print(f"| {label} | {value} |", flush=True)


if __name__ == "__main__":
    main()
