"""This machine's main memory: how much there is, how much is free, and how fast it is.

Reads what Linux says of itself and of this process's control groups.  Knows no pipeline.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


def machine_memory() -> int:
    """Bytes of this machine's main memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def available_memory(*, proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """Bytes that programs can still get without swapping, within the limits of this process's groups.

    proc, cgroups: where the system's own files are; replaced in tests.  Where the system does not say,
    all of the machine's memory.
    """
    return max(0, min([_unused(proc), *_left_in_groups(proc, cgroups)]))


def measure_bandwidth(size: int = 128 * 1024**2) -> float:
    """Bytes/s that one thread reads and writes, the best of five copies of `size` bytes (about 0.1 s)."""
    source = np.ones(size, dtype=np.uint8)
    target = np.empty_like(source)
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        np.copyto(target, source)
        best = max(best, 2 * size / (time.perf_counter() - start))
    return best


def _unused(proc: Path) -> int:
    for line in _text(proc / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return machine_memory()


def _left_in_groups(proc: Path, cgroups: Path) -> Iterator[int]:
    """What each control group (version 2) of this process may still take, from its own to the root."""
    for line in _text(proc / "self" / "cgroup").splitlines():
        number, _, path = line.split(":", 2)
        if number != "0":
            continue
        # In a container the path may name folders that only the host sees; the root is then its own group.
        folder = cgroups / path.lstrip("/")
        for group in (folder, *folder.parents):
            limit = _text(group / "memory.max").strip()
            if limit.isdigit():
                yield int(limit) - _kept(group)
            if group == cgroups:
                return


def _kept(group: Path) -> int:
    """Bytes the group holds and cannot give back: its use without cached files."""
    used = _text(group / "memory.current").strip()
    lines = _text(group / "memory.stat").splitlines()
    cached = sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
    return max(0, int(used or 0) - cached)


def _text(path: Path) -> str:
    """Empty if there is no such file."""
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
