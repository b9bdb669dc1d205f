"""What a pipeline needs of each device, and how many requests it can hold, before anything loads.

Weights come from safetensors headers, the KV cache from config.json; workspace and runtime are
estimates and say so.  Knows nothing of how a stage computes beyond the bytes it must move.
As text: omnistage.graph.plan_table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from omnistage.errors import PipelineError
from omnistage.graph.budget import ranks_on
from omnistage.graph.checkpoint import LlmShape, TensorInfo, llm_shape, main_dtype, read_headers
from omnistage.graph.fields import size_text
from omnistage.graph.kv_sizes import BLOCK_SIZE
from omnistage.graph.machine import machine_memory
from omnistage.graph.parts import PartFiles, PartWeights, part_weights
from omnistage.graph.spec import PipelineSpec, StageSpec
from omnistage.types import StageKind

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

    bytes_per_token: of keys and values.  exported_per_token: bytes of hidden states that it sends to
    another llm for a row of a picture or of sound, 0 without one.
    tokens, blocks: of the KV cache.  concurrency: requests of the load's mean length that fit at once.
    read_per_step: bytes of weights that a step of one request reads; see PartWeights.read_by_step.
    Rates are upper bounds by memory bandwidth, None where that is unknown: single_rate and
    batch_rate in tokens/s (alone, and all concurrent requests together), request_rate in requests/s.
    """

    stage: str
    bytes_per_token: int
    exported_per_token: int
    max_model_len: int
    tokens: int
    blocks: int
    concurrency: int
    read_per_step: int
    single_rate: float | None
    batch_rate: float | None
    request_rate: float | None

    @property
    def held_per_token(self) -> int:
        """Bytes of the KV cache that one token takes: exported hidden states lie beside keys and values."""
        return self.bytes_per_token + self.exported_per_token


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
    parts: Mapping[str, PartFiles],
    *,
    load: Load | None = None,
    device_memory: Mapping[str, int] | None = None,
) -> Plan:
    """Add up what each stage needs on each device.

    parts: where each stage's part is, for all but function stages.  device_memory: bytes, over the spec's
    own; the machine's memory stands for "cpu" if neither says.
    Raises WeightsError if a part cannot be read.  What does not fit is in Plan.problems: see check_plan.
    """
    load = load or Load()
    limits = {"cpu": machine_memory(), **spec.device_memory, **(device_memory or {})}
    headers = {folder: read_headers(folder) for folder in {files.folder for files in parts.values()}}
    rows: list[StageBytes] = []
    llms: list[LlmCapacity] = []
    for name, stage in spec.stages.items():
        files = parts.get(name)
        weights = PartWeights()
        cache = workspace = 0
        if files is not None:
            is_llm = stage.kind is StageKind.LLM
            weights = part_weights(files, headers[files.folder], stage.dtype, is_llm=is_llm)
            workspace = max(_MIN_WORKSPACE, weights.held // 2)
        if stage.kind is StageKind.ENCODER:
            cache = stage.encoder_cache
        if stage.kind is StageKind.LLM and files is not None:
            shape = shape_of(files, headers[files.folder])
            exported = exported_bytes(spec, name, shape)
            cache = stage.kv_cache
            workspace = llm_workspace(stage, shape) + stage.max_num_batched_tokens * exported
            llms.append(_llm_capacity(stage, shape, weights, exported=exported, load=load))
        rows += _rows(stage, -(-weights.held // stage.tensor_parallel), cache, workspace)
    problems = _budget_problems(rows, limits) + _length_problems(spec, llms)
    return Plan(spec.name, load, tuple(rows), tuple(llms), limits, spec.shared_memory, tuple(problems))


def _rows(stage: StageSpec, weights: int, cache: int, workspace: int) -> list[StageBytes]:
    """One stage on each of its devices.  The sizes are of one rank."""
    rows = []
    for device in dict.fromkeys(stage.devices):
        ranks = ranks_on(stage, device)
        runtime = 0 if stage.colocate else RUNTIME_BYTES[device.partition(":")[0]]
        rows.append(
            StageBytes(
                stage=stage.name,
                device=device + (_REMOTE if stage.placement == "remote" else ""),
                ranks=ranks,
                weights=weights * ranks,
                cache=cache * ranks,
                workspace=workspace * ranks,
                runtime=runtime * ranks,
                limit=None if stage.memory is None else stage.memory * ranks,
            )
        )
    return rows


def check_plan(plan: Plan) -> Plan:
    """Return the plan if everything fits; raises PipelineError that names every budget that does not."""
    if plan.problems:
        raise PipelineError(f"pipeline {plan.pipeline!r} does not fit:\n  " + "\n  ".join(plan.problems))
    return plan


def shape_of(files: PartFiles, headers: Mapping[str, TensorInfo]) -> LlmShape:
    """The decoder's sizes.  headers: all tensors of the folder.  Raises WeightsError."""
    own = {name: tensor for name, tensor in headers.items() if name.startswith(files.prefixes)}
    dtype = main_dtype(own) if files.dtype == "auto" else files.dtype
    return llm_shape(files.config, files.folder / "config.json", dtype=dtype)


def exported_bytes(spec: PipelineSpec, name: str, shape: LlmShape) -> int:
    """Bytes of one row's hidden state, if another llm hears this one's; otherwise 0."""
    consumers = [spec.stages[edge.consumer].kind for edge in spec.edges_out_of(name)]
    if StageKind.LLM not in consumers:
        return 0
    return shape.hidden_size * shape.value_bytes(spec.stages[name].dtype)


def kv_bytes_per_rank(stage: StageSpec, shape: LlmShape) -> int:
    """Bytes of one token's keys and values on one tensor-parallel rank, which holds a share of the heads."""
    heads = -(-shape.num_kv_heads // stage.tensor_parallel)
    return shape.kv_bytes_per_token(stage.dtype) // shape.num_kv_heads * heads


def llm_workspace(stage: StageSpec, shape: LlmShape) -> int:
    """An estimate in bytes: one layer's activations for a full step, and fp32 logits with their softmax."""
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    row = 4 * shape.hidden_size + 3 * shape.mlp_size + heads
    activations = stage.max_num_batched_tokens * row * shape.value_bytes(stage.dtype)
    logits = stage.max_num_seqs * shape.vocab_size * 4 * 2
    return activations + logits


def _llm_capacity(
    stage: StageSpec, shape: LlmShape, weights: PartWeights, *, exported: int, load: Load
) -> LlmCapacity:
    """Bounds for one replica.

    A decode step reads its weights (PartWeights.read_by_step) and the KV rows of every running request,
    so it takes at least (weights + requests * length * bytes_per_token) / bandwidth (the memory roofline
    of Williams, Waterman and Patterson, 2009).  Little's law (1961), requests = rate * time in the
    system, then turns the concurrency into a sustained rate of requests.
    """
    per_token = kv_bytes_per_rank(stage, shape)
    blocks = stage.kv_cache // (BLOCK_SIZE * (per_token + exported))
    blocks_each = -(-load.mean_length // BLOCK_SIZE)
    concurrency = min(stage.max_num_seqs, blocks // blocks_each)
    bandwidth = min((load.bandwidth.get(device, 0.0) for device in stage.devices_of(0)), default=0.0)
    alone, together = (
        -(-weights.read_by_step(count) // stage.tensor_parallel) for count in (1, max(1, concurrency))
    )
    single_rate = batch_rate = request_rate = None
    if bandwidth > 0:
        kv_read = (load.prompt_tokens + load.answer_tokens / 2) * per_token
        single_rate = bandwidth / (alone + kv_read)
        batch_rate = concurrency * bandwidth / (together + concurrency * kv_read)
        time_in_system = load.answer_tokens * concurrency / batch_rate if concurrency else 0.0
        request_rate = concurrency / time_in_system if time_in_system else 0.0
    return LlmCapacity(
        stage=stage.name,
        bytes_per_token=per_token,
        exported_per_token=exported,
        max_model_len=min(shape.max_model_len, stage.max_model_len or shape.max_model_len),
        tokens=blocks * BLOCK_SIZE,
        blocks=blocks,
        concurrency=concurrency,
        read_per_step=alone,
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
        f" raise kv_cache to {length * llm.held_per_token} bytes or lower max_model_len"
        for llm in llms
        if (length := spec.stages[llm.stage].max_model_len) is not None and llm.tokens < length
    ]
