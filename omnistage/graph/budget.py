"""Which stages use which devices and how many bytes they ask for there; finds what cannot work.

Uses the budgets a pipeline states; the bytes that weights really need are omnistage.graph.plan's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from omnistage.graph.fields import DEVICE_PATTERN, format_bytes, hint
from omnistage.graph.problems import Problem
from omnistage.graph.spec import PipelineSpec, StageSpec
from omnistage.types import StageKind


def device_problems(spec: PipelineSpec, device_memory: Mapping[str, int]) -> Iterable[Problem]:
    """Device clashes and budgets that do not fit.  device_memory: bytes, overriding the spec's."""
    for name, stage in spec.stages.items():
        yield from _stage_problems(name, stage)
        yield from _colocation_problems(spec, name, stage)
    yield from _group_problems(spec)
    yield from _budget_problems(spec, {**spec.device_memory, **device_memory})


def stated_bytes(stage: StageSpec) -> int:
    """What one rank of the stage is known to need on its device before its weights are read."""
    if stage.memory is not None:
        return stage.memory
    return stage.kv_cache if stage.kind is StageKind.LLM else 0


def ranks_on(stage: StageSpec, device: str) -> int:
    """How many worker ranks of the stage sit on the device, over all replicas."""
    return sum(stage.devices_of(replica).count(device) for replica in range(stage.replicas))


def _stage_problems(name: str, stage: StageSpec) -> Iterable[Problem]:
    path = ("stages", name, "devices")
    size, count = stage.tensor_parallel, len(stage.devices)
    if any(re.fullmatch(DEVICE_PATTERN, device) is None for device in stage.devices):
        return  # reported with the value
    if count not in (size, size * stage.replicas) and stage.devices != ("cpu",):
        either = f"{size} (shared by its replicas) or {size * stage.replicas} (a group for each)"
        expected = either if stage.replicas > 1 else str(size)
        yield Problem(
            path,
            f"{count} devices for tensor_parallel {size} and {stage.replicas} replicas; list {expected}",
        )
        return
    for replica in range(stage.replicas):
        group = stage.devices_of(replica)
        gpus = [device for device in group if device != "cpu"]
        if gpus and len(gpus) < len(group):
            yield Problem(path, f"group {', '.join(group)} mixes cpu and cuda; use one sort")
        elif len(set(gpus)) < len(gpus):
            yield Problem(path, f"group {', '.join(group)} names a device twice; use one device per rank")
    if stage.kind is StageKind.LLM:
        yield from _llm_problems(name, stage)


def _llm_problems(name: str, stage: StageSpec) -> Iterable[Problem]:
    kv_cache, memory = stage.kv_cache, stage.memory
    if memory is not None and kv_cache >= memory:
        message = (
            f"{format_bytes(kv_cache)} leaves nothing for weights in memory {format_bytes(memory)};"
            " lower kv_cache or raise memory"
        )
        yield Problem(("stages", name, "kv_cache"), message)
    if stage.max_num_batched_tokens < stage.max_num_seqs:
        message = (
            f"{stage.max_num_batched_tokens} is less than max_num_seqs {stage.max_num_seqs}, and each"
            " running request needs a token of every step; raise it or lower max_num_seqs"
        )
        yield Problem(("stages", name, "max_num_batched_tokens"), message)


def _colocation_problems(spec: PipelineSpec, name: str, stage: StageSpec) -> Iterable[Problem]:
    path = ("stages", name, "colocate")
    if stage.colocate is None:
        return
    host = spec.stages.get(stage.colocate)
    if host is None:
        yield Problem(path, f"unknown stage {stage.colocate!r}; {hint(stage.colocate, spec.stages)}")
    elif stage.colocate == name:
        yield Problem(path, "a stage always shares its own processes; leave it out")
    elif host.colocate is not None:
        yield Problem(path, f"{stage.colocate} itself shares the processes of {host.colocate}; name that")
    elif "remote" in (stage.placement, host.placement):
        message = f"a worker that joins serves one stage, and {stage.colocate} or this one is placed remote"
        yield Problem(path, f"{message}; leave colocate out, or the placement of both")
    else:
        for setting in ("replicas", "threads"):
            ours, theirs = getattr(stage, setting), getattr(host, setting)
            if ours != theirs:
                here, there = ("left out" if value is None else value for value in (ours, theirs))
                message = f"{setting} {here} here, {there} at {stage.colocate}; make them equal"
                yield Problem(path, message)
        if not set(stage.devices) <= set(host.devices):
            message = f"{', '.join(stage.devices)} is not among the devices of {stage.colocate}"
            yield Problem(path, f"{message} ({', '.join(host.devices)}); use those")


def _group_problems(spec: PipelineSpec) -> Iterable[Problem]:
    """Tensor-parallel groups that share some devices but not all can wait for each other forever."""
    groups: list[tuple[str, frozenset[str]]] = []
    for name, stage in spec.stages.items():
        if stage.tensor_parallel < 2:
            continue
        for replica in range(stage.replicas):
            group = frozenset(stage.devices_of(replica)) - {"cpu"}
            for other, taken in groups:
                if group & taken and group != taken:
                    message = (
                        f"group {', '.join(sorted(group))} shares only part of {other}'s group"
                        f" {', '.join(sorted(taken))}; use the same devices or other ones"
                    )
                    yield Problem(("stages", name, "devices"), message)
            groups.append((name, group))


def _budget_problems(spec: PipelineSpec, limits: Mapping[str, int]) -> Iterable[Problem]:
    for device, limit in limits.items():
        shares = {
            name: stated_bytes(stage) * ranks_on(stage, device)
            for name, stage in spec.stages.items()
            if stated_bytes(stage) * ranks_on(stage, device)
        }
        total = sum(shares.values())
        if total > limit:
            parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in shares.items())
            message = (
                f"the stages ask for {format_bytes(total)} of {device} ({parts}), which has"
                f" {format_bytes(limit)}; lower their memory or kv_cache, or move a stage"
            )
            yield Problem(("device_memory", device), message)
