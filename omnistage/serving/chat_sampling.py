"""A chat body's sampling: the request's own fields, over the pipeline's and the checkpoint's defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omnistage.errors import ContextOverflow, InvalidRequest
from omnistage.models.generation import overlay
from omnistage.serving.chat_protocol import ChatCompletionRequest
from omnistage.serving.protocol import nearest
from omnistage.serving.requests import BackendInfo
from omnistage.types import SamplingParams, Scalar, Segment, TokenSegment

StageParams = Mapping[str, Mapping[str, Scalar]]


def stage_settings(info: BackendInfo, body: ChatCompletionRequest) -> dict[str, dict[str, Scalar]]:
    """`stage_params`, checked; null means that nothing is set.

    Raises InvalidRequest for a stage that is no llm of the pipeline, and for what is no setting.
    """
    checked: dict[str, dict[str, Scalar]] = {}
    for stage, settings in (body.stage_params or {}).items():
        param = f"stage_params.{stage[:80]}"
        if stage not in info.llm_stages:
            raise InvalidRequest(
                f"'{param}' names no stage that samples{nearest(stage, info.llm_stages)}",
                code="unknown_parameter",
                param=param,
            )
        given = {name: value for name, value in settings.items() if value is not None}
        params = overlay(SamplingParams(), given, param=param)
        checked[stage] = {name: getattr(params, name) for name in given}
    return checked


def answer_sampling(
    info: BackendInfo,
    body: ChatCompletionRequest,
    own: Mapping[str, Scalar],
    segments: Sequence[Segment],
    *,
    seed: int,
    vocab_size: int,
) -> SamplingParams:
    """How the llm that reads the prompt samples.

    own: its entry in `stage_settings`, which goes before the body's fields.  seed: where `own` has none.
    vocab_size: what token ids must be below.  Raises InvalidRequest or ContextOverflow.
    """
    logit_bias = {int(token_id): bias for token_id, bias in (body.logit_bias or {}).items()}
    _check_ids("logit_bias", list(logit_bias), vocab_size)
    _check_ids("stop_token_ids", body.stop_token_ids or [], vocab_size)
    given = {
        "temperature": body.temperature,
        "top_k": body.top_k,
        "top_p": body.top_p,
        "min_p": body.min_p,
        "repetition_penalty": body.repetition_penalty,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "max_tokens": body.max_completion_tokens or body.max_tokens,
        "min_tokens": body.min_tokens,
    }
    asked: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    asked.update(own)
    base = SamplingParams(
        logit_bias=logit_bias,
        stop=body.stop_strings,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        seed=seed,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )
    usual = {name: value for name, value in info.sampling.items() if name != "seed" or body.seed is None}
    asked["max_tokens"] = answer_budget(
        segments,
        info.max_model_len,
        asked=asked.get("max_tokens"),
        usual=int(usual["max_tokens"]) if "max_tokens" in usual else None,
    )
    params = overlay(overlay(base, usual, param="sampling"), asked, param="sampling")
    if params.min_tokens > params.max_tokens:
        raise InvalidRequest(
            f"'min_tokens' ({params.min_tokens}) exceeds the answer's limit of {params.max_tokens} tokens",
            code="invalid_value",
            param="min_tokens",
        )
    return params


def answer_budget(
    segments: Sequence[Segment], max_model_len: int, *, asked: int | None, usual: int | None = None
) -> int:
    """The answer's largest length in tokens, as far as it is known before media are encoded.

    asked: by the request.  usual: what it is otherwise, if the context holds that; else all it holds.
    Every media item counts as one token here; the llm stage knows its true length and ends the answer
    where the context ends.  Raises ContextOverflow if prompt and `asked` do not fit.
    """
    num_prompt_tokens = sum(
        len(segment.token_ids) if isinstance(segment, TokenSegment) else 1 for segment in segments
    )
    room = max_model_len - num_prompt_tokens
    if room < 1 or (asked is not None and asked > room):
        raise ContextOverflow(
            f"the prompt has {num_prompt_tokens} tokens and the answer asks for {asked or 'at least 1'}, "
            f"the context holds {max_model_len}; shorten the messages or the answer",
            param="messages" if room < 1 else "max_completion_tokens",
        )
    return min(room, usual or room) if asked is None else asked


def _check_ids(param: str, token_ids: Sequence[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(
                f"'{param}' names token {token_id}, the vocabulary has {vocab_size}",
                code="invalid_value",
                param=param,
            )
