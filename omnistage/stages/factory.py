"""Builds the stage a pipeline names: finds its part, loads the model, wires the engine.

The only place that knows every stage kind; the kinds know nothing of one another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from omnistage.errors import PipelineError
from omnistage.models.registry import (
    PartSource,
    find_part,
    load_acoustic,
    load_decoder,
    load_encoder,
    load_vocoder,
    stored_dtype,
)
from omnistage.stages.stage import Stage, StageContext
from omnistage.types import StageKind


def build_stage(context: StageContext) -> Stage:
    """Load the model of a stage and return the stage, ready to serve.

    Raises WeightsError or PipelineError with the remedy.
    """
    return _BUILDERS[context.spec.kind](context)


def _source(context: StageContext) -> PartSource:
    return find_part(context.model_dir, context.spec.part)


def _load(context: StageContext, source: PartSource, loader: Callable[..., Any]) -> Any:
    dtype = stored_dtype(source) if context.spec.dtype == "auto" else context.spec.dtype
    device = context.spec.devices_of(context.replica)[0]
    return loader(source, device=device, dtype=dtype, progress=context.progress)


def _encoder(context: StageContext) -> Stage:
    from omnistage.stages.encoder import EncoderStage

    return EncoderStage(context, _load(context, _source(context), load_encoder))


def _generator(context: StageContext) -> Stage:
    from omnistage.stages.generator import GeneratorStage

    model = _load(context, _source(context), load_acoustic)
    return GeneratorStage(context, model, frames_per_second=model.frame_rate)


def _vocoder(context: StageContext) -> Stage:
    from omnistage.stages.vocoder import VocoderStage

    return VocoderStage(context, _load(context, _source(context), load_vocoder))


def _function(context: StageContext) -> Stage:
    from omnistage.stages.function import FunctionStage, load_callable

    if not context.spec.function:
        raise PipelineError(
            f"stage {context.spec.name!r} has no function; name one as package.module:callable"
        )
    return FunctionStage(context, load_callable(context.spec.function, context.spec.options))


def _llm(context: StageContext) -> Stage:
    from omnistage.stages.llm_factory import build_llm

    source = _source(context)
    return build_llm(context, source, _load(context, source, load_decoder))


_BUILDERS: dict[StageKind, Callable[[StageContext], Stage]] = {
    StageKind.ENCODER: _encoder,
    StageKind.LLM: _llm,
    StageKind.GENERATOR: _generator,
    StageKind.VOCODER: _vocoder,
    StageKind.FUNCTION: _function,
}
