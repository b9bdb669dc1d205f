"""What a pipeline needs of each device, and how many requests it can hold, before anything loads.

Weights come from safetensors headers, the KV cache from config.json; workspace and runtime are
estimates and say so.  Knows nothing of how a stage computes beyond the bytes it must move.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from omnistage.errors import PipelineError
from omnistage.graph.budget import ranks_on
from omnistage.graph.checkpoint import LlmShape, read_headers, read_llm_shape
from omnistage.graph.fields import parse_bytes
from omnistage.graph.spec import PipelineSpec, StageSpec
from omnistage.types import StageKind

BLOCK_SIZE = 16  # tokens of a KV block
# A process of its own: 286 MiB of private memory after importing torch on a CPU (measured); a CUDA
# context and the libraries' own buffers take about half a GiB.
RUNTIME_BYTES = {"cpu": 300 * 1024**2, "cuda": 512 * 1024**2}
_MIN_WORKSPACE = 64 * 1024**2
_REMOTE = " (remote)"


@dataclass(frozen=True)
class Load:
    """Requests of a stated length.  prompt_tokens, answer_tokens: means per request.

    bandwidth: device -> bytes/s of memory reads, for the roofline; absent: no rates for that device.
    """

    prompt_tokens: int = 384
    answer_tokens: int = 128
    bandwidth: Mapping[str, float] = field(default_factory=dict)

    @property
    def mean_length(self) -> int:
        return self.prompt_tokens + self.answer_tokens


@dataclass(frozen=True)
class StageBytes:
    """One stage on one device, all its ranks there together.  All in bytes; limit: the stage's budget."""

    stage: str
    device: str
    ranks: int
    weights: int
    cache: int
    workspace: int
    runtime: int
    limit: int | None

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.workspace + self.runtime


@dataclass(frozen=True)
class LlmCapacity:
    """What one replica of an llm can hold and how fast it can be at best.

    tokens, blocks: of the KV cache.  concurrency: requests of the load's mean length that fit at once.
    Rates are upper bounds by memory bandwidth, None where that is unknown: single_rate and
    batch_rate in tokens/s (alone, and all concurrent requests together), request_rate in requests/s.
    """

    stage: str
    bytes_per_token: int
    tokens: int
    blocks: int
    concurrency: int
    single_rate: float | None
    batch_rate: float | None
    request_rate: float | None


@dataclass(frozen=True)
class Plan:
    """limits: device -> bytes, for devices whose size is known.  shared_memory: bytes, of each worker.

    problems: budgets that do not fit.
    """

    pipeline: str
    load: Load
    stages: tuple[StageBytes, ...]
    llms: tuple[LlmCapacity, ...]
    limits: Mapping[str, int]
    shared_memory: int
    problems: tuple[str, ...]

    @property
    def devices(self) -> dict[str, int]:
        """Device -> bytes that all stages need there."""
        totals: dict[str, int] = {}
        for row in self.stages:
            totals[row.device] = totals.get(row.device, 0) + row.total
        return totals


