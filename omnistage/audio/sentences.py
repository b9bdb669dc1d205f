"""Cuts text that arrives in pieces into sentences to be spoken.

The sentences are a function of the whole text alone: a cut is made only once the characters that
could change it have arrived, so it does not matter how the text was chunked.  Knows no voice.
"""

from __future__ import annotations

import re

from omnistage.models.phonemes import ABBREVIATIONS

MAX_CHARACTERS = 300  # about 20 s of speech
FIRST_CHARACTERS = 80  # the first sentence is cut at a clause mark if it is longer than this

_CLOSERS = "\"')\\]”’»*_`"
_MARK = re.compile(rf"[.!?…]+[{_CLOSERS}]*|[。！？]+[」』”’)]*|\n")
_CLAUSE = re.compile(r"[,;:—–][\"')\]”’»*_`]*(?=\s)")
_LAST_WORD = re.compile(r"[\w.]+$")
_LIST_NUMBER = re.compile(r"\W*\d{1,3}$")

_LINK = re.compile(r"!?\[([^\]\n]*)\]\([^)\n]*\)")
_LINE_START = re.compile(r"^[ \t]*(?:#{1,6}\s+|>\s*|[-+•]\s+)+", re.MULTILINE)
_EMPHASIS = re.compile(r"[*`~]+|(?<!\w)_+|_+(?!\w)")
_TABLE = re.compile(r"\s*\|\s*")


class SentenceSplitter:
    """Text deltas in, complete sentences out; one splitter serves one text.

    Sentences end at . ! ? … before a space and a capital, and at line ends that are not mere wrapping;
    not after abbreviations, initials, list numbers or inside decimals.  One longer than max_characters
    is cut at its last clause mark, else between words.  To have sound early, a first sentence longer
    than first_characters is cut at its last clause mark within them, if there is one.  Markdown signs are
    removed, and what is left without a letter or digit is not said.
    """

    def __init__(
        self, *, max_characters: int = MAX_CHARACTERS, first_characters: int = FIRST_CHARACTERS
    ) -> None:
        self._max_characters = max_characters
        self._first_characters = min(first_characters, max_characters)
        self._buffer = ""
        self._is_first = True

    def push(self, text: str) -> list[str]:
        """The sentences that are certain now, in order, each at most max_characters long."""
        self._buffer += text
        return self._drain(is_final=False)

    def flush(self) -> list[str]:
        """The rest, when no more text will come.  The splitter may be used for another text then."""
        sentences = self._drain(is_final=True)
        self._buffer, self._is_first = "", True
        return sentences

    def _drain(self, *, is_final: bool) -> list[str]:
        sentences: list[str] = []
        while True:
            self._buffer = self._buffer.lstrip()
            cut = self._next_cut(is_final)
            if not cut:
                return sentences
            sentence = speakable(self._buffer[:cut])
            self._buffer = self._buffer[cut:]
            if sentence:
                sentences.append(sentence)
                self._is_first = False

    def _next_cut(self, is_final: bool) -> int:
        """Length of the next sentence in the buffer; 0 if more text could change it, or none is left."""
        text = self._buffer
        limits = [self._first_characters] if self._is_first else []
        for limit in (*limits, self._max_characters):
            for match in _MARK.finditer(text):
                if match.end() > limit:
                    break
                verdict = _ends_sentence(text, match, is_final=is_final)
                if verdict is None:
                    return 0
                if verdict:
                    return match.end()
            if len(text) <= limit:
                return len(text) if is_final else 0
            clauses = [match.end() for match in _CLAUSE.finditer(text) if limit // 4 <= match.end() <= limit]
            if clauses:
                return clauses[-1]
        space = max(text.rfind(character, 1, self._max_characters + 1) for character in " \t\n")
        return space if space > 0 else self._max_characters


def _ends_sentence(text: str, match: re.Match[str], *, is_final: bool) -> bool | None:
    """Whether a mark ends a sentence; None while the text that follows is not known."""
    rest = text[match.end() :]
    following = rest.lstrip()
    if not following:
        return True if is_final else None
    mark = match[0]
    if mark[0] in "。！？":
        return True
    gap = rest[: len(rest) - len(following)]
    goes_on = following[0].islower()
    num_newlines = (mark + gap).count("\n")
    if num_newlines:
        return num_newlines > 1 or not goes_on  # one newline before a small letter is mere wrapping
    if not gap or goes_on:
        return False
    return not (mark[:2].rstrip(_CLOSERS) == "." and _is_inner_stop(text[: match.start()]))


def _is_inner_stop(before: str) -> bool:
    """Whether a full stop after this text belongs to an abbreviation, an initial or a list number."""
    word = _LAST_WORD.search(before)
    if word is None:
        return False
    is_initial = len(word[0]) == 1 and word[0].isupper() and word[0] != "I"
    return is_initial or word[0].lower() in ABBREVIATIONS or _LIST_NUMBER.fullmatch(before) is not None


def speakable(text: str) -> str:
    """The text without Markdown's signs, on one line; "" if no letter or digit is left."""
    text = _LINK.sub(r"\1", text)
    text = _LINE_START.sub("", text)
    text = _EMPHASIS.sub("", text)
    text = _TABLE.sub(" ", text)
    text = " ".join(text.split())
    return text if any(character.isalnum() for character in text) else ""
