import errno
import os

import pytest

from omnistage.errors import TransportError
from omnistage.transport import shared_memory
from omnistage.transport.codec import SlotReference
from omnistage.transport.shared_memory import (
    AnonymousSegments,
    AttachedSegments,
    FileSegments,
    SegmentGone,
    remove_leftovers,
)
from omnistage.transport.slots import SlotPool


@pytest.fixture(params=["files", "anonymous"])
def store(request, tmp_path):
    return AnonymousSegments() if request.param == "anonymous" else files(tmp_path)


def files(directory, worker="w"):
    return FileSegments(run_id="r", worker=worker, directory=directory)


def reference(slot, owner="producer"):
    return SlotReference(owner, slot.segment.name, slot.number, slot.offset, slot.nbytes)


def mappings():
    with open("/proc/self/maps") as file:
        return {line.split()[-1] for line in file if "omnistage-" in line}


def test_a_reader_sees_the_producers_bytes_and_cannot_write(store):
    pool, attached = SlotPool(store, segment_bytes=4096), AttachedSegments(store)
    slot = pool.put(b"hello", "reader")
    view = attached.view(reference(slot))
    assert bytes(view) == b"hello"
    assert view.readonly
    attached.close()
    pool.close()


def test_a_view_outlives_forget_and_the_producer(tmp_path):
    pool, attached = SlotPool(files(tmp_path), segment_bytes=4096), AttachedSegments(files(tmp_path))
    view = attached.view(reference(pool.put(b"hello", "reader")))
    pool.close()
    attached.forget("producer")
    assert bytes(view) == b"hello"
    assert len(attached) == 0
    assert mappings()
    del view
    assert not mappings()


def test_stale_references_are_noticed(store):
    pool, attached = SlotPool(store, segment_bytes=4096), AttachedSegments(store)
    first = pool.put(b"first", "reader")
    pool.release(first.number, "reader")
    with pytest.raises(ValueError, match="belongs to nobody"):
        attached.view(reference(first))
    second = pool.put(b"other", "reader")
    with pytest.raises(ValueError, match="belongs to 2"):
        attached.view(reference(first))
    assert bytes(attached.view(reference(second))) == b"other"
    pool.close()
    attached.close()


def test_references_to_nowhere_are_refused(store):
    pool, attached = SlotPool(store, segment_bytes=4096), AttachedSegments(store)
    slot = pool.put(b"hello", "reader")
    name = slot.segment.name
    for wrong in (
        SlotReference("p", name, slot.number, slot.offset, 5000),
        SlotReference("p", name, slot.number, 0, 5),
        SlotReference("p", name, slot.number, -64, 5),
        SlotReference("p", name, slot.number, 64, -5),
        SlotReference("p", name, slot.number, 2**60, 5),
        SlotReference("p", "../secret", slot.number, 64, 5),
        SlotReference("p", "omnistage-r-w-../0", slot.number, 64, 5),
    ):
        with pytest.raises(ValueError, match=r"bytes|name"):
            attached.view(wrong)
    pool.close()
    attached.close()


def test_a_removed_segment_is_gone(store):
    pool, attached = SlotPool(store, segment_bytes=4096), AttachedSegments(store)
    slot = pool.put(b"hello", "reader")
    pool.close()
    with pytest.raises(SegmentGone):
        attached.view(reference(slot))


def test_mappings_of_removed_segments_do_not_pile_up(tmp_path):
    pool = SlotPool(files(tmp_path), max_bytes=8192, segment_bytes=4096)
    attached = AttachedSegments(files(tmp_path))
    for nbytes in (1000, 8000, 1000, 8000, 1000):  # each needs the other's room
        slot = pool.put(bytes(nbytes), "reader")
        attached.view(reference(slot))
        pool.release(slot.number, "reader")
        assert len(attached) == 1
    attached.close()
    pool.close()
    assert not mappings()


def test_no_room_left_is_an_answer(tmp_path, monkeypatch):
    def fail(descriptor, nbytes):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shared_memory, "reserve_pages", fail)
    assert SlotPool(files(tmp_path)).put(b"hello", "reader") is None
    assert not list(tmp_path.iterdir())
    missing = FileSegments(run_id="r", worker="w", directory=tmp_path / "missing")
    assert SlotPool(missing).put(b"hello", "reader") is None


def test_pages_are_reserved_at_creation(tmp_path):
    pool = SlotPool(files(tmp_path), segment_bytes=1 << 20)
    pool.put(b"hello", "reader")
    (path,) = tmp_path.iterdir()
    assert path.stat().st_blocks * 512 >= 1 << 20
    assert path.stat().st_mode & 0o777 == 0o600
    pool.close()


def test_leftovers_of_one_worker_are_removed_and_no_others(tmp_path):
    for worker in ("talker", "talker-1", "thinker", "talker-1-x"):
        SlotPool(files(tmp_path, worker), segment_bytes=4096).put(b"left behind", "reader")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "omnistage-r-talker-0",
        "omnistage-r-talker-1-0",
        "omnistage-r-talker-1-x-0",
        "omnistage-r-thinker-0",
    ]
    assert remove_leftovers("r", "talker", tmp_path) == 1
    assert remove_leftovers("r", "talker-1", tmp_path) == 1
    assert remove_leftovers("r", "talker-1", tmp_path) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "omnistage-r-talker-1-x-0",
        "omnistage-r-thinker-0",
    ]


def test_names_that_a_killed_process_left_are_not_reused(tmp_path):
    SlotPool(files(tmp_path), segment_bytes=4096).put(b"left behind", "reader")
    slot = SlotPool(files(tmp_path), segment_bytes=4096).put(b"new", "reader")
    assert slot.segment.name == "omnistage-r-w-1"


@pytest.mark.parametrize(("run_id", "worker"), [("a-b", "w"), ("r", "../w"), ("r", ""), ("/", "w")])
def test_names_that_would_be_ambiguous_or_leave_the_directory_are_refused(run_id, worker):
    with pytest.raises(TransportError, match="may"):
        FileSegments(run_id=run_id, worker=worker)
