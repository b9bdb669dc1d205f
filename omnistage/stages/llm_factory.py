"""Builds llm stages: the engine, the model's own prompts, and for a talker the stage that speaks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

from omnistage.engine.engine import Engine, EngineConfig, EngineModel
from omnistage.errors import InvalidRequest, PipelineError, WeightsError
from omnistage.models.files import read_settings
from omnistage.models.generation import checkpoint_sampling, overlay
from omnistage.models.qwen3_code2wav_config import Code2WavConfig
from omnistage.models.qwen3_omni_positions import PositionRules
from omnistage.models.qwen3_omni_talker import SPEECH_SAMPLING, Talker
from omnistage.models.registry import PartSource
from omnistage.models.tokenizer_files import tokenizer_file
from omnistage.stages.llm import LlmStage, eos_ids
from omnistage.stages.prompts import PromptAdapter
from omnistage.stages.qwen3_prompt import Qwen3Prompts, Qwen3Rules
from omnistage.stages.stage import Stage, StageContext
from omnistage.stages.talker import TalkerRules, TalkerStage
from omnistage.types import SamplingParams, StageKind

DEFAULT_FRAMES_PER_SECOND = 12.5  # where no code2wav_config says; only urgency depends on it


def build_llm(context: StageContext, source: PartSource, model: EngineModel) -> Stage:
    """The stage for a loaded decoder.  Raises WeightsError or PipelineError with the remedy."""
    whole = read_settings(source.directory / "config.json")
    engine = Engine(model, _engine_config(context, source, model, whole))
    if isinstance(model, Talker):
        return TalkerStage(context, engine, model, _talker_rules(whole), _speech_sampling(context, source))
    tokenizer = Tokenizer.from_file(str(tokenizer_file(source.directory)))
    return LlmStage(context, engine, tokenizer, _ends(source, whole, tokenizer), _prompts(source, whole))


def _engine_config(
    context: StageContext, source: PartSource, model: EngineModel, whole: Mapping[str, Any]
) -> EngineConfig:
    spec = context.spec
    limit = model.config.max_position_embeddings
    return EngineConfig(
        kv_bytes=spec.kv_cache,
        max_num_seqs=spec.max_num_seqs,
        max_num_batched_tokens=spec.max_num_batched_tokens,
        # a long prompt leaves half of each step to others
        max_prefill_tokens_per_request=max(1, spec.max_num_batched_tokens // 2),
        max_model_len=min(limit, spec.max_model_len or limit),
        enable_prefix_cache=spec.enable_prefix_cache,
        capture_layer=_capture_layer(context, source, whole),
    )


def _capture_layer(context: StageContext, source: PartSource, whole: Mapping[str, Any]) -> int | None:
    """After how many layers the talker hears media; None if no llm follows that would."""
    if source.model_type != "qwen3_omni_moe_thinker" or not context.edges_to(StageKind.LLM):
        return None
    layer = (whole.get("talker_config") or {}).get("accept_hidden_layer")
    if layer is None:
        raise WeightsError(
            f"{source.directory / 'config.json'} lacks talker_config.accept_hidden_layer, which the "
            "thinker's talker needs; fetch the model again or leave the talker out"
        )
    return int(layer)


def _prompts(source: PartSource, whole: Mapping[str, Any]) -> PromptAdapter | None:
    if source.model_type == "qwen3_omni_moe_thinker":
        return Qwen3Prompts(Qwen3Rules.of_omni(whole))
    if source.model_type == "qwen3_vl_text":
        return Qwen3Prompts(Qwen3Rules.of_vl(whole))
    return None


def _ends(source: PartSource, whole: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[int, ...]:
    """From generation_config.json, config.json, or else the tokenizer's own end token."""
    generation = read_settings(source.directory / "generation_config.json")
    for values in (generation, source.config, whole):
        found = eos_ids(values)
        if found:
            return found
    name = read_settings(source.directory / "tokenizer_config.json").get("eos_token")
    content = name.get("content") if isinstance(name, dict) else name
    token_id = tokenizer.token_to_id(content) if isinstance(content, str) else None
    return () if token_id is None else (token_id,)


def _talker_rules(whole: Mapping[str, Any]) -> TalkerRules:
    try:
        return TalkerRules(
            positions=PositionRules.of_talker(whole),
            im_start_id=int(whole["im_start_token_id"]),
            user_id=int(whole["user_token_id"]),
            assistant_id=int(whole["assistant_token_id"]),
            pad_id=int(whole["tts_pad_token_id"]),
            frames_per_second=_frames_per_second(whole),
        )
    except KeyError as error:
        raise WeightsError(f"config.json lacks {error.args[0]!r}, which the talker needs") from error


def _frames_per_second(whole: Mapping[str, Any]) -> float:
    values = whole.get("code2wav_config")
    if not isinstance(values, dict):
        return DEFAULT_FRAMES_PER_SECOND
    config = Code2WavConfig.from_json(values)
    return config.sample_rate / config.hop


def _speech_sampling(context: StageContext, source: PartSource) -> SamplingParams:
    """The reference's defaults, the checkpoint's over them, and over those the pipeline's."""
    name = context.spec.name
    sampling = overlay(
        SPEECH_SAMPLING, checkpoint_sampling(source.directory, "talker_"), param="generation_config"
    )
    try:
        return overlay(sampling, context.spec.sampling, param=f"stages.{name}.sampling")
    except InvalidRequest as error:
        raise PipelineError(error.message) from error
