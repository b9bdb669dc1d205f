"""Builds the stage a pipeline names: finds its part, loads the model, wires the engine.

The only place that knows every stage kind; the kinds know nothing of one another.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omnistage.errors import PipelineError, WeightsError
from omnistage.models.registry import (
    PartSource,
    find_part,
    load_acoustic,
    load_decoder,
    load_encoder,
    load_vocoder,
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


def _load(context: StageContext, loader: Callable[..., Any], *, auto_dtype: str = "float32") -> Any:
    dtype = auto_dtype if context.spec.dtype == "auto" else context.spec.dtype
    device = context.spec.devices_of(context.replica)[0]
    return loader(_source(context), device=device, dtype=dtype, progress=context.progress)


def _encoder(context: StageContext) -> Stage:
    from omnistage.stages.encoder import EncoderStage

    return EncoderStage(context, _load(context, load_encoder))


def _generator(context: StageContext) -> Stage:
    from omnistage.stages.generator import GeneratorStage

    model = _load(context, load_acoustic)
    return GeneratorStage(context, model, frames_per_second=model.frame_rate)


def _vocoder(context: StageContext) -> Stage:
    from omnistage.stages.vocoder import VocoderStage

    return VocoderStage(context, _load(context, load_vocoder))


def _function(context: StageContext) -> Stage:
    from omnistage.stages.function import FunctionStage, load_callable

    if not context.spec.function:
        raise PipelineError(
            f"stage {context.spec.name!r} has no function; name one as package.module:callable"
        )
    return FunctionStage(context, load_callable(context.spec.function, context.spec.options))


def _llm(context: StageContext) -> Stage:
    from tokenizers import Tokenizer

    from omnistage.engine.engine import Engine, EngineConfig
    from omnistage.stages.llm import LlmStage, eos_ids

    source = _source(context)
    spec = context.spec
    stored = source.config.get("dtype") or source.config.get("torch_dtype") or "float32"
    model = _load(context, load_decoder, auto_dtype=str(stored))
    limit = int(source.config.get("max_position_embeddings") or 2048)
    config = EngineConfig(
        kv_bytes=spec.kv_cache,
        max_num_seqs=spec.max_num_seqs,
        max_num_batched_tokens=spec.max_num_batched_tokens,
        max_model_len=min(limit, spec.max_model_len or limit),
        enable_prefix_cache=spec.enable_prefix_cache,
    )
    tokenizer_path = source.directory / "tokenizer.json"
    if not tokenizer_path.is_file():
        raise WeightsError(f"{tokenizer_path} does not exist; an llm stage needs its tokenizer")
    generation = _read_json(source.directory / "generation_config.json")
    return LlmStage(
        context,
        Engine(model, config),
        Tokenizer.from_file(str(tokenizer_path)),
        eos_ids(source.config, generation),
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise WeightsError(f"{path} is not JSON ({error})") from error
    return content if isinstance(content, dict) else {}


_BUILDERS: dict[StageKind, Callable[[StageContext], Stage]] = {
    StageKind.ENCODER: _encoder,
    StageKind.LLM: _llm,
    StageKind.GENERATOR: _generator,
    StageKind.VOCODER: _vocoder,
    StageKind.FUNCTION: _function,
}
