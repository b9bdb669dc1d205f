"""Everything over loopback tcp, as between hosts: the same answers, and no shared memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from omnistage.serving.launch import LaunchOptions, start_pipeline
from tests.faults.starter import (
    Answer,
    Moment,
    ask_all,
    assert_same,
    ready_again,
    segments,
    settled,
    starter_spec,
)


@pytest.mark.starter
@pytest.mark.processes
async def test_answers_over_tcp_with_keys_equal_those_through_memory(
    home: Path, undisturbed: dict[str, Answer]
):
    options = LaunchOptions(transport="tcp", key_file=str(home / "keys"))
    async with start_pipeline(starter_spec(), options) as pipeline:
        await ready_again(pipeline)
        found: set[str] = set()

        def look(moment: Moment) -> None:
            found.update(segments(pipeline))

        assert_same(await ask_all(pipeline, look), undisturbed, tolerance=1e-5)
        assert found == set()
        gauges = pipeline.orchestrator.gauges()
        assert gauges["talker"]["tensors_in_frames"] > 0
        await settled(pipeline)
    assert (home / "keys").stat().st_mode & 0o077 == 0
