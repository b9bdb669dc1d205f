"""What the API needs to know of a pipeline, read from its graph and its workers' ready messages."""

from __future__ import annotations

from pathlib import Path

from omnistage.graph import PipelineSpec
from omnistage.graph.spec import topological_order
from omnistage.models.registry import find_part
from omnistage.serving.dispatch import entry_stage
from omnistage.serving.replicas import ReplicaTable
from omnistage.serving.requests import BackendInfo
from omnistage.types import PortType, Scalar, StageKind

Facts = dict[str, Scalar | list[str]]


def describe(spec: PipelineSpec, replicas: ReplicaTable, model_dir: str) -> BackendInfo:
    """Facts of the pipeline once its workers are ready; before, what the graph alone says."""
    facts: dict[str, Facts] = {
        stage: next((replica.info for replica in table if replica.info), {})
        for stage, table in replicas.by_stage.items()
    }
    stages = topological_order(spec)
    encoders = {
        str(facts[stage]["modality"]): stage
        for stage in stages
        if spec.stages[stage].kind is StageKind.ENCODER and "modality" in facts[stage]
    }
    transcribers = [stage for stage in encoders.values() if facts[stage].get("output") == PortType.TEXT]
    speakers = [stage for stage in stages if spec.stages[stage].kind is StageKind.GENERATOR]
    llm = entry_stage(spec, stages)
    audio = spec.outputs.get("audio")
    return BackendInfo(
        model=spec.name,
        model_dir=model_dir,
        outputs=tuple(spec.outputs),
        prompt_directory=str(find_part(Path(model_dir), spec.stages[llm].part).directory) if llm else "",
        speech_entry=speakers[0] if speakers and audio else None,
        transcriber=transcribers[0] if transcribers else None,
        encoders=encoders,
        max_model_len=_integer(facts[llm].get("max_model_len")) if llm else 0,
        voices=_words(facts[speakers[0]].get("voices")) if speakers else (),
        sample_rate=_integer(facts[audio].get("sample_rate")) if audio else 0,
    )


def _integer(value: Scalar | list[str] | None) -> int:
    return int(value) if isinstance(value, int | float) else 0


def _words(value: Scalar | list[str] | None) -> tuple[str, ...]:
    return tuple(value) if isinstance(value, list) else ()
