"""What the nursery leaves behind when the API process is gone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from omnistage.stages.nursery import Nursery
from omnistage.transport.shared_memory import FileSegments

CONFIG = {"name": "host-0-1", "stage": "host", "run_id": "nursed", "control": "c"}
GUEST = {**CONFIG, "name": "guest-0-1", "stage": "guest"}


@pytest.fixture
def nursery(monkeypatch, tmp_path):
    """Its children sleep instead of becoming workers."""
    ours, theirs = socket.socketpair()
    sleepers = []

    def fork() -> int:
        sleepers.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        return sleepers[-1].pid

    monkeypatch.setattr(os, "fork", fork)
    nursery = Nursery(theirs, str(tmp_path / "run"))
    yield nursery
    for sleeper in sleepers:
        sleeper.stdin.close()
        sleeper.wait()
    ours.close()
    theirs.close()
    os.close(nursery._wake_read)
    os.close(nursery._wake_write)


def test_shared_memory_of_workers_and_their_guests_is_removed(nursery):
    stores = [FileSegments(run_id="nursed", worker=config["name"]) for config in (CONFIG, GUEST)]
    other = FileSegments(run_id="nursed", worker="other-0-1")
    segments = [store.create(4096) for store in (*stores, other)]
    nursery._spawn("host-0-1", {**CONFIG, "guests": [GUEST]})
    nursery._kill_all()
    assert [other.exists(segment.name) for segment in segments] == [False, False, True]
    other.remove(segments[2])
    for segment in segments[:2]:
        other.detach(segment)
