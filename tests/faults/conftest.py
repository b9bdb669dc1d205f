"""The undisturbed answers that all fault tests compare with."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from omnistage.serving.launch import LaunchOptions, start_pipeline
from tests.faults.starter import Answer, ask_all, starter_spec


@pytest.fixture(scope="session")
def undisturbed(starter_dir: Path) -> dict[str, Answer]:
    """The answers of a pipeline whose workers are threads: no sockets, no shared memory, no faults."""

    async def ask() -> dict[str, Answer]:
        async with start_pipeline(starter_spec(), LaunchOptions(mode="threads")) as pipeline:
            await pipeline.wait_ready()
            return await ask_all(pipeline)

    return asyncio.run(ask())


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder for run directories and keys; its path is short enough for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="of-") as folder:
        yield Path(folder)
