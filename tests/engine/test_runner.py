"""How a step's rows are grouped for attention, and that the grouping changes no result."""

from __future__ import annotations

import pytest

from omnistage.engine.runner import Runner
from omnistage.engine.scheduler import ScheduledChunk
from omnistage.engine.sequence import Sequence


def decodes(llama, contexts: list[int]) -> list[ScheduledChunk]:
    """Sequences with pages, about to compute their last row."""
    chunks = []
    for index, context in enumerate(contexts):
        made = Sequence(llama.request((1,) * context), index, 16)
        made.extend_prompt(made.request.rows, is_complete=True)
        first = 40 * index
        made.block_table = list(range(first, first + made.num_blocks_for(context)))
        chunks.append(ScheduledChunk(made, context - 1, 1))
    return chunks


@pytest.mark.parametrize(
    ("contexts", "expected"),
    [
        ([30], [(0, 1, 30)]),
        ([100, 90, 80], [(0, 3, 100)]),
        ([500, 20, 20], [(0, 2, 500), (2, 1, 20)]),
        ([500, 490, 20, 20, 19], [(0, 3, 500), (3, 2, 20)]),
    ],
)
def test_decode_groups(llama, contexts: list[int], expected: list[tuple[int, int, int]]) -> None:
    """Few groups, none with more padding than a group of its own would cost."""
    runner = Runner(llama.decoder, llama.decoder.new_kv_cache(256, 16))
    groups = runner._decode_groups(decodes(llama, contexts))
    assert [(group.start, group.count, group.context) for group in groups] == expected
    for group in groups:
        assert (group.mask is None) == (len(set(contexts[group.start :][: group.count])) == 1)


def test_long_and_short_contexts_together(llama, collected) -> None:
    requests = [llama.request(prompt) for prompt in llama.prompts([420, 400, 9, 3, 30, 1, 200])]
    engine = llama.engine(max_num_batched_tokens=512)
    for request in requests:
        engine.add_request(request)
    collected.drain(engine)
    for request in requests:
        llama.assert_greedy(request, collected.token_ids[request.request_id])


def test_consecutive_blocks_need_no_copy(llama) -> None:
    runner = Runner(llama.decoder, llama.decoder.new_kv_cache(256, 16))
    (chunk,) = decodes(llama, [40])
    assert runner._decode_groups([chunk])[0].blocks == slice(0, 3)
    chunk.sequence.block_table = [0, 2, 1]
    assert runner._decode_groups([chunk])[0].blocks.tolist() == [0, 2, 1]
