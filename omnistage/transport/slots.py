"""A producer's pool of slots in shared segments: allocation and reference counts.

The producer alone keeps the books, in its own memory, so they survive the death of any reader.
A slot is held by names (addresses of consumers, or the producer's own), each with a count.  Slot
numbers are never used twice: a late release cannot hit the slot's next tenant, and the number
written before the data lets a reader notice a reference that outlived its slot.  Knows neither
messages nor where segments come from.
"""

from __future__ import annotations

import bisect
import struct
from dataclasses import dataclass, field
from typing import Protocol

from omnistage.errors import TransportError

ALIGNMENT = 64  # bytes; a cache line, and enough for every vector load
HEADER_BYTES = ALIGNMENT  # the slot's number as uint64, padded
SEGMENT_BYTES = 16 << 20
MAX_POOL_BYTES = 256 << 20


class Segment:
    """One mapped piece of shared memory.  buffer: all its bytes."""

    def __init__(self, name: str, buffer: memoryview) -> None:
        self.name = name
        self.buffer = buffer


class SegmentStore(Protocol):
    """Where segments come from; the producer creates and removes, a reader attaches and detaches."""

    def create(self, nbytes: int) -> Segment | None:
        """None if the system has no such memory left."""

    def remove(self, segment: Segment) -> None: ...

    def attach(self, name: str) -> Segment:
        """Read-only.  Raises FileNotFoundError once the producer has removed it."""

    def detach(self, segment: Segment) -> None: ...

    def exists(self, name: str) -> bool: ...


@dataclass(eq=False)
class Slot:
    """offset: of the data, in the segment.  block: (start, size) including header and padding."""

    number: int
    segment: Segment
    offset: int
    nbytes: int
    block: tuple[int, int]
    holders: dict[str, int] = field(default_factory=dict)

    def data(self) -> memoryview:
        return self.segment.buffer[self.offset : self.offset + self.nbytes].toreadonly()


class _Arena:
    """First-fit over one segment.  free: (start, size) in order, never adjacent."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.free = [(0, segment.buffer.nbytes)]

    @property
    def is_empty(self) -> bool:
        return self.free == [(0, self.segment.buffer.nbytes)]

    def take(self, size: int) -> int | None:
        for index, (start, available) in enumerate(self.free):
            if available >= size:
                rest = [(start + size, available - size)] if available > size else []
                self.free[index : index + 1] = rest
                return start
        return None

    def give(self, start: int, size: int) -> None:
        index = bisect.bisect(self.free, (start, 0))
        if index < len(self.free) and self.free[index][0] == start + size:
            size += self.free.pop(index)[1]
        if index > 0 and sum(self.free[index - 1]) == start:
            start, before = self.free.pop(index - 1)
            size += before
            index -= 1
        self.free.insert(index, (start, size))


class SlotPool:
    """max_bytes: of all segments together.  A tensor larger than segment_bytes gets its own segment."""

    def __init__(
        self,
        store: SegmentStore,
        *,
        max_bytes: int = MAX_POOL_BYTES,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._segment_bytes = segment_bytes
        self._arenas: dict[str, _Arena] = {}
        self._slots: dict[int, Slot] = {}
        self._last_number = 0
        self.bytes_in_use = 0  # data, headers and padding

    @property
    def slots_in_use(self) -> int:
        return len(self._slots)

    @property
    def segment_bytes(self) -> int:
        """Bytes of shared memory that exist, used or not."""
        return sum(arena.segment.buffer.nbytes for arena in self._arenas.values())

    def put(self, data: bytes | memoryview, holder: str) -> Slot | None:
        """Copy bytes into a new slot, held once by `holder`.  None if the pool is full."""
        source = memoryview(data).cast("B")
        size = HEADER_BYTES + -(-source.nbytes // ALIGNMENT) * ALIGNMENT
        place = self._find(size)
        if place is None:
            return None
        arena, start = place
        self._last_number += 1
        segment, offset = arena.segment, start + HEADER_BYTES
        slot = Slot(self._last_number, segment, offset, source.nbytes, (start, size), {holder: 1})
        write_header(segment, offset, slot.number)
        segment.buffer[offset : offset + source.nbytes] = source
        self._slots[slot.number] = slot
        self.bytes_in_use += size
        return slot

    def hold(self, slot: Slot, holder: str) -> None:
        """One more reference.  Raises TransportError if the slot is already free."""
        if slot.number not in self._slots:
            raise TransportError(f"shared tensor {slot.number} was sent after it was unshared")
        slot.holders[holder] = slot.holders.get(holder, 0) + 1

    def release(self, number: int, holder: str) -> bool:
        """Drop one of `holder`'s references; False if it has none (any more)."""
        slot = self._slots.get(number)
        if slot is None or holder not in slot.holders:
            return False
        slot.holders[holder] -= 1
        if slot.holders[holder] == 0:
            del slot.holders[holder]
            if not slot.holders:
                self._free(slot)
        return True

    def forget(self, holder: str) -> int:
        """Drop all that a dead holder held; returns how many slots that freed."""
        before = len(self._slots)
        for slot in [slot for slot in self._slots.values() if holder in slot.holders]:
            del slot.holders[holder]
            if not slot.holders:
                self._free(slot)
        return before - len(self._slots)

    def close(self) -> None:
        """Remove every segment; readers that have one attached keep their mapping."""
        for arena in self._arenas.values():
            self._store.remove(arena.segment)
        self._arenas.clear()
        self._slots.clear()
        self.bytes_in_use = 0

    def _free(self, slot: Slot) -> None:
        write_header(slot.segment, slot.offset, 0)
        del self._slots[slot.number]
        self._arenas[slot.segment.name].give(*slot.block)
        self.bytes_in_use -= slot.block[1]

    def _find(self, size: int) -> tuple[_Arena, int] | None:
        for arena in self._arenas.values():
            start = arena.take(size)
            if start is not None:
                return arena, start
        nbytes = max(size, self._segment_bytes)
        if self.segment_bytes + nbytes > self._max_bytes:
            self._remove_empty()
        if self.segment_bytes + nbytes > self._max_bytes:
            return None
        segment = self._store.create(nbytes)
        if segment is None:
            return None
        arena = self._arenas[segment.name] = _Arena(segment)
        start = arena.take(size)
        return None if start is None else (arena, start)

    def _remove_empty(self) -> None:
        for arena in [arena for arena in self._arenas.values() if arena.is_empty]:
            del self._arenas[arena.segment.name]
            self._store.remove(arena.segment)


def write_header(segment: Segment, offset: int, number: int) -> None:
    struct.pack_into("<Q", segment.buffer, offset - HEADER_BYTES, number)


def read_header(segment: Segment, offset: int) -> int:
    """The number of the slot whose data begins at `offset`, 0 if it is free."""
    number: int = struct.unpack_from("<Q", segment.buffer, offset - HEADER_BYTES)[0]
    return number
