"""What the API hands to the orchestrator, and what comes back.  Knows neither HTTP nor transport."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from omnistage.types import (
    FinishReason,
    Media,
    SamplingParams,
    Scalar,
    Segment,
    StageTiming,
    TokenLogprob,
    Usage,
)


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """One request, already parsed and tokenised.

    outputs: names of pipeline outputs ("text", "audio"), or of a stage whose own output is wanted
    (a transcription wants the hearing stage).  segments: the prompt of the pipeline's entry llm.
    media: per encoder stage.  text: said as given by the stage `entry` (speech without a thinker).
    options: per-request settings stages read ("voice", "speed").
    stage_params: stage -> its settings for this request, by names of SamplingParams' fields; of llms that
    do not read the prompt (`sampling` is for the one that does).
    """

    request_id: str
    outputs: tuple[str, ...]
    segments: tuple[Segment, ...] = ()
    media: Mapping[str, tuple[Media, ...]] = field(default_factory=dict)
    entry: str | None = None
    text: str | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    options: Mapping[str, Scalar] = field(default_factory=dict)
    stage_params: Mapping[str, Mapping[str, Scalar]] = field(default_factory=dict)
    cache_salt: str = ""


@dataclass(frozen=True)
class TextDelta:
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, eq=False)
class AudioDelta:
    """pcm: float32 mono in [-1, 1], [num_samples].  sample_rate: Hz."""

    pcm: NDArray[np.float32]
    sample_rate: int


@dataclass(frozen=True)
class Done:
    """The last event of every successful request.

    finish_reason, usage: of the llm that reads the prompt; without one, usage is that of all stages.
    audio_tokens: what other llms made, in their own units (a talker's codec frames).
    truncated: those of them that ended at their length limit.
    """

    finish_reason: FinishReason
    usage: Usage
    timings: tuple[StageTiming, ...] = ()
    arrived: float = 0.0  # time.monotonic()
    replays: int = 0
    audio_tokens: int = 0
    truncated: tuple[str, ...] = ()


Event = TextDelta | AudioDelta | Done


class RequestStream(Protocol):
    """Iterate for events; ends after Done or raises one OmnistageError.  Always aclose() it: that aborts."""

    request_id: str

    def __aiter__(self) -> AsyncIterator[Event]: ...

    async def aclose(self) -> None: ...


@dataclass(frozen=True)
class BackendInfo:
    """Facts the API needs, known once every stage is ready.

    prompt_directory: holds the tokenizer and chat template of the llm that reads the prompt.
    max_model_len: tokens of prompt and answer.  encoders: modality ("image", "audio", "video") -> stage.
    architecture: model_type of the model's config.json, "" where it has none.
    entry: the llm that reads the prompt, "" without one.  sampling: its defaults, by names of
    SamplingParams' fields: the checkpoint's, and over them the pipeline's.
    llm_stages: every llm of the pipeline, which stage_params may name.
    """

    model: str
    model_dir: str
    outputs: tuple[str, ...]
    prompt_directory: str
    speech_entry: str | None
    transcriber: str | None
    encoders: Mapping[str, str]
    max_model_len: int
    voices: tuple[str, ...]
    sample_rate: int
    architecture: str = ""
    entry: str = ""
    sampling: Mapping[str, Scalar] = field(default_factory=dict)
    llm_stages: tuple[str, ...] = ()


class Backend(Protocol):
    """The orchestrator as the HTTP layer sees it."""

    @property
    def is_ready(self) -> bool: ...

    @property
    def info(self) -> BackendInfo: ...

    def submit(self, request: GenerateRequest) -> RequestStream:
        """Raises Overloaded, Draining or InvalidRequest at once; never blocks."""

    def gauges(self) -> Mapping[str, Mapping[str, float]]:
        """Per stage: numbers for /metrics and the page (queue, running, kv_blocks_used, ...)."""
