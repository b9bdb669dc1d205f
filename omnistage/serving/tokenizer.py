"""A thin wrapper over tokenizers.Tokenizer: ids, special tokens and the bytes of a token.  No torch."""

from __future__ import annotations

import re
from functools import cache, cached_property
from pathlib import Path

import tokenizers

from omnistage.errors import WeightsError
from omnistage.models.tokenizer_files import tokenizer_file

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """Reads `directory`/tokenizer.json, which is made first if there are only older files.

    Raises WeightsError if there is none or it is unreadable.
    """

    def __init__(self, directory: Path) -> None:
        path = tokenizer_file(directory)
        try:
            text = path.read_text(encoding="utf-8")
            self._tokenizer = tokenizers.Tokenizer.from_str(text)
            self._plain = tokenizers.Tokenizer.from_str(text)
        except OSError as error:
            raise WeightsError(f"no tokenizer at {path} ({error.strerror}); fetch the model again") from error
        except Exception as error:  # tokenizers raises bare Exception for malformed files
            raise WeightsError(f"{path} is not a tokenizer ({error}); fetch the model again") from error
        self._plain.encode_special_tokens = True
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self.special_tokens = tuple(token.content for token in added.values() if token.special)
        self._is_byte_level = "ByteLevel" in str(self._tokenizer.decoder)

    @property
    def vocab_size(self) -> int:
        """Ids, added tokens included: valid ids are below it."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: a text has at least len(text) / longest_token tokens."""
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=1)

    @cached_property
    def special_pattern(self) -> re.Pattern[str] | None:
        """Matches the name of any special token, the longest first; None if there are none."""
        names = sorted(self.special_tokens, key=len, reverse=True)
        return re.compile("|".join(re.escape(name) for name in names)) if names else None

    def encode(self, text: str) -> tuple[int, ...]:
        """Ids of a rendered prompt; special tokens in it count as such, none are added."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_plain(self, text: str) -> tuple[int, ...]:
        """Ids of text that a user wrote: the name of a special token is encoded letter by letter."""
        return tuple(self._plain.encode(text, add_special_tokens=False).ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for (part of a character, possibly); b"" for an unknown id."""
        if token_id in self._added:
            return self._added[token_id].encode()
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            table = _byte_of_character()
            return b"".join(
                bytes([table[character]]) if character in table else character.encode() for character in token
            )
        if match := _BYTE_FALLBACK.fullmatch(token):
            return bytes([int(match.group(1), 16)])
        return token.replace("\u2581", " ").encode()


@cache
def _byte_of_character() -> dict[str, int]:
    """The byte-level alphabet of GPT-2's BPE: printable bytes stand for themselves, others for 256 + n."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(256 + position): byte for position, byte in enumerate(others)})
    return table
