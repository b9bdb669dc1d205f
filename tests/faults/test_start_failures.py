"""Workers that cannot start: the pipeline says why, and everything that had started ends."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from omnistage import Graph
from omnistage.errors import PipelineError, RequestFailed, WeightsError
from omnistage.graph import PipelineSpec
from omnistage.serving.launch import LaunchOptions, start_pipeline
from omnistage.serving.requests import GenerateRequest
from omnistage.serving.supervisor import SHUTDOWN_SECONDS
from omnistage.types import TokenSegment
from tests.conftest import holdings
from tests.faults.starter import STAGES, descendants, read, ready_again, starter_spec, until

pytestmark = [pytest.mark.starter, pytest.mark.processes]


@pytest.fixture
async def ends_everything() -> AsyncIterator[None]:
    """Fails a test after which a process or shared memory of it is left."""
    before = holdings()
    yield
    await until(lambda: not holdings().beyond(before), lambda: holdings().beyond(before))


@pytest.fixture
def damaged(home: Path, starter_dir: Path) -> Callable[[str], PipelineSpec]:
    """The starter with one part's weights cut short (or, with a leading '-', without them)."""

    def make(part: str) -> PipelineSpec:
        for stage in STAGES:
            (home / stage).symlink_to(starter_dir / stage)
        part, is_missing = part.removeprefix("-"), part.startswith("-")
        (home / part).unlink()
        (home / part).mkdir()
        for file in (starter_dir / part).iterdir():
            if file.suffix != ".safetensors":
                (home / part / file.name).symlink_to(file)
            elif not is_missing:
                (home / part / file.name).write_bytes(file.read_bytes()[:100_000])
        return starter_spec(f"model={home}")

    return make


@pytest.mark.parametrize("part", ["thinker", pytest.param("-vocoder", marks=pytest.mark.full)])
async def test_weights_that_cannot_be_read_end_the_start(
    damaged: Callable[[str], PipelineSpec], ends_everything: None, part: str
):
    async with start_pipeline(damaged(part), LaunchOptions(drain_seconds=0.0)) as pipeline:
        with pytest.raises(WeightsError, match=rf"{part.removeprefix('-')}/model.safetensors"):
            await ready_again(pipeline)
        assert not pipeline.orchestrator.is_ready


@pytest.mark.full
@pytest.mark.parametrize("delay", [0.0, 0.3, 1.0])
async def test_a_start_can_be_cancelled(starter_dir: Path, ends_everything: None, delay: float):
    async def start() -> None:
        async with start_pipeline(starter_spec(), LaunchOptions()) as pipeline:
            await pipeline.wait_ready()
            await asyncio.Event().wait()

    began = time.monotonic()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(start(), delay)
    assert time.monotonic() - began < delay + SHUTDOWN_SECONDS


async def test_remote_stages_need_a_place_to_join(starter_dir: Path):
    with pytest.raises(PipelineError, match=r"vocoder join from other hosts .* --listen"):
        async with start_pipeline(starter_spec("vocoder.placement=remote"), LaunchOptions()):
            pass


@pytest.mark.full
async def test_a_worker_that_dies_at_every_start_is_given_up(
    home: Path, starter_dir: Path, ends_everything: None
):
    starts = home / "starts"
    (home / "deadly.py").write_text(
        f"import os\nwith open({str(starts)!r}, 'a') as file:\n    file.write('x')\nos.kill(os.getpid(), 9)\n"
    )
    graph = Graph("deadly", model=str(starter_dir))
    thinker = graph.llm("thinker", part="thinker")
    change = graph.function("change", function=f"{home}/deadly.py:change")
    graph.connect(thinker, change, stream=True)
    graph.output(text=change)
    async with start_pipeline(graph.build(), LaunchOptions(drain_seconds=0.0)) as pipeline:
        request = GenerateRequest(request_id="early", outputs=("text",), segments=(TokenSegment((1,)),))
        early = pipeline.orchestrator.submit(request)
        with pytest.raises(
            WeightsError, match=r"'change' does not start: change.0 died 6 times in a row .* -9"
        ):
            await ready_again(pipeline)
        assert starts.read_text() == "x" * 6
        with pytest.raises(RequestFailed, match=r"stage 'change' is down: change.0 died 6 times"):
            await read(early)
        with pytest.raises(RequestFailed, match="stage 'change' is down"):
            pipeline.orchestrator.submit(request)
        serving = [command for command in descendants(os.getpid()).values() if "nursery" in command]
        assert len(serving) == 2  # the nursery and the thinker, which goes on
