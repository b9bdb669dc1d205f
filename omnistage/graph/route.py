"""Which stages take part in one request.

A stage runs only if it lies between something the request brings and something it asks for, so a
text-only request never wakes a talker or a vocoder.  Knows stages, not their replicas.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from omnistage.errors import InvalidRequest
from omnistage.graph.fields import hint
from omnistage.graph.spec import EdgeSpec, PipelineSpec, topological_order
from omnistage.types import StageKind


@dataclass(frozen=True)
class Route:
    """stages: in topological order.  edges: those between them, in the order of the spec.

    outputs: wanted name -> stage that makes it.  entry: the stage that gets the request's prompt or
    text (None if media alone feed the route).
    """

    stages: tuple[str, ...]
    edges: tuple[EdgeSpec, ...]
    outputs: Mapping[str, str]
    entry: str | None

    def edges_into(self, stage: str) -> tuple[EdgeSpec, ...]:
        return tuple(edge for edge in self.edges if edge.consumer == stage)

    def edges_out_of(self, stage: str) -> tuple[EdgeSpec, ...]:
        return tuple(edge for edge in self.edges if edge.producer == stage)


def plan_route(
    spec: PipelineSpec,
    *,
    inputs: Collection[str],
    outputs: Sequence[str],
    entry: str | None = None,
) -> Route:
    """The stages of one request.

    inputs: encoder stages that have media in it; others stay out.  outputs: names of pipeline outputs,
    or of stages whose own output is wanted.  entry: the stage at which given text enters; what lies
    upstream of it is cut.  spec must be valid.
    Raises InvalidRequest if a name is unknown, an output cannot be reached or media would be ignored.
    """
    wanted = _wanted_stages(spec, outputs)
    _check_names(spec, inputs, entry)
    needed = _needed_stages(spec, wanted.values(), inputs, entry)
    order = topological_order(spec)
    alive: set[str] = set()
    for name in order:
        if name in needed:
            fed = any(edge.producer in alive for edge in spec.edges_into(name)) and name != entry
            if fed or _starts(spec, name, inputs, entry):
                alive.add(name)
    for output, name in wanted.items():
        if name not in alive:
            raise InvalidRequest(_unreached(spec, output, name, entry), param="modalities")
    for name in inputs:
        if name not in alive:
            wants = ", ".join(outputs)
            raise InvalidRequest(
                f"the media for stage {name!r} cannot reach the wanted output {wants}; leave the media out"
            )
    stages = tuple(name for name in order if name in alive)
    edges = tuple(
        edge
        for edge in spec.edges
        if edge.producer in alive and edge.consumer in alive and edge.consumer != entry
    )
    return Route(stages, edges, wanted, entry or _prompt_stage(spec, stages, edges))


def _wanted_stages(spec: PipelineSpec, outputs: Sequence[str]) -> dict[str, str]:
    if not outputs:
        raise InvalidRequest(
            f"no output is wanted; ask for one of {', '.join(spec.outputs)}", param="modalities"
        )
    wanted = {}
    for output in outputs:
        name = spec.outputs.get(output, output)
        if name not in spec.stages:
            known = [*spec.outputs, *spec.stages]
            message = f"pipeline {spec.name!r} has no output {output!r}; {hint(output, known)}"
            raise InvalidRequest(message, param="modalities")
        wanted[output] = name
    return wanted


def _check_names(spec: PipelineSpec, inputs: Collection[str], entry: str | None) -> None:
    encoders = [name for name, stage in spec.stages.items() if stage.kind is StageKind.ENCODER]
    for name in inputs:
        if name not in encoders:
            raise InvalidRequest(f"pipeline {spec.name!r} has no encoder {name!r}; {hint(name, encoders)}")
    if entry is not None and entry not in spec.stages:
        raise InvalidRequest(f"pipeline {spec.name!r} has no stage {entry!r}; {hint(entry, spec.stages)}")


def _needed_stages(
    spec: PipelineSpec, wanted: Collection[str], inputs: Collection[str], entry: str | None
) -> set[str]:
    """Everything upstream of the wanted stages, not past `entry`, without encoders that have no media."""
    needed: set[str] = set()
    pending = list(wanted)
    while pending:
        name = pending.pop()
        is_idle = spec.stages[name].kind is StageKind.ENCODER and name not in inputs
        if name in needed or is_idle:
            continue
        needed.add(name)
        if name != entry:
            pending += [edge.producer for edge in spec.edges_into(name)]
    return needed


def _starts(spec: PipelineSpec, name: str, inputs: Collection[str], entry: str | None) -> bool:
    """Whether the request itself feeds the stage: media, a prompt, or the given text."""
    kind = spec.stages[name].kind
    if kind is StageKind.ENCODER:
        return name in inputs
    if entry is not None:
        return name == entry
    if kind is StageKind.LLM:
        return all(_is_encoder_side(spec, edge.producer) for edge in spec.edges_into(name))
    return kind in (StageKind.GENERATOR, StageKind.FUNCTION) and not spec.edges_into(name)


def _is_encoder_side(spec: PipelineSpec, name: str) -> bool:
    """Whether only encoders lie upstream of the stage: an llm behind it may do without it."""
    if spec.stages[name].kind is StageKind.ENCODER:
        return True
    edges = spec.edges_into(name)
    return bool(edges) and all(_is_encoder_side(spec, edge.producer) for edge in edges)


def _prompt_stage(spec: PipelineSpec, stages: Sequence[str], edges: Sequence[EdgeSpec]) -> str | None:
    for name in stages:
        if spec.stages[name].kind is StageKind.LLM:
            return name
    fed = {edge.consumer for edge in edges}
    starts = [name for name in stages if name not in fed and spec.stages[name].kind is not StageKind.ENCODER]
    return starts[0] if starts else None


def _unreached(spec: PipelineSpec, output: str, name: str, entry: str | None) -> str:
    if spec.stages[name].kind is StageKind.ENCODER:
        return f"output {output!r} needs media for stage {name!r}, and the request has none; add it"
    if entry is not None:
        return f"output {output!r} is not reached from stage {entry!r}; start further upstream"
    return f"output {output!r} is not reached from the request's prompt and media; add what it needs"
