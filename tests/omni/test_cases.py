"""Every mix of inputs that the reference was recorded on, through the whole pipeline."""

from __future__ import annotations

import asyncio

import pytest

from tests.models.qwen3_reference import OMNI_CASES
from tests.omni.asking import ask, assert_equals_reference, omni_graph, question, running


@pytest.mark.parametrize("case", OMNI_CASES)
def test_answer_equals_transformers(case, qwen3_omni_dir):
    async def scenario():
        async with running(omni_graph(qwen3_omni_dir)) as pipeline:
            return await ask(pipeline, question(qwen3_omni_dir, case))

    heard = asyncio.run(scenario())
    assert_equals_reference(heard, qwen3_omni_dir, case)
