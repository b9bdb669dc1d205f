"""Checks a pipeline before anything is loaded: settings, ports, shape of the graph, devices, bytes.

All problems are collected and reported together.  Reads no weights and imports no user code.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from omnistage.graph.budget import device_problems
from omnistage.graph.fields import Setting, hint
from omnistage.graph.ports import OUTPUT_PORTS, edge_ports, input_ports, output_ports, port_list
from omnistage.graph.problems import Path, Problem, pipeline_error
from omnistage.graph.spec import (
    EDGE_SETTINGS,
    PIPELINE_SETTINGS,
    STAGE_SETTINGS,
    EdgeSpec,
    PipelineSpec,
    StageSpec,
)
from omnistage.types import StageKind

SpecT = TypeVar("SpecT")


def validate(spec: PipelineSpec, *, device_memory: Mapping[str, int] | None = None) -> PipelineSpec:
    """Return the spec if nothing is wrong with it.

    device_memory: bytes of each device, added to (and overriding) the spec's own.
    Raises PipelineError that lists every problem.
    """
    problems = find_problems(spec, device_memory=device_memory)
    if problems:
        raise pipeline_error(str(spec.name), problems)
    return spec


def find_problems(spec: PipelineSpec, *, device_memory: Mapping[str, int] | None = None) -> list[Problem]:
    """Every problem, in the order of the file: settings first, then the graph, then devices."""
    problems: list[Problem] = []
    checked = _checked_values(spec, problems)
    problems += _edge_problems(checked)
    problems += _output_problems(checked)
    problems += _cycle_problems(checked)
    problems += _reach_problems(checked)
    problems += device_problems(checked, device_memory or {})
    return problems


def wrong_kind(setting: Setting, kind: str) -> str:
    """The message for a setting that this kind of stage, or mode of edge, does not take."""
    allowed = ", ".join(sorted(setting.kinds))
    if kind == "whole":
        return "only a stream has this setting; add stream: true or leave it out"
    return f"not a setting of kind {kind}; only of {allowed}: leave it out"


# --- values ---------------------------------------------------------------------------------


def _checked_values(spec: PipelineSpec, problems: list[Problem]) -> PipelineSpec:
    """The spec with bad values replaced by defaults, so that later checks can rely on their types."""
    spec = _checked(spec, PIPELINE_SETTINGS, (), problems)
    stages = {}
    for name, stage in spec.stages.items():
        path = ("stages", name)
        if stage.name != name:
            problems.append(Problem((*path, "name"), f"stage {stage.name!r} is listed under another name"))
        stages[name] = _checked(stage, STAGE_SETTINGS, path, problems, kind=_known_kind(stage))
        if stage.kind is StageKind.FUNCTION and not stage.function:
            message = "a function stage needs its callable: package.module:name or path/file.py:name"
            problems.append(Problem((*path, "function"), message))
    edges = [
        _checked(edge, EDGE_SETTINGS, ("edges", edge.name), problems, kind=edge.mode) for edge in spec.edges
    ]
    if any(stage.kind is not StageKind.FUNCTION for stage in stages.values()) and not spec.model:
        message = "the stages load parts of a model, but none is named; give a model"
        problems.append(Problem(("model",), message))
    return dataclasses.replace(spec, stages=stages, edges=tuple(edges))


def _known_kind(stage: StageSpec) -> str:
    """The kind, or "" if it is none: then no setting is held against it."""
    return stage.kind if stage.kind in tuple(StageKind) else ""


def _checked(
    part: SpecT, table: Mapping[str, Setting], path: Path, problems: list[Problem], *, kind: str = ""
) -> SpecT:
    replaced: dict[str, Any] = {}
    for setting in table.values():
        value = getattr(part, setting.name)
        if setting.kinds and value == setting.default:
            continue
        if kind and not setting.allows(kind):
            problems.append(Problem((*path, setting.name), wrong_kind(setting, kind)))
            continue
        if setting.default == "" and value == "":
            continue
        try:
            setting.parse(value)
        except ValueError as error:
            problems.append(Problem((*path, setting.name), str(error)))
            if not setting.is_required:
                replaced[setting.name] = setting.default
    return dataclasses.replace(part, **replaced) if replaced else part  # type: ignore[type-var]


# --- the graph ------------------------------------------------------------------------------


def _edge_problems(spec: PipelineSpec) -> Iterable[Problem]:
    counts = Counter(edge.name for edge in spec.edges)
    for edge in {edge.name: edge for edge in spec.edges}.values():
        path = ("edges", edge.name)
        ends = (edge.producer, edge.consumer)
        unknown = [name for name in dict.fromkeys(ends) if name not in spec.stages]
        for name in unknown:
            yield Problem(path, f"unknown stage {name!r}; {hint(name, spec.stages)}")
        if edge.producer == edge.consumer:
            yield Problem(path, "a stage cannot feed itself; an llm feeds back inside its own stage")
        elif not unknown:
            yield from _port_problems(spec, edge)
    for name, count in counts.items():
        if count > 1:
            yield Problem(("edges", name), f"given {count} times; keep one")
    for name, stage in spec.stages.items():
        if stage.kind is StageKind.VOCODER and not spec.edges_into(name):
            yield Problem(("stages", name), "a vocoder needs an edge from the stage that makes its frames")


def _port_problems(spec: PipelineSpec, edge: EdgeSpec) -> Iterable[Problem]:
    producer, consumer = spec.stages[edge.producer], spec.stages[edge.consumer]
    for setting in ("first_chunk", "chunk"):
        if getattr(edge, setting) is not None and consumer.kind is not StageKind.VOCODER:
            message = f"only an edge into a vocoder has chunks; {edge.consumer} is none: leave it out"
            yield Problem(("edges", edge.name, setting), message)
    if consumer.kind is StageKind.ENCODER:
        message = f"{edge.consumer} is an encoder and reads the request's media; no edge leads to it"
        yield Problem(("edges", edge.name), message)
    elif not edge_ports(producer, consumer):
        gives, takes = port_list(output_ports(producer)), port_list(input_ports(consumer))
        message = f"{edge.producer} gives {gives}, but {edge.consumer} takes {takes}"
        if StageKind.FUNCTION in (producer.kind, consumer.kind):
            message += "; a function's ports are set by inputs and outputs"
        yield Problem(("edges", edge.name), message)
    elif consumer.kind is StageKind.VOCODER and not edge.stream:
        message = "a vocoder takes an answer's frames sentence by sentence; add stream: true"
        yield Problem(("edges", edge.name), message)


def _output_problems(spec: PipelineSpec) -> Iterable[Problem]:
    if not spec.outputs:
        yield Problem(("outputs",), "no outputs; name at least one, for instance {text: STAGE}")
    if not spec.stages:
        yield Problem(("stages",), "no stages; a pipeline needs at least one")
    for output, name in spec.outputs.items():
        path = ("outputs", output)
        port = OUTPUT_PORTS.get(output)
        if port is None:
            yield Problem(path, f"unknown output; {hint(output, OUTPUT_PORTS)}")
        if name not in spec.stages:
            yield Problem(path, f"unknown stage {name!r}; {hint(str(name), spec.stages)}")
        elif port is not None and port not in output_ports(spec.stages[name]):
            able = [other for other, stage in spec.stages.items() if port in output_ports(stage)]
            gives = port_list(output_ports(spec.stages[name]))
            remedy = f"stages that do: {', '.join(able)}" if able else "no stage of the pipeline does"
            yield Problem(path, f"{name} gives {gives}, but {output} needs {port}; {remedy}")


def _cycle_problems(spec: PipelineSpec) -> Iterable[Problem]:
    """One problem per edge that closes a cycle in a depth-first search."""
    consumers: dict[str, list[str]] = {name: [] for name in spec.stages}
    for edge in {edge.name: edge for edge in spec.edges}.values():
        if edge.producer in consumers and edge.consumer in consumers and edge.producer != edge.consumer:
            consumers[edge.producer].append(edge.consumer)
    visited: set[str] = set()
    for start in consumers:
        trail = [] if start in visited else [start]
        branches = [iter(consumers[start])]
        visited.add(start)
        while trail:
            name = next(branches[-1], None)
            if name is None:
                trail.pop()
                branches.pop()
            elif name in trail:
                cycle = [*trail[trail.index(name) :], name]
                yield Problem(("edges",), f"cycle {' -> '.join(cycle)}; remove one of these edges")
            elif name not in visited:
                visited.add(name)
                trail.append(name)
                branches.append(iter(consumers[name]))


def _reach_problems(spec: PipelineSpec) -> Iterable[Problem]:
    wanted = {name for name in spec.outputs.values() if name in spec.stages}
    if not wanted:
        return
    producers: dict[str, list[str]] = {name: [] for name in spec.stages}
    for edge in spec.edges:
        if edge.producer in producers and edge.consumer in producers:
            producers[edge.consumer].append(edge.producer)
    needed = _reachable(producers, wanted)
    for name in spec.stages:
        if name not in needed:
            message = "no output is reached from this stage; connect it, or remove it"
            yield Problem(("stages", name), message)


def _reachable(neighbours: Mapping[str, list[str]], start: set[str]) -> set[str]:
    seen, pending = set(start), list(start)
    while pending:
        for name in neighbours[pending.pop()]:
            if name not in seen:
                seen.add(name)
                pending.append(name)
    return seen
