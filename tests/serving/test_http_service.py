"""The endpoints about the server itself, and what the API process imports."""

from __future__ import annotations

import subprocess
import sys

import httpx
import pytest
from fake_backend import FakeBackend
from live_server import LiveServer
from openai import NotFoundError
from prometheus_client.parser import text_string_to_metric_families

CHAT = {"model": "starter", "messages": [{"role": "user", "content": "Hello"}]}


def samples(server: LiveServer) -> dict[tuple[str, ...], float]:
    """(name, label values in order of label names) -> value."""
    reply = httpx.get(f"{server.url}/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=")
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(reply.text)
        for sample in family.samples
    }


def test_models(server: LiveServer):
    [model] = server.client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("starter", "model", "omnistage")
    assert server.client.models.retrieve("starter").id == "starter"
    with pytest.raises(NotFoundError):
        server.client.models.retrieve("org/other")


def test_voices(server: LiveServer):
    reply = httpx.get(f"{server.url}/v1/audio/voices").json()
    assert [voice["id"] for voice in reply["data"]] == ["joe", "amy"]


def test_health_and_ready(server: LiveServer, backend: FakeBackend):
    assert httpx.get(f"{server.url}/ready").status_code == 200
    backend.is_ready = False
    assert httpx.get(f"{server.url}/ready").status_code == 503
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert httpx.get(f"{server.url}/metrics").status_code == 200
    assert httpx.get(f"{server.url}/v1/models").status_code == 503


def test_metrics(server: LiveServer):
    server.client.chat.completions.create(**CHAT)
    list(server.client.chat.completions.create(**CHAT, stream=True))
    server.client.audio.speech.create(model="starter", voice="joe", input="Two cats.", response_format="wav")
    httpx.get(f"{server.url}/nowhere")
    httpx.post(f"{server.url}/v1/chat/completions", json={})
    httpx.get(f"{server.url}/v1/models/other")
    values = samples(server)
    route = "/v1/chat/completions"
    assert values["omnistage_http_requests_total", "POST", route, "200"] == 2
    assert values["omnistage_http_requests_total", "POST", route, "400"] == 1
    assert values["omnistage_http_requests_total", "GET", "unmatched", "404"] == 1
    assert values["omnistage_http_requests_total", "GET", "/v1/models/{model:path}", "404"] == 1
    assert values["omnistage_http_request_seconds_count", route] == 3
    assert values["omnistage_http_requests_in_progress",] == 1
    assert values["omnistage_time_to_first_token_seconds_count",] == 2
    assert values["omnistage_time_to_first_audio_seconds_count",] == 1
    assert values["omnistage_tokens_total", "prompt"] == 60
    assert values["omnistage_audio_seconds_total",] == pytest.approx(0.2)
    assert values["omnistage_stage_kv_blocks_used", "thinker"] == 3
    assert values["omnistage_stage_running", "vocoder"] == 0


def test_openapi_describes_the_bodies(server: LiveServer):
    description = httpx.get(f"{server.url}/openapi.json").json()
    schemas = description["components"]["schemas"]
    assert "temperature" in schemas["ChatCompletionRequest"]["properties"]
    operation = description["paths"]["/v1/chat/completions"]["post"]
    reference = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    assert reference == "#/components/schemas/ChatCompletionRequest"
    references = str(description).split("'$ref': '#/components/schemas/")[1:]
    assert {reference.partition("'")[0] for reference in references} <= set(schemas)


def test_api_process_imports_neither_torch_nor_transformers():
    program = (
        "import sys, omnistage.serving.app, omnistage.serving.cli\n"
        "heavy = {'torch', 'transformers', 'torchaudio', 'av'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
