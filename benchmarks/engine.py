"""The engine against transformers' generate(): same weights, same prompts, one run.

    python benchmarks/engine.py --model DIR [--dtypes bfloat16 float32] [--threads 2]

Prints a markdown table of output tokens per second (prompt included in the time), medians over
interleaved repeats.  transformers answers one request at a time; its aggregate over many requests is
therefore its rate for one.  Needs a quiet machine: other load slows both sides, unevenly.
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
from omnistage.types import SamplingParams

Prompt = tuple[int, ...]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="directory in Hugging Face format")
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


def run_reference(model: PreTrainedModel, prompt: Prompt, num_output: int) -> int:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_output,
            min_new_tokens=num_output,
            do_sample=False,
            pad_token_id=0,
        )
    return output.shape[1] - len(prompt)


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
    run_reference(reference, prompts[0], 2)
    reference_rates: list[float] = []
    our_rates: dict[int, list[float]] = {count: [] for count in arguments.concurrent}
    for _ in range(arguments.repeats):
        reference_rates.append(rate(lambda: run_reference(reference, prompts[0], arguments.output)))
        for count, rates in our_rates.items():
            rates.append(rate(lambda count=count: ours.run(prompts[:count], arguments.output)))
    base = statistics.median(reference_rates)
    for count, rates in our_rates.items():
        median = statistics.median(rates)
        print(f"| {name} | {count} | {base:.1f} | {median:.1f} | {median / base:.2f}x |", flush=True)


def main() -> None:
    arguments = parse_arguments()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(arguments.threads)
    print(
        f"{arguments.prompt}+{arguments.output} tokens a request, {arguments.threads} threads, "
        f"medians of {arguments.repeats}, load before {os.getloadavg()[0]:.2f}\n"
    )
    print("| dtype | concurrent | transformers, one at a time (tok/s) | omnistage (tok/s) | ratio |")
    print("|---|---|---|---|---|")
    for name in arguments.dtypes:
        measure(arguments, name)


if __name__ == "__main__":
    main()
