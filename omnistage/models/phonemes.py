"""Text to phonemes to the ids a voice was trained on.

EspeakPhonemizer talks to the helper process of omnistage.models.espeak_process and puts the clauses'
punctuation back, which eSpeak NG drops; PhonemeMap is a voice's alphabet.  Knows no model and no
audio, and imports no torch.
"""

from __future__ import annotations

import json
import re
import selectors
import subprocess
import sys
import threading
import time
import unicodedata
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from omnistage.errors import InvalidRequest, RequestFailed, WeightsError

_ABBREVIATIONS = (
    "mr mrs ms dr prof st mt rev gen col sgt capt lt gov sen rep hon pres vs approx dept fig vol pp al cf ca "
    "jan feb mar apr jun jul aug sep sept oct nov dec e.g i.e u.s u.k"
)
# Words whose full stop ends no sentence even before a capital; in lower case, without the last stop.
ABBREVIATIONS = frozenset(_ABBREVIATIONS.split())

# A line of this many characters is at most 32 KiB in UTF-8, so that writing it never fills the pipe.
MAX_TEXT_CHARACTERS = 8_000

_CLAUSE_MARKS = ".,;:!?…—–"
_CLOSERS = "\"')\\]”’»*_"
# The end of a clause's text.  A clause that is not the last may be followed by one character of the next.
_END_MARK = re.compile(rf"([{_CLAUSE_MARKS}])[{_CLAUSE_MARKS}]*[{_CLOSERS}]*(?:\s+\S?)?$")
_LAST_WORD = re.compile(r"([\w.]+)\W*$")
_SPOKEN_MARK = {"…": ".", "—": ";", "–": ";"}
_LANGUAGE_SWITCH = re.compile(r"\([a-z-]+\)")


class Phonemizer(Protocol):
    """Anything that turns text into a phoneme string with clause punctuation."""

    def phonemize(self, text: str, voice: str) -> str: ...

    def close(self) -> None: ...


def strip_unspoken(text: str) -> str:
    """The text without pictographs and invisible characters, which eSpeak NG would read by name."""

    def is_spoken(character: str) -> bool:
        category = unicodedata.category(character)
        if character == "\n":
            return True
        if category in ("So", "Sk") and character >= "\u2190":  # keeps the degree sign and the like
            return False
        return category not in ("Cc", "Cf", "Cs", "Co", "Cn") and not "\ufe00" <= character <= "\ufe0f"

    return "".join(character if is_spoken(character) else " " for character in text)


def clause_mark(consumed: str, *, is_last: bool) -> str:
    """The punctuation that ended a clause, from the text eSpeak NG consumed for it; "" if none.

    is_last: the text ends here; otherwise `consumed` may end with one character of the next clause.
    """
    stripped = consumed.rstrip()
    match = _END_MARK.search(stripped if is_last else consumed)
    if match is None:
        return ""
    mark = _SPOKEN_MARK.get(match[1], match[1])
    if mark == "." and not is_last:
        word = _LAST_WORD.search(consumed[: match.start(1)])
        if word is not None and word[1].lower() in ABBREVIATIONS:
            return ""
    return mark


def join_clauses(clauses: Sequence[tuple[str, str]]) -> str:
    """One phoneme string of clauses (phonemes, consumed text), each followed by its punctuation.

    The last clause gets a full stop if it has no mark, so that the voice lets its pitch fall.
    Returns "" if nothing is pronounced.
    """
    parts: list[str] = []
    for index, (phonemes, consumed) in enumerate(clauses):
        sounds = unicodedata.normalize("NFD", _LANGUAGE_SWITCH.sub("", phonemes)).strip()
        if sounds:
            parts.append(sounds + clause_mark(consumed, is_last=index == len(clauses) - 1))
    if parts and parts[-1][-1] not in _CLAUSE_MARKS:
        parts[-1] += "."
    return " ".join(parts)


class PhonemeMap:
    """A voice's alphabet: phoneme character to ids.

    ids: as in the voice's JSON ("phoneme_id_map"), with "^" start, "$" end, "_" pad.
    Raises WeightsError if one of these three is missing.
    """

    def __init__(self, ids: Mapping[str, Sequence[int]]) -> None:
        missing = [symbol for symbol in "^$_" if symbol not in ids]
        if missing:
            raise WeightsError(f"the voice's phoneme map lacks {missing}; '^', '$' and '_' are required")
        self._ids = {symbol: tuple(values) for symbol, values in ids.items()}

    @classmethod
    def read(cls, path: Path) -> PhonemeMap:
        """From a JSON file {phoneme: [ids]}.  Raises WeightsError if it cannot be read."""
        try:
            return cls(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, json.JSONDecodeError) as error:
            raise WeightsError(
                f"cannot read the phoneme map {path}: {error}; fetch the voice again"
            ) from error

    def encode(self, phonemes: str) -> list[int]:
        """Start, then every known phoneme, each followed by the pad, then end, as Piper trains its voices.

        Phonemes outside the alphabet are left out.  Returns [] if none is left to say.
        """
        pad = self._ids["_"]
        spoken = [self._ids[phoneme] for phoneme in phonemes if phoneme in self._ids and phoneme not in "^$_"]
        if not any(phoneme in self._ids and phoneme.isalpha() for phoneme in phonemes):
            return []
        sequence = [*self._ids["^"], *pad]
        for ids in spoken:
            sequence += [*ids, *pad]
        return [*sequence, *self._ids["$"]]


