"""Fixtures of the HTTP tests: a model with a small tokenizer, and live servers over a fake backend."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # fake_backend and live_server are shared by these tests

from fake_backend import FakeBackend, write_model
from live_server import LiveServer, serve

from omnistage.serving.settings import ServerSettings


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory whose thinker/ holds a byte-level BPE tokenizer and a ChatML template."""
    directory = tmp_path_factory.mktemp("model")
    write_model(directory)
    return directory


@pytest.fixture
def backend(model_dir: Path) -> FakeBackend:
    return FakeBackend(model_dir)


@pytest.fixture
def start(backend: FakeBackend) -> Iterator[Callable[..., LiveServer]]:
    """Start servers over `backend`; keyword arguments are ServerSettings."""
    with ExitStack() as stack:

        def start_server(**settings: Any) -> LiveServer:
            return stack.enter_context(serve(backend, ServerSettings(**settings)))

        yield start_server


@pytest.fixture
def server(start: Callable[..., LiveServer]) -> LiveServer:
    return start()
