"""Starter pipelines under fault: mixed requests with fixed seeds, their answers, and what is left behind."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from omnistage.graph import PipelineSpec, load_pipeline
from omnistage.serving.chat_protocol import ChatCompletionRequest
from omnistage.serving.chat_request import prepare_chat
from omnistage.serving.launch import Pipeline
from omnistage.serving.protocol import parse_body
from omnistage.serving.replicas import Replica
from omnistage.serving.requests import AudioDelta, Done, GenerateRequest, RequestStream, TextDelta
from omnistage.serving.service import Service
from omnistage.serving.settings import MediaSettings, ServerSettings
from omnistage.transport.messages import Heartbeat

MEDIA = Path(__file__).parents[2] / "examples" / "media"
STAGES = ("hearing", "vision", "thinker", "talker", "vocoder")
PATIENCE = 60.0  # seconds that anything here may take on a busy machine
# Gauges that are zero once all requests have ended.
HELD = (
    "assigned_requests",
    "open_requests",
    "requests",
    "kv_blocks_used",
    "slots_in_use",
    "tensors_held",
    "early_chunks",
)

# talk speaks, look sees and hears and speaks, write only writes and draws its tokens.
BODIES: dict[str, dict[str, Any]] = {
    "talk": {
        "messages": [{"role": "user", "content": "Tell me three short facts about the sea."}],
        "modalities": ["text", "audio"],
        "audio": {"format": "wav"},
        "temperature": 0,
        "max_tokens": 56,
        "seed": 1,
    },
    "look": {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": (MEDIA / "chelsea.png").as_uri()}},
                    {"type": "audio_url", "audio_url": {"url": (MEDIA / "question.wav").as_uri()}},
                ],
            }
        ],
        "modalities": ["text", "audio"],
        "audio": {"format": "wav"},
        "temperature": 0,
        "max_tokens": 40,
        "seed": 2,
    },
    "write": {
        "messages": [{"role": "user", "content": "Write a short poem about rain."}],
        "temperature": 0.9,
        "max_tokens": 48,
        "seed": 3,
    },
}


def starter_spec(*overrides: str) -> PipelineSpec:
    """The starter as every comparison runs it: float32, one thread a stage, media always encoded afresh."""
    fixed = [f"{stage}.threads=1" for stage in STAGES]
    fixed += ["thinker.dtype=float32", "hearing.encoder_cache=1", "vision.encoder_cache=1"]
    return load_pipeline("starter", overrides=[*fixed, *overrides])


@dataclass
class Answer:
    """text, token_ids, pcm [num_samples]: what the client got, over all replays."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    pieces: list[np.ndarray] = field(default_factory=list)
    done: Done | None = None

    @property
    def pcm(self) -> np.ndarray:
        return np.concatenate([np.zeros(0, np.float32), *self.pieces])

    @property
    def replays(self) -> int:
        return self.done.replays


@dataclass(frozen=True)
class Moment:
    """An event that has just reached a client: the `count`-th of its kind ("text", "audio") of a request."""

    request: str
    kind: str
    count: int


Watch = Callable[[Moment], None]


async def prepare(pipeline: Pipeline, name: str, **changes: Any) -> GenerateRequest:
    settings = ServerSettings(media=MediaSettings(root=MEDIA))
    service = Service(pipeline.orchestrator, settings)
    body = parse_body(ChatCompletionRequest, {"model": pipeline.spec.name, **BODIES[name], **changes})
    job = await prepare_chat(service, body)
    await service.media.aclose()
    return job.requests[0]


async def read(stream: RequestStream, name: str = "", watch: Watch = lambda moment: None) -> Answer:
    """Everything a stream brings.  Raises what it raises, TimeoutError if it hangs."""
    answer = Answer()
    counts = {"text": 0, "audio": 0}
    try:
        async with asyncio.timeout(PATIENCE):
            async for event in stream:
                match event:
                    case TextDelta():
                        answer.text += event.text
                        answer.token_ids += event.token_ids
                    case AudioDelta():
                        answer.pieces.append(event.pcm)
                    case Done():
                        answer.done = event
                        continue
                kind = "text" if isinstance(event, TextDelta) else "audio"
                counts[kind] += 1
                watch(Moment(name, kind, counts[kind]))
    finally:
        await stream.aclose()
    assert answer.done is not None
    return answer


