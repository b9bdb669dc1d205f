"""The starter as its users get it, in one process, in fp32; and transformers on the same weights."""

from __future__ import annotations

import contextlib
import socket

import pytest
import uvicorn

from omnistage import Graph
from omnistage.graph import load_pipeline
from omnistage.serving.app import create_app
from tests.starter.asking import start
from tests.starter.reference import Reference


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name == "starter":
            item.add_marker(pytest.mark.starter)


@pytest.fixture(scope="session")
def starter(starter_dir):
    """A context of 512 tokens is soon full, and long enough for all else."""
    spec = load_pipeline("starter", overrides=["thinker.dtype=float32", "thinker.max_model_len=512"])
    with start(spec) as running:
        yield running


@pytest.fixture(scope="session")
def server(starter):
    """The starter's HTTP API, as the base URL for OpenAI's client."""
    app = create_app(starter.orchestrator)
    config = uvicorn.Config(app, log_level="critical", ws="none", timeout_graceful_shutdown=5)
    running = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = starter.start(running.serve([listener]))
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        running.should_exit = True
        serving.result()


@pytest.fixture(scope="session")
def reference(starter_dir):
    return Reference(starter_dir)


@pytest.fixture
def thinker_alone(starter_dir):
    """Starts a pipeline of the thinker alone, with settings of one's own."""
    with contextlib.ExitStack() as stack:

        def start_thinker(**settings):
            graph = Graph("thinker", model="starter")
            thinker = graph.llm("thinker", dtype="float32", max_model_len=1024, **settings)
            graph.output(text=thinker)
            return stack.enter_context(start(graph))

        yield start_thinker