class EspeakPhonemizer:
    """Client of the eSpeak NG helper process; safe to call from several threads.

    The process starts at the first call (or at start()) and is started again once per call if it has
    died.  Owns it: close() ends it.  timeout: seconds a call may take.
    """

    def __init__(self, *, timeout: float = 10.0, cache_size: int = 2048) -> None:
        self._timeout = timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._cached = lru_cache(maxsize=cache_size)(self._phonemize)

    def phonemize(self, text: str, voice: str) -> str:
        """Phonemes of the text with its clause punctuation, NFD-normalised; "" if nothing is pronounceable.

        voice: an eSpeak NG voice such as "en-us".  Raises InvalidRequest if the text is longer than
        MAX_TEXT_CHARACTERS, RequestFailed if the helper fails or takes longer than the timeout.
        """
        if len(text) > MAX_TEXT_CHARACTERS:
            raise InvalidRequest(
                f"a text of {len(text)} characters cannot be phonemized at once; the limit is "
                f"{MAX_TEXT_CHARACTERS}: split it into sentences"
            )
        return self._cached(text, voice)

    def start(self) -> None:
        """Start the helper process ahead of the first call."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._spawn()

    @property
    def pid(self) -> int | None:
        """Process id of the helper, None while there is none."""
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """End the helper process.  A later call starts a new one."""
        with self._lock:
            self._stop()

    def _phonemize(self, text: str, voice: str) -> str:
        spoken = strip_unspoken(text)
        if not any(character.isalnum() for character in spoken):
            return ""
        line = json.dumps({"voice": voice, "text": spoken}, ensure_ascii=False).encode() + b"\n"
        with self._lock:
            try:
                reply = self._exchange(line)
            except (EOFError, BrokenPipeError):
                self._stop()
                try:
                    reply = self._exchange(line)
                except (EOFError, BrokenPipeError) as error:
                    self._stop()
                    raise RequestFailed(
                        "the phonemizer process died twice on one text of "
                        f"{len(text)} characters; check that espeakng-loader is installed and works"
                    ) from error
        if "error" in reply:
            raise RequestFailed(f"phonemizer: {reply['error']}")
        return join_clauses([(phonemes, consumed) for phonemes, consumed in reply["clauses"]])

    def _exchange(self, line: bytes) -> dict[str, list[tuple[str, str]]]:
        """One request and its reply.  Raises EOFError or BrokenPipeError if the helper is dead."""
        process = self._process or self._spawn()
        assert process.stdin is not None
        process.stdin.write(line)
        process.stdin.flush()
        reply: dict[str, list[tuple[str, str]]] = json.loads(self._read_line(process))
        return reply

    def _read_line(self, process: subprocess.Popen[bytes]) -> bytes:
        assert process.stdout is not None
        deadline = time.monotonic() + self._timeout
        received = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not received.endswith(b"\n"):
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self._stop()  # a late reply would answer the next request
                    raise RequestFailed(
                        f"the phonemizer gave no answer within {self._timeout} s; "
                        "send shorter text or give the machine more time"
                    )
                piece = process.stdout.read1()  # type: ignore[attr-defined]
                if not piece:
                    raise EOFError
                received += piece
        return bytes(received)

    def _spawn(self) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "omnistage.models.espeak_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        return self._process

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()  # it owns nothing that needs care
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue  # bytes it never read


def split_phonemes(phonemes: str, limit: int) -> list[str]:
    """Cut a phoneme string into pieces of at most `limit` characters.

    Cuts after the last clause mark that fits, else after the last space, else anywhere; joining the
    pieces gives the string again but for the spaces at the cuts.
    """
    pieces = []
    rest = phonemes.strip()
    while len(rest) > limit:
        head = rest[:limit]
        cut = max((match.end() for match in re.finditer(r"[.,;:!?](?= )", head)), default=0)
        cut = cut or head.rfind(" ")
        cut = cut if cut > 0 else limit
        pieces.append(rest[:cut])
        rest = rest[cut:].lstrip()
    return [*pieces, rest] if rest else pieces
