"""Token ids to text as they come, with stop strings.  Knows a tokenizer, no engine.

The text so far plus every delta equals `tokenizer.decode` of all ids without special tokens (up to
the stop string, if one was met).
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer

_REPLACEMENT = "�"  # what a tokenizer decodes bytes to that are no whole character


class IncrementalDetokenizer:
    """One answer's text.

    stop: strings that end the answer and are not part of it.  stopped: one was met; later ids are
    ignored.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(text for text in stop if text)
        self._ids: list[int] = []
        self._window = 0  # first id of the window that is decoded: some text before what is new
        self._read = 0  # ids whose text has been taken
        self._held = ""  # taken, but a stop string may begin in it
        self.stopped = False

    def push(self, token_ids: Iterable[int]) -> str:
        """Add ids; returns the text that is now certain."""
        if self.stopped:
            return ""
        new_text = ""
        for token_id in token_ids:
            self._ids.append(token_id)
            new_text += self._take(is_last=False)
        return self._release(new_text)

    def flush(self) -> str:
        """The rest, when no more ids will come: held text, and half a character as it decodes."""
        if self.stopped:
            return ""
        text = self._release(self._take(is_last=True))
        text, self._held = text + self._held, ""
        return text

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def _take(self, *, is_last: bool) -> str:
        """Text of the ids not yet read, or nothing while they end inside a character.

        Decoding a window with some context in front gives the same joints (spaces, byte sequences) as
        decoding everything; only the difference the new ids make is taken.
        """
        before = self._decode(self._ids[self._window : self._read])
        after = self._decode(self._ids[self._window :])
        if len(after) <= len(before) or (after.endswith(_REPLACEMENT) and not is_last):
            return ""
        self._window, self._read = self._read, len(self._ids)
        return after[len(before) :]

    def _release(self, new_text: str) -> str:
        """Cut at a stop string; hold back what may be the beginning of one."""
        text = self._held + new_text
        starts = [start for start in (text.find(stop) for stop in self._stop) if start >= 0]
        if starts:
            self.stopped = True
            self._held = ""
            return text[: min(starts)]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
