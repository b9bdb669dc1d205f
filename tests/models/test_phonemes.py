"""Phonemes: the helper process, clause punctuation, and ids as Piper makes them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnistage.errors import InvalidRequest, RequestFailed, WeightsError
from omnistage.models import phonemes as module
from omnistage.models.phonemes import (
    MAX_TEXT_CHARACTERS,
    EspeakPhonemizer,
    PhonemeMap,
    clause_mark,
    join_clauses,
    split_phonemes,
    strip_unspoken,
)

SMALL_MAP = {"_": [0], "^": [1], "$": [2], " ": [3], ".": [4], "a": [5], "b": [6, 7]}


@pytest.fixture(scope="module")
def espeak() -> Iterator[EspeakPhonemizer]:
    phonemizer = EspeakPhonemizer()
    yield phonemizer
    phonemizer.close()


def is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def wait_for_end(pid: int) -> None:
    give_up_at = time.monotonic() + 10
    while is_running(pid):
        assert time.monotonic() < give_up_at, f"process {pid} still runs"
        time.sleep(0.01)


# --- text ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("What is in this picture?", "wˌʌt ɪz ɪn ðɪs pˈɪktʃɚ?"),
        ("Hello world", "həlˈoʊ wˈɜːld."),
        ("It works; fine! Is it: yes, no.", "ɪt wˈɜːks; fˈaɪn! ɪz ɪt: jˈɛs, nˈoʊ."),
        ('He said "no." Then left.', "hiː sˈɛd nˈoʊ. ðˈɛn lˈɛft."),
        ("Dr. Smith left.", "dˈɑːktɚ smˈɪθ lˈɛft."),
        ("Yes... 3.14 it is", "jˈɛs. θɹˈiː pɔɪnt wˈʌn fˈɔːɹ ɪɾ ˈɪz."),
        ("😀 Hello\u200b world", "həlˈoʊ wˈɜːld."),
        ("Hello\0world", "həlˈoʊ wˈɜːld."),
    ],
)
def test_phonemize(espeak: EspeakPhonemizer, text: str, expected: str) -> None:
    assert espeak.phonemize(text, "en-us") == expected


@pytest.mark.parametrize("text", ["", "...", "?!", "😀🎉", " \n ", "—"])
def test_nothing_pronounceable(espeak: EspeakPhonemizer, text: str) -> None:
    assert espeak.phonemize(text, "en-us") == ""


def test_clauses_over_many_lines(espeak: EspeakPhonemizer) -> None:
    spoken = espeak.phonemize("One,\ntwo.\n\nThree; " * 20, "en-us")
    assert spoken.count("wˌʌn, tˈuː. θɹˈiː;") == 20


def test_the_voice_matters(espeak: EspeakPhonemizer) -> None:
    assert espeak.phonemize("water", "de") != espeak.phonemize("water", "en-us")


def test_an_unknown_voice_is_named(espeak: EspeakPhonemizer) -> None:
    with pytest.raises(RequestFailed, match="no voice 'xx-klingon'"):
        espeak.phonemize("hello", "xx-klingon")
    assert espeak.phonemize("hello there", "en-us")  # it still serves


def test_too_long_a_text_is_refused(espeak: EspeakPhonemizer) -> None:
    assert espeak.phonemize("ж" * MAX_TEXT_CHARACTERS, "en-us")
    with pytest.raises(InvalidRequest, match=r"8001 characters.*8000"):
        espeak.phonemize("a" * (MAX_TEXT_CHARACTERS + 1), "en-us")


@pytest.mark.parametrize(
    ("consumed", "is_last", "mark"),
    [
        ("hello, t", False, ","),
        ("yes? ", False, "?"),
        ('"no."', False, "."),
        ("Mr. S", False, ""),
        ("etc. T", False, "."),
        ("a — n", False, ";"),
        ("wait… N", False, "."),
        ("no mark", True, ""),
        ("at 3.5", True, ""),
        ("the end.", True, "."),
        ("the end?!)  ", True, "?"),
        ("by Dr.", True, "."),
    ],
)
def test_clause_mark(consumed: str, *, is_last: bool, mark: str) -> None:
    assert clause_mark(consumed, is_last=is_last) == mark


def test_join_clauses_drops_silence_and_language_switches() -> None:
    assert join_clauses([("(fr)a(en)", "à, "), ("", "..."), ("b", "b")]) == "a, b."
    assert join_clauses([("", "...")]) == ""
    assert join_clauses([("\u00e7", "ç.")]) == "c\u0327."


def test_strip_unspoken_keeps_signs_that_are_read() -> None:
    assert strip_unspoken("20°C 😀👍🏽 a\u200db\n") == "20°C     a b\n"


# --- ids -----------------------------------------------------------------------------------


def test_encode_puts_pads_between_as_piper_does() -> None:
    phoneme_map = PhonemeMap(SMALL_MAP)
    assert phoneme_map.encode("ab.") == [1, 0, 5, 0, 6, 7, 0, 4, 0, 2]
    assert phoneme_map.encode("aXb^$_") == [1, 0, 5, 0, 6, 7, 0, 2]  # what it lacks is left out
    assert phoneme_map.encode("") == phoneme_map.encode(" .") == phoneme_map.encode("XYZ") == []


def test_phoneme_map_files(tmp_path: Path) -> None:
    path = tmp_path / "phonemes.json"
    with pytest.raises(WeightsError, match="cannot read the phoneme map"):
        PhonemeMap.read(path)
    path.write_text(json.dumps({"a": [1], "_": [0]}))
    with pytest.raises(WeightsError, match=r"lacks \['\^', '\$'\]"):
        PhonemeMap.read(path)
    path.write_text(json.dumps(SMALL_MAP))
    assert PhonemeMap.read(path).encode("a") == [1, 0, 5, 0, 2]


@given(st.text(alphabet="abc ,.", max_size=60), st.integers(1, 12))
def test_split_phonemes_loses_nothing(text: str, limit: int) -> None:
    pieces = split_phonemes(text, limit)
    assert all(0 < len(piece) <= limit for piece in pieces)
    assert "".join(pieces).replace(" ", "") == text.replace(" ", "")


def test_split_phonemes_prefers_clauses() -> None:
    assert split_phonemes("aa bb, cc dd ee", 12) == ["aa bb,", "cc dd ee"]
    assert split_phonemes("aa bb cc dd", 7) == ["aa bb", "cc dd"]
    assert split_phonemes("", 7) == []


# --- the process ---------------------------------------------------------------------------


def test_results_are_cached(espeak: EspeakPhonemizer, monkeypatch: pytest.MonkeyPatch) -> None:
    first = espeak.phonemize("a cached sentence", "en-us")
    monkeypatch.setattr(espeak, "_exchange", lambda line: pytest.fail("asked again"))
    assert espeak.phonemize("a cached sentence", "en-us") == first


def test_a_killed_process_is_started_again() -> None:
    phonemizer = EspeakPhonemizer()
    try:
        phonemizer.start()
        first = phonemizer.pid
        assert first is not None
        assert phonemizer.phonemize("before", "en-us")
        os.kill(first, signal.SIGKILL)
        assert phonemizer.phonemize("after", "en-us")
        assert phonemizer.pid != first
    finally:
        phonemizer.close()
    assert phonemizer.pid is None


def test_a_process_that_never_works_fails_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.sys, "executable", "/bin/true")
    phonemizer = EspeakPhonemizer()
    with pytest.raises(RequestFailed, match="died twice"):
        phonemizer.phonemize("hello", "en-us")
    assert phonemizer.pid is None


def test_a_process_that_hangs_fails_the_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = tmp_path / "hang"
    hanging.write_text("#!/bin/sh\nexec sleep 60\n")
    hanging.chmod(0o755)
    phonemizer = EspeakPhonemizer(timeout=0.2)
    with monkeypatch.context() as patch:
        patch.setattr(module.sys, "executable", str(hanging))
        phonemizer.start()
        pid = phonemizer.pid
        assert pid is not None
        with pytest.raises(RequestFailed, match=r"no answer within 0\.2 s"):
            phonemizer.phonemize("hello", "en-us")
    assert not is_running(pid)
    phonemizer._timeout = 10.0
    assert phonemizer.phonemize("hello", "en-us") == "həlˈoʊ."  # nothing stale is left
    phonemizer.close()


def test_the_process_ends_with_its_parent() -> None:
    script = (
        "import os, time; from omnistage.models.phonemes import EspeakPhonemizer\n"
        "phonemizer = EspeakPhonemizer(); phonemizer.phonemize('hello', 'en-us')\n"
        "print(phonemizer.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        helper = int(parent.stdout.readline())
        assert is_running(helper)
        parent.kill()
    wait_for_end(helper)


def test_the_process_loads_neither_torch_nor_numpy(espeak: EspeakPhonemizer) -> None:
    espeak.phonemize("hello", "en-us")
    mapped = Path(f"/proc/{espeak.pid}/maps").read_text()
    assert "espeak" in mapped
    assert "torch" not in mapped
    assert "numpy" not in mapped


def test_close_leaves_nothing(no_leaks: None) -> None:
    phonemizer = EspeakPhonemizer()
    phonemizer.phonemize("hello", "en-us")
    phonemizer.close()
    phonemizer.close()