def plan_pipeline(
    spec: PipelineSpec,
    model_dir: Path,
    *,
    load: Load | None = None,
    device_memory: Mapping[str, int] | None = None,
) -> Plan:
    """Add up what each stage needs on each device.

    model_dir: a folder per part, with config.json and *.safetensors.  device_memory: bytes, over the
    spec's own; the machine's memory stands for "cpu" if neither says.
    Raises WeightsError if a part cannot be read.  What does not fit is in Plan.problems: see check_plan.
    """
    load = load or Load()
    limits = {"cpu": machine_memory(), **spec.device_memory, **(device_memory or {})}
    rows: list[StageBytes] = []
    llms: list[LlmCapacity] = []
    for name, stage in spec.stages.items():
        folder = model_dir / stage.part
        has_weights = stage.kind is not StageKind.FUNCTION
        tensors = read_headers(folder) if has_weights else {}
        weights = sum(tensor.loaded_bytes(stage.dtype) for tensor in tensors.values())
        weights = -(-weights // stage.tensor_parallel)
        cache = stage.encoder_cache if stage.kind is StageKind.ENCODER else 0
        workspace = max(_MIN_WORKSPACE, weights // 2) if has_weights else 0
        if stage.kind is StageKind.LLM:
            shape = read_llm_shape(folder)
            cache = stage.kv_cache
            workspace = llm_workspace(stage, shape)
            llms.append(_llm_capacity(name, stage, shape, weights=weights, load=load))
        for device in dict.fromkeys(stage.devices):
            ranks = ranks_on(stage, device)
            runtime = 0 if stage.colocate else RUNTIME_BYTES[device.partition(":")[0]]
            rows.append(
                StageBytes(
                    stage=name,
                    device=device + (_REMOTE if stage.placement == "remote" else ""),
                    ranks=ranks,
                    weights=weights * ranks,
                    cache=cache * ranks,
                    workspace=workspace * ranks,
                    runtime=runtime * ranks,
                    limit=None if stage.memory is None else stage.memory * ranks,
                )
            )
    problems = _budget_problems(rows, limits) + _length_problems(spec, llms)
    return Plan(spec.name, load, tuple(rows), tuple(llms), limits, spec.shared_memory, tuple(problems))


def check_plan(plan: Plan) -> Plan:
    """Return the plan if everything fits; raises PipelineError that names every budget that does not."""
    if plan.problems:
        raise PipelineError(f"pipeline {plan.pipeline!r} does not fit:\n  " + "\n  ".join(plan.problems))
    return plan


def kv_bytes_per_rank(stage: StageSpec, shape: LlmShape) -> int:
    """Bytes of one token's keys and values on one tensor-parallel rank, which holds a share of the heads."""
    heads = -(-shape.num_kv_heads // stage.tensor_parallel)
    return shape.kv_bytes_per_token(stage.dtype) // shape.num_kv_heads * heads


def llm_workspace(stage: StageSpec, shape: LlmShape) -> int:
    """An estimate in bytes: one layer's activations for a full step, and fp32 logits with their softmax."""
    size = 4 if (shape.dtype if stage.dtype == "auto" else stage.dtype) == "float32" else 2
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    row = 4 * shape.hidden_size + 3 * shape.intermediate_size + heads
    activations = stage.max_num_batched_tokens * row * size
    logits = stage.max_num_seqs * shape.vocab_size * 4 * 2
    return activations + logits


def machine_memory() -> int:
    """Bytes of this machine's main memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def measure_bandwidth(size: int = 128 * 1024**2) -> float:
    """Bytes/s that one thread reads and writes, the best of five copies of `size` bytes (about 0.1 s)."""
    source = np.ones(size, dtype=np.uint8)
    target = np.empty_like(source)
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        np.copyto(target, source)
        best = max(best, 2 * size / (time.perf_counter() - start))
    return best


def _llm_capacity(name: str, stage: StageSpec, shape: LlmShape, *, weights: int, load: Load) -> LlmCapacity:
    """Bounds for one replica.

    A decode step reads all weights once and the KV rows of every running request, so it takes at
    least (weights + requests * length * bytes_per_token) / bandwidth (the memory roofline of Williams,
    Waterman and Patterson, 2009).  Little's law (1961), requests = rate * time in the system, then
    turns the concurrency into a sustained rate of requests.
    """
    per_token = kv_bytes_per_rank(stage, shape)
    blocks = stage.kv_cache // (BLOCK_SIZE * per_token)
    blocks_each = -(-load.mean_length // BLOCK_SIZE)
    concurrency = min(stage.max_num_seqs, blocks // blocks_each)
    bandwidth = min((load.bandwidth.get(device, 0.0) for device in stage.devices_of(0)), default=0.0)
    single_rate = batch_rate = request_rate = None
    if bandwidth > 0:
        kv_read = (load.prompt_tokens + load.answer_tokens / 2) * per_token
        single_rate = bandwidth / (weights + kv_read)
        batch_rate = concurrency * bandwidth / (weights + concurrency * kv_read)
        time_in_system = load.answer_tokens * concurrency / batch_rate if concurrency else 0.0
        request_rate = concurrency / time_in_system if time_in_system else 0.0
    return LlmCapacity(
        stage=name,
        bytes_per_token=per_token,
        tokens=blocks * BLOCK_SIZE,
        blocks=blocks,
        concurrency=concurrency,
        single_rate=single_rate,
        batch_rate=batch_rate,
        request_rate=request_rate,
    )


def _budget_problems(rows: list[StageBytes], limits: Mapping[str, int]) -> list[str]:
    problems = []
    for row in rows:
        if row.limit is not None and row.total > row.limit:
            problems.append(
                f"stage {row.stage} needs {row.total} bytes ({size_text(row.total)}) on {row.device}, and its"
                f" memory is {size_text(row.limit)}; raise it, or lower kv_cache or max_num_batched_tokens"
            )
    for device, limit in limits.items():
        here = [row for row in rows if row.device == device]
        total = sum(row.total for row in here)
        if total > limit:
            largest = max(here, key=lambda row: row.total)
            problems.append(
                f"device {device} has {size_text(limit)}, but its stages need {total} bytes"
                f" ({size_text(total)}), most of it {largest.stage} ({largest.total} bytes,"
                f" {size_text(largest.total)}); lower its kv_cache or move a stage to another device"
            )
    return problems


def _length_problems(spec: PipelineSpec, llms: list[LlmCapacity]) -> list[str]:
    return [
        f"stage {llm.stage} holds {llm.tokens} tokens in a KV cache of"
        f" {size_text(spec.stages[llm.stage].kv_cache)}, fewer than its max_model_len {length};"
        f" raise kv_cache to {length * llm.bytes_per_token} bytes or lower max_model_len"
        for llm in llms
        if (length := spec.stages[llm.stage].max_model_len) is not None and llm.tokens < length
    ]


# --- the table ------------------------------------------------------------------------------


def render_plan(plan: Plan) -> str:
    """The plan as aligned text, for a terminal."""
    head = ["device", "stage", "ranks", "weights", "cache", "workspace*", "runtime*", "total", "limit"]
    rows = []
    for device, total in plan.devices.items():
        for row in (row for row in plan.stages if row.device == device):
            sizes = [row.weights, row.cache, row.workspace, row.runtime, row.total]
            limit = "" if row.limit is None else size_text(row.limit)
            rows.append([device, row.stage, str(row.ranks), *map(size_text, sizes), limit])
        limit = size_text(plan.limits[device]) if device in plan.limits else ""
        rows.append([device, "all", "", "", "", "", "", size_text(total), limit])
    text = _table(head, rows, num_left=2) + (
        f"* estimated; each worker may use up to {size_text(plan.shared_memory)} of shared memory besides,"
        " while tensors are under way\n"
    )
    if plan.llms:
        load = plan.load
        text += (
            f"\nRequests of {load.prompt_tokens} prompt and {load.answer_tokens} answer tokens, per replica;"
            " rates are upper bounds by memory bandwidth.\n"
        )
        head = [
            "stage",
            "KV bytes/token",
            "blocks",
            "tokens",
            "concurrent",
            "tok/s alone",
            "tok/s all",
            "req/s",
        ]
        text += _table(head, [_capacity_row(llm) for llm in plan.llms], num_left=1)
    return text


def size_text(size: int) -> str:
    """A size with three digits or so, for reading: "257 MiB"."""
    for unit in ("GiB", "MiB", "KiB"):
        scaled = size / parse_bytes(f"1{unit}")
        if scaled >= 1:
            return f"{scaled:.0f} {unit}" if scaled >= 100 else f"{scaled:.1f} {unit}"
    return f"{size} B"


def _capacity_row(llm: LlmCapacity) -> list[str]:
    rates = [llm.single_rate, llm.batch_rate, llm.request_rate]
    shown = ["-" if rate is None else f"{rate:.0f}" if rate >= 10 else f"{rate:.2f}" for rate in rates]
    counts = [llm.bytes_per_token, llm.blocks, llm.tokens, llm.concurrency]
    return [llm.stage, *map(str, counts), *shown]


def _table(head: list[str], rows: list[list[str]], *, num_left: int) -> str:
    """Columns padded to their widest cell, the first num_left to the left, the others to the right."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = []
    for row in [head, ["-" * width for width in widths], *rows]:
        cells = [
            cell.ljust(width) if column < num_left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines) + "\n"
