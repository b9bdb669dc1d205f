"""From a routed request to one Submit per stage.  Pure functions; sends nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from omnistage.graph import PipelineSpec
from omnistage.transport.messages import ORCHESTRATOR, Submit
from omnistage.types import Scalar, StageKind

if TYPE_CHECKING:
    from omnistage.serving.request_state import ActiveRequest

AUDIO_CREDITS = 32  # PCM chunks a client may leave unread before its vocoder pauses


def output_edges(spec: PipelineSpec, outputs: tuple[str, ...]) -> dict[str, str]:
    """Output edge ("@audio") -> the stage behind it; an output may also be a stage's own name."""
    return {f"@{name}": spec.outputs.get(name, name) for name in outputs}


def build_submits(spec: PipelineSpec, active: ActiveRequest) -> Iterator[tuple[str, Submit]]:
    """One Submit per stage of the route, consumers before producers."""
    request = active.request
    for stage in reversed(active.route.stages):
        outgoing = [edge for edge in active.route.edges if edge.producer == stage]
        incoming = [edge for edge in active.route.edges if edge.consumer == stage]
        wanted = [edge for edge, source in active.outputs.items() if source == stage]
        credits = {edge.name: edge.credits for edge in outgoing if edge.credits is not None}
        if spec.stages[stage].kind is StageKind.VOCODER:
            credits.update(dict.fromkeys(wanted, AUDIO_CREDITS))
        journal = tuple(active.journal.get(stage, ()))
        options: dict[str, Scalar] = dict(request.options)
        if journal and stage in active.finish_reasons:
            options["forced_finish"] = active.finish_reasons[stage].value
        yield (
            stage,
            Submit(
                key=active.key,
                seed=request.seed,
                sampling=request.sampling,
                stage_params=dict(request.stage_params.get(stage, {})),
                segments=request.segments if stage in active.llms[:1] else (),
                media=request.media.get(stage, ()),
                text=request.text if stage == request.entry else None,
                options=options,
                consumers={
                    **{edge.name: active.assigned[edge.consumer].address for edge in outgoing},
                    **dict.fromkeys(wanted, ORCHESTRATOR),
                },
                producers={edge.name: active.assigned[edge.producer].address for edge in incoming},
                forced_token_ids=journal,
                cache_salt=request.cache_salt,
                credits=credits,
                arrived=active.arrived,
            ),
        )


def llm_stages(spec: PipelineSpec, stages: tuple[str, ...]) -> tuple[str, ...]:
    """Those of `stages` that are llms, in the same order; the first on a route reads the prompt."""
    return tuple(stage for stage in stages if spec.stages[stage].kind is StageKind.LLM)
