"""Names on the hub: found in a cache with the real layout, or refused with the remedy; no network."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from omnistage.errors import WeightsError
from omnistage.models.hub import is_hub_name
from omnistage.models.registry import resolve_model
from omnistage.serving.launch import fetch_model
from tests.models.hub_cache import fill_cache, use_cache


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_cache(tmp_path / "hub", monkeypatch)


@pytest.fixture
def closed_port() -> int:
    """A port of this machine where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize(
    ("text", "is_name"),
    [
        ("Qwen/Qwen3-Omni-30B-A3B-Instruct", True),
        ("a/b.c_d-1", True),
        ("starter", False),
        ("/a/b", False),
        ("./a", False),
        ("../a", False),
        ("a/b/c", False),
        ("a/..", False),
        ("a/b c", False),
        ("", False),
    ],
)
def test_what_looks_like_a_name(text, is_name):
    assert is_hub_name(text) is is_name


def test_a_cached_model_is_found_without_asking_anybody(cache, qwen3_vl_dir):
    snapshot = fill_cache(cache, "an-org/a-model", qwen3_vl_dir)
    assert resolve_model("an-org/a-model") == snapshot
    assert fetch_model("an-org/a-model") == snapshot


@pytest.mark.parametrize("missing", ["model-00002-of-00003.safetensors", "config.json"])
def test_a_model_that_is_not_whole_is_not_taken(cache, qwen3_vl_dir, missing):
    snapshot = fill_cache(cache, "an-org/a-model", qwen3_vl_dir)
    (snapshot / missing).unlink()
    with pytest.raises(
        WeightsError, match="nor whole in the hub's cache; run `omnistage fetch an-org/a-model`"
    ):
        resolve_model("an-org/a-model")


def test_without_a_network_the_reason_and_the_remedies_are_said(cache, closed_port):
    result = serve_with("an-org/a-model", HF_ENDPOINT=f"http://127.0.0.1:{closed_port}", HF_HUB_OFFLINE="0")
    assert result.returncode == 1
    lines = result.stderr.strip().splitlines()
    assert lines[0] == "downloading an-org/a-model"
    assert f"cannot be downloaded from http://127.0.0.1:{closed_port}" in lines[1]
    assert "Connection refused" in lines[1]
    assert all(remedy in lines[1] for remedy in ("HF_ENDPOINT", "HF_HUB_CACHE", "give its directory"))
    assert lines[2:] == [
        "omnistage: the weights of an-org/a-model could not be fetched; the reason stands above"
    ]


def test_offline_says_that_it_was_asked_for(cache):
    result = serve_with("an-org/a-model", HF_HUB_OFFLINE="1")
    assert result.returncode == 1
    assert "HF_HUB_OFFLINE" in result.stderr
    assert "Traceback" not in result.stderr


def serve_with(name: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "omnistage.serving.cli", "serve", name, "--port", "0"]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=100
    )
