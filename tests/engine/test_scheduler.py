"""Planning without a model: budgets, order, and who owns which block after any history."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from omnistage.engine.block_manager import BlockManager
from omnistage.engine.request import EngineRequest, TokenRows
from omnistage.engine.scheduler import ScheduledChunk, Scheduler, SchedulerLimits
from omnistage.engine.sequence import Sequence, SequenceStatus

BLOCK = 4


def make(num_blocks: int = 32, **limits: object) -> Scheduler:
    defaults = {
        "block_size": BLOCK,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
        "max_prefill_tokens_per_request": 16,
        "enable_prefix_cache": True,
    }
    return Scheduler(SchedulerLimits(**{**defaults, **limits}), BlockManager(num_blocks))


def sequence(name: str, tokens: list[int], arrival: int = 0, *, complete: bool = True) -> Sequence:
    made = Sequence(EngineRequest(request_id=name), arrival, BLOCK)
    made.extend_prompt((TokenRows(tuple(tokens)),), is_complete=complete)
    return made


def advance(scheduler: Scheduler) -> list[ScheduledChunk]:
    """Plan a step and pretend it was computed; sampled sequences get token 7."""
    plan = scheduler.schedule()
    for chunk in plan:
        chunk.sequence.num_computed_tokens = chunk.stop
        scheduler.publish(chunk)
    for chunk in plan:
        if chunk.is_sampled:
            chunk.sequence.append_output(7)
    return plan


def test_single_rows_go_before_prompts_under_the_budget() -> None:
    scheduler = make(max_num_batched_tokens=5)
    long, short = sequence("long", list(range(1, 13)), 0), sequence("short", [1], 1)
    scheduler.add(short)
    advance(scheduler)
    scheduler.add(long)
    plan = advance(scheduler)
    assert [(chunk.sequence, chunk.num_tokens) for chunk in plan] == [(short, 1), (long, 4)]
    plan = advance(scheduler)
    assert [(chunk.sequence, chunk.start, chunk.num_tokens) for chunk in plan] == [
        (short, 2, 1),
        (long, 4, 4),
    ]


def test_prefill_cap_shares_the_budget() -> None:
    scheduler = make(max_prefill_tokens_per_request=6)
    for index in range(3):
        scheduler.add(sequence(str(index), [index + 1] * 20, index))
    assert [chunk.num_tokens for chunk in advance(scheduler)] == [6, 6, 4]


def test_youngest_is_preempted_and_returns_first() -> None:
    scheduler = make(num_blocks=4, enable_prefix_cache=False)
    old, young, later = (sequence(name, [1] * 7, index) for index, name in enumerate("abc"))
    scheduler.add(old)
    scheduler.add(young)
    advance(scheduler)
    scheduler.add(later)
    advance(scheduler)  # both fill their second block
    plan = advance(scheduler)
    assert [chunk.sequence for chunk in plan] == [old]
    assert young.status is SequenceStatus.WAITING
    assert young.block_table == []
    assert scheduler.waiting == [young, later]
    assert scheduler.num_preemptions == 1


def test_idle_open_prompt_gives_way_before_a_younger_one() -> None:
    scheduler = make(num_blocks=4)
    opened = sequence("open", [1] * 8, 0, complete=False)
    scheduler.add(opened)
    advance(scheduler)
    scheduler.add(sequence("complete", [2] * 10, 1))
    assert [chunk.sequence.request_id for chunk in advance(scheduler)] == ["complete"]
    assert opened.status is SequenceStatus.WAITING


def test_open_prompt_that_does_not_fit_lets_others_pass() -> None:
    scheduler = make(num_blocks=6)
    scheduler.add(sequence("active", [1] * 10, 0))
    advance(scheduler)
    scheduler.add(sequence("open", [2] * 16, 1, complete=False))
    scheduler.add(sequence("small", [3] * 5, 2))
    assert [chunk.sequence.request_id for chunk in advance(scheduler)] == ["active", "small"]
    scheduler.add(sequence("large", [4] * 16, 3))
    scheduler.add(sequence("tiny", [5], 4))
    assert "tiny" not in [chunk.sequence.request_id for chunk in advance(scheduler)]


def test_admission_waits_for_the_whole_prompt() -> None:
    scheduler = make(num_blocks=4, max_num_batched_tokens=8)
    scheduler.add(sequence("first", [1] * 8, 0))
    scheduler.add(sequence("second", [2] * 12, 1))
    assert len(advance(scheduler)) == 1
    assert [chunk.sequence.request_id for chunk in advance(scheduler)] == ["first"]


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 20), st.integers(0, 2), st.booleans()),
        st.tuples(st.just("extend"), st.integers(0, 9), st.integers(1, 4), st.booleans()),
        st.tuples(st.just("remove"), st.integers(0, 9), st.just(0), st.just(False)),
        st.tuples(st.just("step"), st.just(0), st.just(0), st.just(False)),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=150)
@given(
    num_blocks=st.integers(7, 14),
    cache=st.booleans(),
    budget=st.integers(1, 12),
    cap=st.integers(1, 8),
    actions=ACTIONS,
)
def test_blocks_are_owned_once(
    num_blocks: int, cache: bool, budget: int, cap: int, actions: list[tuple[str, int, int, bool]]
) -> None:
    scheduler = make(
        num_blocks,
        enable_prefix_cache=cache,
        max_num_batched_tokens=budget,
        max_prefill_tokens_per_request=cap,
        max_num_seqs=3,
    )
    alive: list[Sequence] = []
    for count, (action, number, kind, complete) in enumerate(actions):
        if action == "add":
            made = sequence(str(count), [kind] * number, count, complete=complete)
            alive.append(made)
            scheduler.add(made)
        elif alive and action == "extend":
            chosen = alive[number % len(alive)]
            if not chosen.prompt_is_complete and len(chosen.token_ids) < 20:
                chosen.extend_prompt((TokenRows((kind,) * kind),), is_complete=complete)
        elif alive and action == "remove":
            scheduler.remove(alive.pop(number % len(alive)))
        elif action == "step":
            had_work = scheduler.has_work()
            hits = scheduler.num_prefix_hit_tokens
            plan = advance(scheduler)
            assert sum(chunk.num_tokens for chunk in plan) <= budget
            assert had_work == bool(plan or scheduler.num_prefix_hit_tokens > hits)
            for ended in [item for item in alive if len(item.token_ids) >= 7 * BLOCK]:
                alive.remove(ended)
                scheduler.remove(ended)
        check(scheduler, alive)
    for remaining in alive:
        scheduler.remove(remaining)
    assert scheduler.blocks.num_used == 0
    assert scheduler.blocks.num_free == num_blocks


def check(scheduler: Scheduler, alive: list[Sequence]) -> None:
    assert sorted(scheduler.running + scheduler.waiting, key=id) == sorted(alive, key=id)
    owned: Counter[int] = Counter()
    for item in alive:
        assert len(set(item.block_table)) == len(item.block_table)
        assert len(item.block_table) == -(-item.num_computed_tokens // BLOCK)
        assert item.num_computed_tokens <= len(item.token_ids)
        owned.update(item.block_table)
    assert scheduler.blocks.num_used == len(owned)
    for item in alive:  # a block that is still written to belongs to one sequence alone
        for index, block in enumerate(item.block_table):
            if owned[block] > 1:
                assert (index + 1) * BLOCK <= item.num_computed_tokens
                assert scheduler.limits.enable_prefix_cache
