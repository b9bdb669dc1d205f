"""What the API needs to know of a pipeline, read from its graph and its workers' ready messages."""

from __future__ import annotations

from pathlib import Path

from omnistage.errors import InvalidRequest, PipelineError, WeightsError
from omnistage.graph import PipelineSpec
from omnistage.graph.spec import StageSpec, topological_order
from omnistage.models.files import read_settings
from omnistage.models.generation import checkpoint_sampling, overlay
from omnistage.models.registry import find_part
from omnistage.serving.dispatch import llm_stages
from omnistage.serving.replicas import ReplicaTable
from omnistage.serving.requests import BackendInfo
from omnistage.types import PortType, SamplingParams, Scalar, StageKind

Facts = dict[str, Scalar | list[str]]


def describe(spec: PipelineSpec, replicas: ReplicaTable, model_dir: str) -> BackendInfo:
    """Facts of the pipeline once its workers are ready; before, what the graph alone says.

    Raises WeightsError if the model's configuration is missing or unreadable.
    """
    facts: dict[str, Facts] = {
        stage: next((replica.info for replica in table if replica.info), {})
        for stage, table in replicas.by_stage.items()
    }
    stages = topological_order(spec)
    encoders = {
        modality: stage
        for stage in stages
        if spec.stages[stage].kind is StageKind.ENCODER
        for modality in _words(facts[stage].get("modalities"))
    }
    transcribers = [stage for stage in encoders.values() if facts[stage].get("output") == PortType.TEXT]
    speakers = [stage for stage in stages if spec.stages[stage].kind is StageKind.GENERATOR]
    llms = llm_stages(spec, stages)
    audio = spec.outputs.get("audio")
    model = Path(model_dir)
    prompt_directory = find_part(model, spec.stages[llms[0]].part).directory if llms else None
    return BackendInfo(
        model=spec.name,
        model_dir=model_dir,
        outputs=tuple(spec.outputs),
        prompt_directory=str(prompt_directory or ""),
        speech_entry=speakers[0] if speakers and audio else None,
        transcriber=transcribers[0] if transcribers else None,
        encoders=encoders,
        max_model_len=_integer(facts[llms[0]].get("max_model_len")) if llms else 0,
        voices=next(
            (voices for stage in (*speakers, *llms) if (voices := _words(facts[stage].get("voices")))), ()
        ),
        sample_rate=_integer(facts[audio].get("sample_rate")) if audio else 0,
        architecture=str(read_settings(model / "config.json").get("model_type") or ""),
        entry=llms[0] if llms else "",
        sampling=_sampling(prompt_directory, spec.stages[llms[0]]) if prompt_directory else {},
        llm_stages=llms,
    )


def check_sampling(spec: PipelineSpec) -> None:
    """Raises PipelineError for `sampling` of a stage that is out of range or no setting at all."""
    for name, stage in spec.stages.items():
        try:
            overlay(SamplingParams(), stage.sampling, param=f"stages.{name}.sampling")
        except InvalidRequest as error:
            raise PipelineError(f"pipeline {spec.name!r} cannot run: {error.message}") from error


def _sampling(directory: Path, stage: StageSpec) -> dict[str, Scalar]:
    """Defaults of the llm that reads the prompt, whose checkpoint is in `directory`."""
    found = checkpoint_sampling(directory)
    try:
        overlay(SamplingParams(), found, param="generation_config.json")
    except InvalidRequest as error:
        raise WeightsError(f"{directory}: {error.message}; mend the file") from error
    return {**found, **stage.sampling}


def _integer(value: Scalar | list[str] | None) -> int:
    return int(value) if isinstance(value, int | float) else 0


def _words(value: Scalar | list[str] | None) -> tuple[str, ...]:
    return tuple(value) if isinstance(value, list) else ()
