"""A hub cache as huggingface_hub lays it out, for tests that must not ask the hub."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

REVISION = "0123456789abcdef0123456789abcdef01234567"


def use_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make `folder` the hub's cache, for this process and those it starts."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setenv("HF_HUB_CACHE", str(folder))
    return folder


def fill_cache(cache: Path, name: str, model: Path) -> Path:
    """Put a copy of a model directory into the cache.  Returns its snapshot there."""
    folder = cache / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(REVISION)
    snapshot = folder / "snapshots" / REVISION
    (folder / "blobs").mkdir()
    snapshot.mkdir(parents=True)
    for path in model.iterdir():
        blob = folder / "blobs" / path.name
        shutil.copy(path, blob)
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot
