"""Segments as mapped files, and the reader's cache of the segments it has attached.

Plain files opened and mapped here, not multiprocessing.shared_memory: its resource tracker unlinks
segments that a reader merely attached.  Names are omnistage-<run id>-<worker>-<n>, so a supervisor can
remove what a killed producer left.  Pages are reserved at creation: a full /dev/shm is an answer
(None), not a SIGBUS at some later write.  Knows neither messages nor reference counts.
"""

from __future__ import annotations

import itertools
import mmap
import os
import re
from collections.abc import Callable
from pathlib import Path

from omnistage.errors import TransportError
from omnistage.transport.addresses import check_name, shared_directory
from omnistage.transport.codec import SlotReference
from omnistage.transport.slots import HEADER_BYTES, Segment, SegmentStore, read_header

_SEGMENT_NAME = re.compile(r"omnistage-[A-Za-z0-9_.-]+-\d+")


class SegmentGone(Exception):
    """The producer of a received tensor is dead or closed; raised and caught inside the transport."""


class _MappedSegment(Segment):
    def __init__(self, name: str, mapping: mmap.mmap) -> None:
        super().__init__(name, memoryview(mapping))
        self._mapping = mapping

    def close(self) -> None:
        """Unmap now, or with the last tensor that still looks into it."""
        self.buffer.release()
        try:
            self._mapping.close()
        except BufferError:
            del self._mapping


def _prefix(run_id: str, worker: str) -> str:
    if "-" in check_name(run_id):
        raise TransportError(f"run id {run_id!r} may not contain '-', which separates it from the worker")
    return f"omnistage-{run_id}-{check_name(worker)}-"


class FileSegments:
    """SegmentStore over files of one directory; run_id and worker name the files that create() makes."""

    def __init__(self, *, run_id: str, worker: str, directory: Path | None = None) -> None:
        self._prefix = _prefix(run_id, worker)
        self._directory = shared_directory() if directory is None else directory
        self._numbers = itertools.count()

    def create(self, nbytes: int) -> Segment | None:
        while True:
            path = self._directory / f"{self._prefix}{next(self._numbers)}"
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                break
            except FileExistsError:  # an earlier process of this name was killed
                continue
            except OSError:
                return None
        try:
            reserve_pages(descriptor, nbytes)
            return _MappedSegment(path.name, mmap.mmap(descriptor, nbytes))
        except OSError:
            path.unlink()
            return None
        finally:
            os.close(descriptor)

    def remove(self, segment: Segment) -> None:
        (self._directory / segment.name).unlink(missing_ok=True)
        self.detach(segment)

    def attach(self, name: str) -> Segment:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self._directory / name, flags)
        try:
            return _MappedSegment(name, mmap.mmap(descriptor, 0, prot=mmap.PROT_READ))
        finally:
            os.close(descriptor)

    def detach(self, segment: Segment) -> None:
        if isinstance(segment, _MappedSegment):
            segment.close()

    def exists(self, name: str) -> bool:
        return (self._directory / name).exists()


def reserve_pages(descriptor: int, nbytes: int) -> None:
    """Raises OSError if the file system has less room than that."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, nbytes)
    else:
        os.ftruncate(descriptor, nbytes)


def remove_leftovers(run_id: str, worker: str, directory: Path | None = None) -> int:
    """Unlink the segments of a dead worker; returns how many.  Call it before restarting the worker."""
    pattern = re.compile(re.escape(_prefix(run_id, worker)) + r"\d+")
    paths = [path for path in (directory or shared_directory()).iterdir() if pattern.fullmatch(path.name)]
    for path in paths:
        path.unlink(missing_ok=True)
    return len(paths)


class AnonymousSegments:
    """SegmentStore inside one process, for tests and the in-memory network.

    Threads may share one store: each name is created and removed by one of them.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, memoryview] = {}
        self._numbers = itertools.count()

    def create(self, nbytes: int) -> Segment | None:
        name = f"omnistage-memory-{next(self._numbers)}"
        self._buffers[name] = memoryview(bytearray(nbytes))
        return Segment(name, self._buffers[name])

    def remove(self, segment: Segment) -> None:
        del self._buffers[segment.name]

    def attach(self, name: str) -> Segment:
        buffer = self._buffers.get(name)
        if buffer is None:
            raise FileNotFoundError(name)
        return Segment(name, buffer.toreadonly())

    def detach(self, segment: Segment) -> None:
        """Nothing to unmap: the last view of the buffer frees it."""

    def exists(self, name: str) -> bool:
        return name in self._buffers


class AttachedSegments:
    """A reader's mappings, kept per producer until it is forgotten or has removed the file."""

    def __init__(self, store: SegmentStore) -> None:
        self._store = store
        self._segments: dict[str, tuple[str, Segment]] = {}  # name -> (owner, segment)

    def __len__(self) -> int:
        return len(self._segments)

    def view(self, reference: SlotReference) -> memoryview:
        """The slot's bytes, read-only, no copy.

        Raises SegmentGone if the producer removed the segment, ValueError for a wrong reference.
        """
        segment = self._attached(reference)
        end = reference.offset + reference.nbytes
        if reference.nbytes < 0 or not HEADER_BYTES <= reference.offset <= end <= segment.buffer.nbytes:
            raise ValueError(f"bytes {reference.offset} to {end} of a segment of {segment.buffer.nbytes}")
        number = read_header(segment, reference.offset)
        if number != reference.slot:
            raise ValueError(
                f"slot {reference.slot} of {reference.owner} now belongs to {number or 'nobody'}"
            )
        return segment.buffer[reference.offset : end].toreadonly()

    def forget(self, owner: str) -> None:
        self._detach(lambda name: self._segments[name][0] == owner)

    def close(self) -> None:
        self._detach(lambda name: True)

    def _attached(self, reference: SlotReference) -> Segment:
        known = self._segments.get(reference.segment)
        if known is not None:
            return known[1]
        if not _SEGMENT_NAME.fullmatch(reference.segment):
            raise ValueError(f"{reference.segment!r} does not name a segment")
        self._detach(lambda name: not self._store.exists(name))  # removed by producers that live on
        try:
            segment = self._store.attach(reference.segment)
        except FileNotFoundError as error:
            raise SegmentGone(reference.segment) from error
        self._segments[reference.segment] = (reference.owner, segment)
        return segment

    def _detach(self, is_unwanted: Callable[[str], bool]) -> None:
        for name in [name for name in self._segments if is_unwanted(name)]:
            self._store.detach(self._segments.pop(name)[1])
