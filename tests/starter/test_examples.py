"""The examples do what they say, with their functions in the middle of the starter's pipeline."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from omnistage.graph import load_pipeline
from tests.starter.asking import AUDIO, ROOT, chat, start

EXAMPLES = ROOT / "examples"
MAIN_MEMORY = "Repeat after me: RAM is fast."


def load(name):
    """An example as a module that is not run."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def glossary(starter_dir):
    with start(load("glossary").build_graph()) as running:
        yield running


def test_functions_change_what_is_written(glossary):
    replies = glossary.ask(
        chat(MAIN_MEMORY, max_tokens=24), chat("Explain RAM in two sentences.", max_tokens=60)
    )
    for reply in replies:
        assert reply.text
        assert reply.text == reply.text.upper()
        assert "RAM" not in reply.text.replace("PROGRAM", "")
        assert "MAIN MEMORY" in reply.text


def test_functions_change_what_is_spoken(glossary):
    """The capitals are for readers alone; the glossary is for listeners, too."""
    reply = glossary.omni.generate([chat(MAIN_MEMORY, max_tokens=24, seed=1, **AUDIO)])[0]
    assert {timing.stage for timing in reply.timings} == {
        "thinker",
        "glossary",
        "capitals",
        "talker",
        "vocoder",
    }
    assert reply.audio.duration > 1.0
    [again] = glossary.ask(chat(MAIN_MEMORY, max_tokens=24, seed=1, **AUDIO))
    assert again.text == reply.text
    assert (again.pcm == reply.audio.samples).all()


def test_the_file_is_the_same_pipeline():
    assert load_pipeline(EXAMPLES / "glossary.yaml") == load("glossary").build_graph().build()


def test_openai_client(server, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["openai_client.py", server])
    load("openai_client").main()
    answer, heard = capsys.readouterr().out.strip().splitlines()
    assert "cat" in answer.lower()
    assert "fox jumps over the lazy dog" in heard.lower()
    assert (tmp_path / "answer.wav").read_bytes()[:4] == b"RIFF"
    assert (tmp_path / "fox.mp3").stat().st_size > 5000


@pytest.mark.processes
def test_glossary_as_a_program(starter_dir, tmp_path, no_leaks):
    """As README says to run it: from anywhere, with a process per stage."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / "glossary.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "CENTRAL PROCESSING UNIT" in done.stdout
    assert "MAIN MEMORY" in done.stdout
    assert done.stdout.isupper()
    assert done.stdout.rstrip().endswith("...")  # at least two pieces of sound
    assert "Traceback" not in done.stderr
