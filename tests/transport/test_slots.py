import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnistage.errors import TransportError
from omnistage.transport.shared_memory import AnonymousSegments, FileSegments
from omnistage.transport.slots import ALIGNMENT, HEADER_BYTES, SlotPool, read_header

HOLDERS = ("first", "second", "third")
SEGMENT = 4096
LIMIT = 5 * SEGMENT


def small_pool(store=None):
    return SlotPool(store or AnonymousSegments(), max_bytes=LIMIT, segment_bytes=SEGMENT)


def content(slot_number, nbytes):
    return random.Random(slot_number).randbytes(nbytes)


def check_live_slots(live):
    """Nobody else's bytes in any live slot, and no two of them overlap."""
    spans = sorted((slot.segment.name, *slot.block) for slot, _ in live)
    for (name, start, size), (next_name, next_start, _) in itertools.pairwise(spans):
        assert name != next_name or start + size <= next_start
    for slot, data in live:
        assert bytes(slot.data()) == data
        assert slot.offset % ALIGNMENT == 0
        assert read_header(slot.segment, slot.offset) == slot.number


actions = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "hold", "release", "release", "forget"]),
        st.integers(0, 9),
        st.sampled_from(HOLDERS),
        st.integers(1, 3 * SEGMENT),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(actions)
def test_live_slots_never_overlap_and_everything_comes_back(actions):
    pool = small_pool()
    live = []  # (slot, its bytes)
    held = {}  # slot number -> {holder: count}
    for action, index, holder, nbytes in actions:
        chosen = live[index % len(live)][0] if live else None
        if action == "put":
            data = content(len(held), nbytes)
            slot = pool.put(data, holder)
            if slot is not None:
                assert slot.number not in held
                live.append((slot, data))
                held[slot.number] = {holder: 1}
        elif action == "hold" and chosen is not None:
            pool.hold(chosen, holder)
            held[chosen.number][holder] = held[chosen.number].get(holder, 0) + 1
        elif action == "release" and chosen is not None:
            counts = held[chosen.number]
            assert pool.release(chosen.number, holder) == (counts.get(holder, 0) > 0)
            if counts.get(holder, 0) > 0:
                counts[holder] -= 1
        elif action == "forget":
            pool.forget(holder)
            for counts in held.values():
                counts.pop(holder, None)
        live = [(slot, data) for slot, data in live if any(held[slot.number].values())]
        check_live_slots(live)
        assert pool.slots_in_use == len(live)
        assert pool.bytes_in_use == sum(slot.block[1] for slot, _ in live)
        assert pool.segment_bytes <= LIMIT
    for holder in HOLDERS:
        pool.forget(holder)
    assert (pool.slots_in_use, pool.bytes_in_use) == (0, 0)
    assert pool.put(bytes(LIMIT - HEADER_BYTES), "last") is not None  # free space is in one piece again


def test_a_full_pool_answers_none_and_recovers():
    pool = small_pool()
    slots = []
    while (slot := pool.put(bytes(SEGMENT // 2), "reader")) is not None:
        slots.append(slot)
    assert len(slots) == 5  # one of this size and its header per segment
    assert pool.put(bytes(LIMIT), "reader") is None
    assert pool.release(slots[2].number, "reader")
    assert pool.put(bytes(SEGMENT // 2), "reader") is not None


def test_late_releases_do_not_hit_the_next_tenant():
    pool = small_pool()
    first = pool.put(b"first", "reader")
    pool.forget("reader")
    second = pool.put(b"second", "reader")
    assert second.block == first.block
    assert not pool.release(first.number, "reader")
    assert bytes(second.data()) == b"second"
    assert pool.slots_in_use == 1


def test_sending_what_was_unshared_is_an_error():
    pool = small_pool()
    slot = pool.put(b"data", "producer")
    pool.release(slot.number, "producer")
    with pytest.raises(TransportError, match="unshared"):
        pool.hold(slot, "reader")


def test_empty_segments_make_room_for_a_large_tensor(tmp_path):
    pool = small_pool(FileSegments(run_id="r", worker="w", directory=tmp_path))
    slots = [pool.put(bytes(SEGMENT // 2), "reader") for _ in range(5)]
    for slot in slots[1:]:
        pool.release(slot.number, "reader")
    assert len(list(tmp_path.iterdir())) == 5
    large = pool.put(bytes(3 * SEGMENT), "reader")
    assert large is not None
    assert len(list(tmp_path.iterdir())) == 2
    assert bytes(slots[0].data()) == bytes(SEGMENT // 2)
    pool.close()
    assert not list(tmp_path.iterdir())
