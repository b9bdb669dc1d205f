"""A small Qwen3-Omni through the HTTP API: text and speech equal the reference's, whole and streamed."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from omnistage.serving.app import create_app
from omnistage.types import Media
from tests.models.qwen3_reference import KINDS, MAX_TOKENS, OMNI_CASES, QUESTION, omni_answer
from tests.omni.asking import GREEDY_SPEECH, Heard, assert_equals_reference, files_of, omni_graph, running


def part(kind: str, media: Media) -> dict[str, Any]:
    name = f"{kind}_url"
    return {"type": name, name: {"url": "data:;base64," + base64.b64encode(media.data).decode()}}


def body(case: str) -> dict[str, Any]:
    files = files_of(case)
    seen, heard = iter(files.get("vision", ())), iter(files.get("hearing", ()))
    content = [part(kind, next(heard if kind == "audio" else seen)) for kind in KINDS[case]]
    return {
        "model": "omni",
        "messages": [
            {"role": "system", "content": "You are a helpful assistant."},
            {"role": "user", "content": [*content, {"type": "text", "text": QUESTION}]},
        ],
        "modalities": ["text", "audio"],
        "audio": {"format": "wav_f32", "voice": "ethan"},
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "stage_params": {"talker": GREEDY_SPEECH},
        "mm_processor_kwargs": {"fps": 2, "use_audio_in_video": case == "audio_in_video"},
        "return_token_ids": True,
    }


def samples(data: bytes) -> np.ndarray:
    """Of a WAV file of float32 samples."""
    start = data.index(b"data") + 8
    return np.frombuffer(data[start:], dtype="<f4")


def from_whole(answer: dict[str, Any]) -> Heard:
    [choice] = answer["choices"]
    audio = choice["message"]["audio"]
    sound = samples(base64.b64decode(audio["data"]))
    return Heard(text=audio["transcript"], token_ids=choice["token_ids"], pieces=[sound])


def from_stream(text: str) -> Heard:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    heard, data = Heard(), b""
    for choice in (choice for line in lines for choice in json.loads(line)["choices"]):
        audio = choice["delta"].get("audio", {})
        heard.text += audio.get("transcript", "")
        heard.token_ids += choice.get("token_ids", [])
        data += base64.b64decode(audio.get("data", ""))
    heard.pieces = [samples(data)]
    return heard


@pytest.mark.parametrize("case", OMNI_CASES)
def test_answers_equal_transformers(qwen3_omni_dir: Path, case: str):
    async def scenario() -> tuple[dict[str, Any], str]:
        async with running(omni_graph(qwen3_omni_dir)) as pipeline:
            transport = httpx.ASGITransport(app=create_app(pipeline.orchestrator))
            async with httpx.AsyncClient(transport=transport, base_url="http://omni", timeout=60) as client:
                whole = await client.post("/v1/chat/completions", json=body(case))
                streamed = await client.post("/v1/chat/completions", json={**body(case), "stream": True})
        assert (whole.status_code, streamed.status_code) == (200, 200), whole.text
        return whole.json(), streamed.text

    whole, streamed = asyncio.run(scenario())
    expected = omni_answer(qwen3_omni_dir, case)
    for heard in (from_whole(whole), from_stream(streamed)):
        assert_equals_reference(heard, qwen3_omni_dir, case)
    usage = whole["usage"]
    assert expected.codes is not None
    assert usage["prompt_tokens"] == len(expected.prompt_ids)
    assert usage["completion_tokens_details"]["text_tokens"] == len(expected.tokens)
    assert usage["completion_tokens_details"]["audio_tokens"] == len(expected.codes)
