"""The server's own end, by kill -9 and by signals: its processes and files go with it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.conftest import holdings
from tests.faults.starter import BODIES, PATIENCE, STAGES, cli, descendants, environment, is_alive

pytestmark = [pytest.mark.starter, pytest.mark.processes]

GONE_SECONDS = 5.0  # after the server's death

# Starts the starter and says so once an answer has begun; then goes on answering until it is killed.
ANSWERING = """
import asyncio, json

from omnistage.serving.launch import LaunchOptions, start_pipeline
from tests.faults.starter import BODIES, pids, prepare, starter_spec


async def main():
    async with start_pipeline(starter_spec(), LaunchOptions()) as pipeline:
        await pipeline.wait_ready()
        while True:
            async for event in pipeline.orchestrator.submit(await prepare(pipeline, "look")):
                print(json.dumps(pids(pipeline)), flush=True)


asyncio.run(main())
"""


def wait_for(is_true: Callable[[], bool], what: Callable[[], object], seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline, what()
        time.sleep(0.02)


@contextmanager
def running(command: list[str], home: Path) -> Iterator[subprocess.Popen[str]]:
    """A process in a session of its own, whose output is read line by line; killed if it is still there."""
    process = subprocess.Popen(
        command,
        env=environment(home),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    reaper = threading.Timer(2 * PATIENCE, process.kill)
    reaper.start()
    try:
        yield process
    finally:
        reaper.cancel()
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def assert_nothing_left(family: dict[int, str], home: Path, before: frozenset[str]) -> None:
    wait_for(
        lambda: not any(map(is_alive, family)),
        lambda: f"still there: {[family[pid] for pid in family if is_alive(pid)]}",
        GONE_SECONDS,
    )
    wait_for(lambda: not list(home.glob("omnistage-*")), lambda: list(home.rglob("*")), GONE_SECONDS)
    wait_for(lambda: holdings().segments <= before, lambda: holdings().segments - before, GONE_SECONDS)


def test_a_killed_server_leaves_no_process_and_no_file(home: Path, starter_dir: Path):
    before = holdings().segments
    with running([sys.executable, "-c", ANSWERING], home) as server:
        workers = set(json.loads(server.stdout.readline()).values())
        family = descendants(server.pid)
        assert workers <= family.keys()
        assert {"nursery", "lease_broker", "espeak_process"} <= {
            word
            for command in family.values()
            for word in ("nursery", "lease_broker", "espeak_process")
            if word in command
        }
        assert list(home.glob("omnistage-*"))
        server.kill()
        assert_nothing_left(family, home, before)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_sigterm_lets_answers_finish_and_ends_everything(home: Path, starter_dir: Path):
    before = holdings().segments
    port = free_port()
    one_thread = [argument for stage in STAGES for argument in ("--set", f"{stage}.threads=1")]
    with running(cli("serve", "starter", "--port", str(port), *one_thread), home) as server:
        assert any("serving starter" in line for line in server.stdout)
        family = descendants(server.pid)
        body = {**BODIES["talk"], "model": "starter", "stream": True, "audio": {"format": "pcm16"}}
        body["max_tokens"] = 12
        url = f"http://127.0.0.1:{port}"
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=PATIENCE) as reply:
            lines = (line for line in reply.iter_lines() if line)
            assert any('"data"' in line for line in lines)  # it speaks
            # To every process, as a service manager does: the workers must not heed it.
            for pid in (*family, server.pid):
                os.kill(pid, signal.SIGTERM)
            rest = list(lines)
        assert rest[-1] == "data: [DONE]"
        assert any('"data"' in line for line in rest)
        assert server.wait(PATIENCE) == 0
        assert_nothing_left(family, home, before)


def test_ctrl_c_while_loading_ends_everything(home: Path, starter_dir: Path):
    before = holdings().segments
    port = free_port()
    with running(cli("serve", "starter", "--port", str(port)), home) as server:
        wait_for(
            lambda: any("nursery" in one for one in descendants(server.pid).values()), lambda: "no nursery"
        )
        wait_for(lambda: is_answering(f"http://127.0.0.1:{port}/health"), lambda: "no answer")
        family = descendants(server.pid)
        began = time.monotonic()
        os.killpg(server.pid, signal.SIGINT)  # as a terminal does
        assert server.wait(PATIENCE) == 0
        assert time.monotonic() - began < GONE_SECONDS
        assert_nothing_left(family, home, before)


def is_answering(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False