async def ask_all(pipeline: Pipeline, watch: Watch = lambda moment: None) -> dict[str, Answer]:
    """talk and write together, and look from talk's first text on, so that encoders work beside the llm."""
    requests = {name: await prepare(pipeline, name) for name in BODIES}
    streams = {name: pipeline.orchestrator.submit(requests[name]) for name in ("talk", "write")}
    late: list[asyncio.Task[Answer]] = []

    def start_look(moment: Moment) -> None:
        if moment == Moment("talk", "text", 1):
            look = pipeline.orchestrator.submit(requests["look"])
            late.append(asyncio.create_task(read(look, "look", watch)))
        watch(moment)

    answers = await asyncio.gather(*(read(stream, name, start_look) for name, stream in streams.items()))
    return {**dict(zip(streams, answers, strict=True)), "look": await late[0]}


def assert_same(answers: dict[str, Answer], expected: dict[str, Answer], *, tolerance: float = 0.0) -> None:
    assert answers.keys() == expected.keys()
    for name, answer in answers.items():
        assert answer.token_ids == expected[name].token_ids, name
        assert answer.text == expected[name].text, name
        assert answer.done.finish_reason == expected[name].done.finish_reason, name
        assert answer.done.usage.completion_tokens == expected[name].done.usage.completion_tokens, name
        np.testing.assert_allclose(answer.pcm, expected[name].pcm, rtol=0, atol=tolerance, err_msg=name)


def replica_of(pipeline: Pipeline, stage: str) -> Replica:
    return pipeline.orchestrator.replicas.by_stage[stage][0]


def pids(pipeline: Pipeline) -> dict[str, int]:
    return {stage: replica_of(pipeline, stage).pid for stage in STAGES}


def restarts(pipeline: Pipeline) -> dict[str, float]:
    gauges = pipeline.orchestrator.gauges()
    return {stage: gauges[stage]["restarts"] for stage in STAGES}


async def until(is_true: Callable[[], bool], what: Callable[[], object] = lambda: "") -> None:
    """Wait for something that no event announces.  Fails with `what` after PATIENCE seconds."""
    deadline = time.monotonic() + PATIENCE
    while not is_true():
        assert time.monotonic() < deadline, what()
        await asyncio.sleep(0.02)


async def ready_again(pipeline: Pipeline) -> None:
    async with asyncio.timeout(PATIENCE):
        await pipeline.wait_ready()


async def settled(pipeline: Pipeline) -> None:
    """Every worker serves, and none holds anything of any request."""
    await ready_again(pipeline)
    for replica in pipeline.orchestrator.replicas.all():
        # Answered with fresh gauges: those of an idle worker do not show what was released since.
        pipeline.orchestrator._tell(replica, Heartbeat(worker=replica.worker))

    def held() -> dict[str, object]:
        gauges = pipeline.orchestrator.gauges()
        found: dict[str, object] = {}
        for stage in pipeline.spec.stages:
            found |= {f"{stage}.{name}": gauges[stage].get(name, 0) for name in HELD}
        found.update(gauges["orchestrator"], replays=0)
        return {name: number for name, number in found.items() if number}

    await until(lambda: not held(), held)


# --- this machine's processes and files -------------------------------------------------------------


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and waits to be reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def descendants(pid: int) -> dict[int, str]:
    """Living children of a process and theirs, with their command lines."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    family = {pid}
    while grown := {child for child, parent in parents.items() if parent in family} - family:
        family |= grown
    found = {}
    for child in family - {pid}:
        try:
            command = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if is_alive(child):
            found[child] = command
    return found


def child_running(word: str, parent: int | None = None) -> int:
    """The pid of the one descendant whose command line holds `word`; of the eldest where workers share it."""
    found = [child for child, command in descendants(parent or os.getpid()).items() if word in command]
    assert found, f"no process runs {word}"
    return min(found)


def num_descriptors(pid: int | None = None) -> int:
    return len(os.listdir(f"/proc/{pid or os.getpid()}/fd"))


def segments(pipeline: Pipeline) -> set[str]:
    """Names of the workers that have shared-memory files."""
    prefix = f"omnistage-{pipeline.supervisor._template.run_id}-"
    paths = Path("/dev/shm").glob(f"{prefix}*")
    return {path.name.removeprefix(prefix).rpartition("-")[0] for path in paths}


def environment(home: Path) -> dict[str, str]:
    """For processes of their own: their run directories lie in `home`."""
    return {**os.environ, "TMPDIR": str(home), "PYTHONUNBUFFERED": "1"}


def cli(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "omnistage.serving.cli", *arguments]
