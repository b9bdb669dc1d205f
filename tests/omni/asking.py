"""Qwen3-Omni's pipeline over a small checkpoint in this process, and the questions it is asked.

The questions are those of tests.models.qwen3_reference, as a client brings them: files and segments.
"""

from __future__ import annotations

import asyncio
import functools
import io
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from PIL import Image
from torch import Tensor

from omnistage.graph import Graph, PipelineSpec
from omnistage.serving.launch import LaunchOptions, Pipeline, start_pipeline
from omnistage.serving.requests import AudioDelta, Done, GenerateRequest, TextDelta
from omnistage.types import Media, MediaSegment, MergedSegment, SamplingParams, Segment, TokenSegment
from tests.models.qwen3_reference import MAX_CODES, MAX_TOKENS, load, omni_answer
from tests.models.qwen_checkpoints import make_audio, make_image, make_video

PATIENCE = 60.0  # seconds for one answer
GREEDY_SPEECH = {"temperature": 0.0, "max_tokens": MAX_CODES}


# --- files, lossless so that both sides see the same


def png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def wav(samples: np.ndarray, rate: int = 16_000) -> bytes:
    """32-bit float PCM."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="wav") as container:
        stream = container.add_stream("pcm_f32le", rate=rate, layout="mono")
        frame = av.AudioFrame.from_ndarray(samples[None].astype(np.float32), format="flt", layout="mono")
        frame.sample_rate = rate
        container.mux([*stream.encode(frame), *stream.encode(None)])
    return buffer.getvalue()


def mkv(frames: np.ndarray, fps: int = 2, sound: np.ndarray | None = None) -> bytes:
    """FFV1 in RGB, and 32-bit float PCM at 16 kHz.  frames: uint8 [num_frames, height, width, 3]."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="matroska") as container:
        video = container.add_stream("ffv1", rate=fps)
        video.height, video.width, video.pix_fmt = *frames.shape[1:3], "bgr0"
        if sound is not None:
            audio = container.add_stream("pcm_f32le", rate=16_000, layout="mono")
        for pixels in frames:
            container.mux(video.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(video.encode(None))
        if sound is not None:
            frame = av.AudioFrame.from_ndarray(sound[None].astype(np.float32), format="flt", layout="mono")
            frame.sample_rate = 16_000
            container.mux([*audio.encode(frame), *audio.encode(None)])
    return buffer.getvalue()


@functools.cache
def files_of(case: str) -> dict[str, tuple[Media, ...]]:
    """The media of a case, by encoder stage."""
    pictures = [png(make_image(*size)) for size in ((160, 128, 0), (96, 200, 3))]
    clips = {"audio": make_audio(1.5), "all": make_audio(1.5), "long_audio": make_audio(5.3, seed=1)}
    seen: list[Media] = []
    heard: list[Media] = []
    if case in ("image", "two_images", "all"):
        count = 2 if case == "two_images" else 1
        seen += [Media(key=f"picture-{index}", data=pictures[index]) for index in range(count)]
    if case in clips:
        heard.append(Media(key=f"clip-{len(clips[case])}", data=wav(clips[case])))
    if case in ("video", "all", "audio_in_video"):
        sound = make_audio(4.0, seed=2) if case == "audio_in_video" else None
        data = mkv(make_video(8), sound=sound)
        film = Media(key=f"film-{case}", data=data, mime="video/x-matroska", options={"fps": 2.0})
        seen.append(film)
        if sound is not None:
            heard.append(film)
    return {stage: tuple(media) for stage, media in (("vision", seen), ("hearing", heard)) if media}


def segments_of(directory: Path, case: str) -> tuple[Segment, ...]:
    """The reference's prompt with one segment where it repeats a placeholder."""
    config = load(directory).config.thinker_config
    stages = {
        config.image_token_id: "vision",
        config.video_token_id: "vision",
        config.audio_token_id: "hearing",
    }
    counts = {"vision": 0, "hearing": 0}
    segments: list[Segment] = []
    text: list[int] = []
    previous = -1
    for token_id in omni_answer(directory, case).prompt_ids:
        is_media = token_id in stages
        if is_media and (token_id == previous or (case == "audio_in_video" and previous in stages)):
            continue
        previous = token_id
        if not is_media:
            text.append(token_id)
            continue
        segments.append(TokenSegment(tuple(text)))
        text = []
        if case == "audio_in_video":
            segments.append(MergedSegment(MediaSegment("vision", 0), MediaSegment("hearing", 0)))
            continue
        stage = stages[token_id]
        segments.append(MediaSegment(stage, counts[stage]))
        counts[stage] += 1
    return (*segments, TokenSegment(tuple(text)))


# --- the pipeline


def omni_graph(
    model: Path | str,
    *,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
    first_chunk: int = 4,
    chunk: int = 25,
    **settings: Any,
) -> PipelineSpec:
    """changes: settings by stage."""
    per_stage = changes or {}

    def of(stage: str) -> dict[str, Any]:
        return {"dtype": "float32", **per_stage.get(stage, {})}

    graph = Graph("omni", model=str(model), **settings)
    vision = graph.encoder("vision", part="visual", **of("vision"))
    hearing = graph.encoder("hearing", part="audio_tower", **of("hearing"))
    llm = {"kv_cache": "8MiB"}
    thinker = graph.llm("thinker", part="thinker", **{**llm, **of("thinker")})
    talker = graph.llm("talker", part="talker", **{**llm, **of("talker")})
    vocoder = graph.vocoder("vocoder", part="code2wav", **of("vocoder"))
    graph.connect(vision, thinker)
    graph.connect(hearing, thinker)
    graph.connect(thinker, talker, stream=True)
    graph.connect(talker, vocoder, stream=True, first_chunk=first_chunk, chunk=chunk)
    graph.output(text=thinker, audio=vocoder)
    return graph.build()


@asynccontextmanager
async def running(spec: PipelineSpec, options: LaunchOptions | None = None) -> AsyncIterator[Pipeline]:
    """The pipeline, its stages as threads of this process unless `options` says otherwise."""
    chosen = options or LaunchOptions(mode="threads", drain_seconds=2.0)
    async with start_pipeline(spec, chosen) as pipeline:
        async with asyncio.timeout(120):
            await pipeline.wait_ready()
        yield pipeline


@dataclass
class Heard:
    """One answer.  chunks: (seconds, samples) of each piece of sound."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    pieces: list[np.ndarray] = field(default_factory=list)
    order: list[str] = field(default_factory=list)  # "text" or "audio", as they came
    done: Done | None = None

    @property
    def sound(self) -> np.ndarray:
        return np.concatenate([np.zeros(0, np.float32), *self.pieces])


def question(
    directory: Path,
    case: str,
    *,
    name: str = "",
    outputs: Sequence[str] = ("text", "audio"),
    max_tokens: int = MAX_TOKENS,
    **fields: Any,
) -> GenerateRequest:
    """A greedy request."""
    return GenerateRequest(
        request_id=name or case,
        outputs=tuple(outputs),
        segments=fields.pop("segments", None) or segments_of(directory, case),
        media=fields.pop("media", None) or files_of(case),
        sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens),
        options={"voice": "Ethan", **fields.pop("options", {})},
        stage_params={"talker": {**GREEDY_SPEECH, **fields.pop("talker", {})}} if "audio" in outputs else {},
        **fields,
    )


async def ask(
    pipeline: Pipeline, request: GenerateRequest, watch: Callable[[Heard], None] | None = None
) -> Heard:
    """The answer, whole.  watch: called after each event.  Raises the request's error."""
    heard = Heard()
    stream = pipeline.orchestrator.submit(request)
    try:
        async with asyncio.timeout(PATIENCE):
            async for event in stream:
                if isinstance(event, TextDelta):
                    heard.text += event.text
                    heard.token_ids += event.token_ids
                    heard.order.append("text")
                elif isinstance(event, AudioDelta):
                    heard.pieces.append(event.pcm)
                    heard.order.append("audio")
                else:
                    heard.done = event
                if watch is not None:
                    watch(heard)
    finally:
        await stream.aclose()
    return heard


@functools.cache
@torch.no_grad()
def reference_wave(directory: Path, case: str) -> Tensor:
    """The whole answer's codes decoded in one pass by the reference."""
    codes = omni_answer(directory, case).codes
    assert codes is not None
    wave: Tensor = load(directory).code2wav(codes.T.unsqueeze(0))
    return wave.reshape(-1).float()


def assert_equals_reference(heard: Heard, directory: Path, case: str) -> None:
    expected = omni_answer(directory, case)
    assert heard.token_ids == expected.tokens
    wave = reference_wave(directory, case).numpy()
    assert heard.sound.shape == wave.shape
    np.testing.assert_allclose(heard.sound, wave, atol=1e-4, rtol=0)
