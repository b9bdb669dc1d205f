"""The leak check itself: what it must notice and what it must forgive."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

# Each test says by its name whether the check must fail it.
LEAKY_TESTS = """
import os, pathlib, subprocess, sys, uuid

import conftest

conftest.LEAK_PATIENCE = 0.2
kept = []


def test_clean(no_leaks):
    with open(__file__), subprocess.Popen(["true"]):
        assert "torch" not in sys.modules


def test_leaky_descriptor(no_leaks):
    kept.append(open(__file__))


def test_leaky_segment(no_leaks):
    path = pathlib.Path(f"/dev/shm/omnistage-leaktest-{uuid.uuid4().hex}-0")
    path.touch()
    kept.append(path)


def test_leaky_process(no_leaks):
    kept.append(subprocess.Popen(["sleep", "60"]))


def test_clean_after_the_leaks(no_leaks):
    pass


def teardown_module():
    opened, path, process = kept
    opened.close()
    path.unlink()
    process.kill()
    process.wait()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts what /proc and /dev/shm show")
def test_no_leaks_notices_descriptors_segments_and_processes(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(Path(__file__).with_name("conftest.py").read_text())
    (tmp_path / "test_leaky.py").write_text(LEAKY_TESTS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-p",
        "no:cacheprovider",
        "-c",
        "/dev/null",
        "test_leaky.py",
    ]
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    failed = set(re.findall(r"^ERROR test_leaky.py::(\w+)", finished.stdout, re.MULTILINE))
    assert failed == {"test_leaky_descriptor", "test_leaky_segment", "test_leaky_process"}, finished.stdout
    assert "process " in finished.stdout
    assert "sleep 60" in finished.stdout
    assert re.search(r"left behind: \d+ descriptors, \d+ before: .*test_leaky.py", finished.stdout)
    assert "5 passed, 3 errors" in finished.stdout
