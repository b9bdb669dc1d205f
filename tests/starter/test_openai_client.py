"""Every endpoint on the real starter, driven by the official client, streaming and not."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import socket

import httpx
import pytest
import uvicorn
from openai import BadRequestError, NotFoundError, OpenAI

from omnistage.audio.containers import decode
from omnistage.serving.app import create_app
from omnistage.serving.settings import MediaSettings, ServerSettings
from tests.starter.asking import DATA, MEDIA

FORMATS = ["wav", "pcm16", "mp3", "flac", "opus"]
QUESTION = "What is the capital of France? Answer in one sentence."


@pytest.fixture(scope="module")
def url(starter):
    """The API on a free port, in the pipeline's own event loop."""
    settings = ServerSettings(media=MediaSettings(root=MEDIA))
    app = create_app(starter.omni.pipeline.orchestrator, settings)
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", ws="none"))
    # uvicorn would take the process's signals, which only the main thread may.
    server.install_signal_handlers = lambda: None
    serving = asyncio.run_coroutine_threadsafe(server._serve([listener]), starter.omni._loop)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = True
    serving.result(20)
    listener.close()


@pytest.fixture(scope="module")
def client(url):
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def data_url(path, mime):
    return f"data:{mime};base64,{base64.b64encode(path.read_bytes()).decode()}"


def ask(client, content, **fields):
    fields = {"model": "starter", "temperature": 0, "seed": 1, "max_completion_tokens": 40, **fields}
    return client.chat.completions.create(messages=[{"role": "user", "content": content}], **fields)


def test_text_whole_and_streamed_are_equal(client):
    whole = ask(client, QUESTION)
    assert "Paris" in whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop"
    chunks = list(ask(client, QUESTION, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len(chunks) > 5


def test_picture_and_spoken_question_are_answered_in_speech(client):
    content = [
        {"type": "image_url", "image_url": {"url": data_url(MEDIA / "chelsea.png", "image/png")}},
        {
            "type": "input_audio",
            "input_audio": {
                "data": base64.b64encode((MEDIA / "question.wav").read_bytes()).decode(),
                "format": "wav",
            },
        },
    ]
    answer = ask(client, content, modalities=["text", "audio"], audio={"voice": "joe", "format": "wav"})
    message = answer.choices[0].message
    assert "cat" in message.audio.transcript.lower()
    speech = decode(base64.b64decode(message.audio.data), max_seconds=60)
    assert speech.sample_rate == 22050
    assert speech.duration > 1
    heard = client.audio.transcriptions.create(
        model="starter", file=("answer.wav", base64.b64decode(message.audio.data))
    )
    assert "cat" in heard.text.lower()


@pytest.mark.parametrize("name", FORMATS)
def test_streamed_speech_is_one_file_and_equals_the_whole(client, name):
    audio = {"voice": "joe", "format": name}
    fields = {"modalities": ["text", "audio"], "audio": audio, "max_completion_tokens": 12}
    whole = ask(client, "Say hello.", **fields).choices[0].message.audio
    pieces, transcript = [], ""
    for chunk in ask(client, "Say hello.", stream=True, **fields):
        delta = chunk.choices[0].delta.audio
        if delta is not None:
            pieces.append(base64.b64decode(delta.data or ""))
            transcript += delta.transcript or ""
    assert transcript == whole.transcript
    streamed, complete = b"".join(pieces), base64.b64decode(whole.data)
    if name == "pcm16":
        assert streamed == complete
    else:
        lengths = [decode(data, max_seconds=60).duration for data in (streamed, complete)]
        assert lengths[0] == pytest.approx(lengths[1], abs=0.1)


def test_speech_endpoint_speaks_what_it_is_told(client):
    whole = client.audio.speech.create(
        model="starter", voice="joe", input="The river is wide.", response_format="wav"
    ).content
    heard = client.audio.transcriptions.create(model="starter", file=("river.wav", whole)).text
    assert "river" in heard.lower()
    with client.audio.speech.with_streaming_response.create(
        model="starter", voice="joe", input="The river is wide.", response_format="pcm"
    ) as response:
        streamed = b"".join(response.iter_bytes())
    assert len(streamed) % 2 == 0
    assert len(streamed) / 2 / 22050 == pytest.approx(decode(whole, max_seconds=60).duration, rel=0.3)


@pytest.mark.parametrize("form", ["json", "text"])
def test_transcription(client, form):
    path = next(DATA.glob("speech_*.wav"))
    answer = client.audio.transcriptions.create(
        model="starter", file=(path.name, path.read_bytes()), response_format=form
    )
    text = answer if isinstance(answer, str) else answer.text
    assert len(text.split()) > 3
    events = client.audio.transcriptions.create(
        model="starter", file=(path.name, path.read_bytes()), stream=True
    )
    assert list(events)[-1].text.strip() == text.strip()


def test_files_are_readable_under_the_media_root_only(client):
    inside = {"type": "image_url", "image_url": {"url": (MEDIA / "chelsea.png").as_uri()}}
    assert (
        "cat"
        in ask(client, [inside, {"type": "text", "text": "Describe the picture."}])
        .choices[0]
        .message.content.lower()
    )
    outside = {"type": "image_url", "image_url": {"url": (DATA / "cat.jpg").as_uri()}}
    with pytest.raises(BadRequestError, match="media"):
        ask(client, [outside])


def test_logprobs_stop_and_seed(client):
    answer = ask(client, QUESTION, logprobs=True, top_logprobs=3)
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 3 for entry in entries)
    # Greedy: the token taken is the best alternative.
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in entries)
    stopped = ask(client, QUESTION, stop=["Paris"]).choices[0]
    assert "Paris" not in stopped.message.content
    assert stopped.finish_reason == "stop"
    drawn = [ask(client, "Tell me a story.", temperature=1.0, seed=seed) for seed in (7, 7, 8)]
    texts = [answer.choices[0].message.content for answer in drawn]
    assert texts[0] == texts[1] != texts[2]


def test_models_voices_health_ready_and_metrics(client, url):
    assert [model.id for model in client.models.list()] == ["starter"]
    with httpx.Client(base_url=url) as plain:
        assert plain.get("/health").status_code == 200
        assert plain.get("/ready").status_code == 200
        assert "joe" in plain.get("/v1/audio/voices").text
        metrics = plain.get("/metrics").text
    assert "kv_blocks_used" in metrics
    assert "time_to_first_token" in metrics


def test_errors_are_openais(client, url):
    with pytest.raises(NotFoundError) as unknown_model:
        client.chat.completions.create(model="gpt-9", messages=[{"role": "user", "content": "x"}])
    assert unknown_model.value.code == "model_not_found"
    with pytest.raises(NotFoundError) as unknown_voice:
        client.audio.speech.create(model="starter", voice="nobody", input="x")
    assert unknown_voice.value.code == "voice_not_found"
    torn = io.BytesIO((MEDIA / "question.wav").read_bytes()[:30]).getvalue()
    with pytest.raises(BadRequestError):
        client.audio.transcriptions.create(model="starter", file=("torn.wav", torn))
    with pytest.raises(BadRequestError) as overflow:
        ask(client, "word " * 5000)
    assert overflow.value.code == "context_length_exceeded"
    # A damaged picture is found in the encoder's worker, after the stream has been asked for.
    jpeg = base64.b64encode((DATA / "cat.jpg").read_bytes()[:3000]).decode()
    body = {
        "model": "starter",
        "stream": True,
        "messages": [
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{jpeg}"}}],
            }
        ],
    }
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30)
    assert answer.status_code == 400, answer.text
    assert json.loads(answer.text)["error"]["code"] == "invalid_media"
