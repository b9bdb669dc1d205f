"""Blocks: one owner unless shared on purpose, least recently used first, everything comes back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from omnistage.engine.block_manager import BlockManager


def test_fresh_blocks_are_consecutive() -> None:
    blocks = BlockManager(8)
    assert blocks.allocate(3) == [0, 1, 2]
    assert (blocks.num_free, blocks.num_used) == (5, 3)


def test_unpublished_blocks_are_reused_before_cached_ones() -> None:
    blocks = BlockManager(4)
    owned = blocks.allocate(4)
    blocks.publish(owned[0], b"first")
    blocks.publish(owned[1], b"second")
    blocks.release(owned)
    assert blocks.num_cached == 2
    assert blocks.allocate(2) == [2, 3]
    # of a chain the end goes first: the beginning is useful without it, not the reverse
    assert blocks.allocate(1) == [1]
    assert blocks.acquire(b"second") is None
    assert blocks.acquire(b"first") == 0
    assert blocks.num_cached == 0


def test_use_refreshes_a_cached_block() -> None:
    blocks = BlockManager(2)
    for name in (b"a", b"b"):
        (block,) = blocks.allocate(1)
        blocks.publish(block, name)
        blocks.release([block])
    blocks.release([blocks.acquire(b"a")])
    blocks.allocate(1)
    assert blocks.is_published(b"a")
    assert not blocks.is_published(b"b")


def test_shared_block_is_freed_by_its_last_owner() -> None:
    blocks = BlockManager(2)
    (block,) = blocks.allocate(1)
    blocks.publish(block, b"a")
    assert blocks.acquire(b"a") == block
    blocks.release([block])
    assert (blocks.num_used, blocks.num_cached) == (1, 0)
    blocks.release([block])
    assert (blocks.num_used, blocks.num_cached) == (0, 1)


def test_second_block_of_equal_content_stays_private() -> None:
    blocks = BlockManager(4)
    first, second = blocks.allocate(2)
    blocks.publish(first, b"a")
    blocks.publish(second, b"a")
    assert blocks.acquire(b"a") == first
    blocks.release([second])
    assert blocks.allocate(1) == [second]


Action = tuple[str, int]
ACTIONS = st.lists(
    st.tuples(st.sampled_from(["allocate", "acquire", "publish", "release"]), st.integers(0, 30)),
    max_size=120,
)


@given(size=st.integers(1, 12), actions=ACTIONS)
def test_ownership_is_exact(size: int, actions: list[Action]) -> None:
    """Against a plain model: a list of what each owner holds."""
    blocks = BlockManager(size)
    holders: list[int] = []  # one entry per ownership
    names: dict[int, bytes] = {}
    for action, number in actions:
        if action == "allocate":
            count = number % (blocks.num_free + 1)
            taken = blocks.allocate(count)
            assert not set(taken) & set(holders)
            assert len(set(taken)) == count
            for block in taken:
                names.pop(block, None)
            holders += taken
        elif action == "acquire":
            block = blocks.acquire(str(number).encode())
            if block is not None:
                assert names[block] == str(number).encode()
                holders.append(block)
        elif action == "publish" and holders:
            block, name = holders[number % len(holders)], str(number).encode()
            if not blocks.is_published(name) and block not in names:
                names[block] = name
            blocks.publish(block, name)
        elif action == "release" and holders:
            blocks.release([holders.pop(number % len(holders))])
        assert blocks.num_used == len(set(holders))
        assert blocks.num_free == size - len(set(holders))
        assert blocks.num_cached == len(set(names) - set(holders))
    blocks.release(holders)
    assert (blocks.num_used, blocks.num_free) == (0, size)
    assert sorted(blocks.allocate(size)) == list(range(size))
