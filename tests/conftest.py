"""What all tests share: one thread each, the starter's weights, and a check that nothing leaks."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import pytest

# Before anything imports torch: idle OpenMP threads that spin make tests slow each other.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[variable] = "1"
os.environ["OMP_WAIT_POLICY"] = "passive"
os.environ["KMP_BLOCKTIME"] = "0"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# The reference implementations must not look for anything on the network.
os.environ["HF_HUB_OFFLINE"] = "1"

LEAK_PATIENCE = 10.0  # seconds that processes and sockets get to disappear


@pytest.fixture(autouse=True)
def one_torch_thread() -> None:
    """One thread per tensor operation, whatever an earlier test chose; imports torch for nobody."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def starter_dir() -> Path:
    """The folder of the starter's converted weights, fetched on the first use on this machine."""
    from omnistage.models.fetch import fetch_starter

    return Path(fetch_starter())


@pytest.fixture(scope="session")
def qwen3_omni_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen3-Omni as the hub would have it, in several shards."""
    from tests.models.qwen_checkpoints import build_qwen3_omni

    return build_qwen3_omni(tmp_path_factory.mktemp("qwen3_omni"))


@pytest.fixture(scope="session")
def qwen3_vl_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen3-VL as the hub would have it, in several shards."""
    from tests.models.qwen_checkpoints import build_qwen3_vl

    return build_qwen3_vl(tmp_path_factory.mktemp("qwen3_vl"))


@dataclass(frozen=True)
class Holdings:
    """What this process has of the machine; each entry says what it is."""

    descriptors: tuple[str, ...]
    segments: frozenset[str]
    processes: frozenset[str]

    def beyond(self, before: Holdings) -> list[str]:
        """What is held now and was not before."""
        leaked = [*sorted(self.segments - before.segments), *sorted(self.processes - before.processes)]
        if len(self.descriptors) > len(before.descriptors):
            fresh = [one for one in self.descriptors if one not in before.descriptors]
            leaked.append(f"{len(self.descriptors)} descriptors, {len(before.descriptors)} before: {fresh}")
        return leaked


def holdings() -> Holdings:
    family = _family()
    return Holdings(tuple(_descriptors()), frozenset(_segments(family)), frozenset(_commands(family)))


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fails a test after which file descriptors, shared memory or child processes remain."""
    # Helpers of multiprocessing that live as long as the interpreter are no leak.
    resource_tracker.ensure_running()
    forkserver.ensure_running()
    gc.collect()
    before = holdings()
    yield
    give_up_at = time.monotonic() + LEAK_PATIENCE
    gc.collect()
    while leaked := holdings().beyond(before):
        if time.monotonic() > give_up_at:
            pytest.fail("left behind: " + "; ".join(leaked))
        time.sleep(0.02)
        gc.collect()


def _descriptors() -> Iterator[str]:
    folder = Path("/proc/self/fd" if Path("/proc/self/fd").exists() else "/dev/fd")
    for entry in os.listdir(folder):
        try:
            yield f"{entry} -> {os.readlink(folder / entry)}" if folder.parts[1] == "proc" else entry
        except FileNotFoundError:
            continue  # the listing's own


def _segments(family: set[int]) -> Iterator[str]:
    """Shared-memory files, without those that only unrelated processes of this machine have mapped."""
    paths = [str(path) for path in Path("/dev/shm").glob("omnistage-*")]
    mapped_elsewhere = ""
    for entry in Path("/proc").glob("[0-9]*") if paths else ():
        if int(entry.name) not in family:
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                mapped_elsewhere += (entry / "maps").read_text()
    yield from (path for path in paths if path not in mapped_elsewhere)


def _family() -> set[int]:
    """This process and its living or unreaped descendants (Linux; elsewhere itself alone)."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            # pid (name) state parent ...; a name may hold spaces and brackets.
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    family = {os.getpid()}
    while grown := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= grown
    return family


def _commands(family: set[int]) -> Iterator[str]:
    for pid in sorted(family - {os.getpid()}):
        with contextlib.suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            yield f"process {pid} {command[:200] or '(ended, not reaped)'}"
