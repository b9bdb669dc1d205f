"""The engine against transformers' generate(): same weights, same prompts, one run.

    python benchmarks/engine.py [--model DIR] [--dtypes bfloat16 float32] [--threads 2]

Prints a markdown table of output tokens per second (prompt included in the time), medians over
interleaved repeats.  transformers serves requests one at a time, so its aggregate over many is its rate
for one; the second column gives it all of them as one static batch of equal lengths, its best case.
Needs a quiet machine: other load slows both sides, unevenly.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from omnistage.engine.engine import Engine, EngineConfig, EngineRequest, TokenRows
from omnistage.models.decoder import load_decoder
from omnistage.models.fetch import fetch_starter
from omnistage.types import SamplingParams

Prompt = tuple[int, ...]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, help="directory in Hugging Face format; default: the starter")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--concurrent", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


class Ours:
    """Each run has a salt of its own, so that no run finds another's prefix."""

    def __init__(self, directory: Path, dtype: torch.dtype, num_blocks: int, max_num_seqs: int) -> None:
        limits = EngineConfig(
            num_blocks=num_blocks,
            max_model_len=2048,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=512,
        )
        self.engine = Engine(load_decoder(directory, dtype=dtype), limits)
        self.num_runs = 0

    def run(self, prompts: list[Prompt], num_output: int) -> int:
        self.num_runs += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
        for index, prompt in enumerate(prompts):
            self.engine.add_request(
                EngineRequest(
                    request_id=str(index),
                    rows=(TokenRows(prompt),),
                    sampling=sampling,
                    cache_salt=str(self.num_runs),
                )
            )
        num_tokens = 0
        while self.engine.has_work:
            num_tokens += sum(len(output.token_ids) for output in self.engine.step())
        return num_tokens


def run_reference(model: PreTrainedModel, prompts: list[Prompt], num_output: int) -> int:
    ids = torch.tensor(prompts)
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_output,
            min_new_tokens=num_output,
            do_sample=False,
            pad_token_id=0,
        )
    return (output.shape[1] - ids.shape[1]) * len(prompts)


def rate(run: Callable[[], int]) -> float:
    """Output tokens per second."""
    start = time.perf_counter()
    num_tokens = run()
    return num_tokens / (time.perf_counter() - start)


def measure(arguments: argparse.Namespace, name: str) -> None:
    dtype: torch.dtype = getattr(torch, name)
    most = max(arguments.concurrent)
    num_blocks = most * (-(-(arguments.prompt + arguments.output) // 16) + 1)
    ours = Ours(arguments.model, dtype, num_blocks, most)
    reference = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype).eval()
    vocab_size = reference.config.vocab_size
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, vocab_size, (most, arguments.prompt), generator=generator)
    prompts: list[Prompt] = [tuple(row) for row in drawn.tolist()]
    ours.run(prompts, 2)
    run_reference(reference, prompts, 2)
    batch_rates: dict[int, list[float]] = {count: [] for count in arguments.concurrent}
    our_rates: dict[int, list[float]] = {count: [] for count in arguments.concurrent}
    for _ in range(arguments.repeats):
        for count in arguments.concurrent:
            some = prompts[:count]
            batch_rates[count].append(
                rate(lambda some=some: run_reference(reference, some, arguments.output))
            )
            our_rates[count].append(rate(lambda some=some: ours.run(some, arguments.output)))
    one = statistics.median(batch_rates[arguments.concurrent[0]])
    for count in arguments.concurrent:
        batch, median = statistics.median(batch_rates[count]), statistics.median(our_rates[count])
        print(
            f"| {name} | {count} | {one:.1f} | {batch:.1f} | {median:.1f} | {median / one:.2f}x "
            f"| {median / batch:.2f}x |",
            flush=True,
        )


def main() -> None:
    arguments = parse_arguments()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(arguments.threads)
    print(
        f"{arguments.prompt}+{arguments.output} tokens a request, {arguments.threads} threads, "
        f"medians of {arguments.repeats}, load before {os.getloadavg()[0]:.2f}\n"
    )
    if arguments.model is None:
        arguments.model = fetch_starter() / "thinker"
    print(
        "| dtype | concurrent | transformers, one at a time (tok/s) | as a static batch | omnistage "
        "| to one at a time | to static batch |\n|---|---|---|---|---|---|---|"
    )
    for name in arguments.dtypes:
        measure(arguments, name)


if __name__ == "__main__":
    main()
