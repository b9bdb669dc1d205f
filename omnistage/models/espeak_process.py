"""A process of its own around eSpeak NG: text lines in, phoneme lines out.

Run as `python -m omnistage.models.espeak_process`.  The library is GPL and not thread-safe, so it
lives behind a pipe and nothing else is loaded here (no torch, no numpy).  One JSON object per line:
request {"voice": "en-us", "text": "..."}; reply {"clauses": [[phonemes, consumed_text], ...]} or
{"error": "..."}.  The process ends when its input closes, hence when its parent dies.
Knows nothing of voices' phoneme maps or of audio: omnistage.models.phonemes does that.
"""

from __future__ import annotations

import ctypes
import json
import signal
import sys
from typing import BinaryIO

# Values from eSpeak NG's speak_lib.h.
AUDIO_OUTPUT_SYNCHRONOUS = 2
CHARS_UTF8 = 1
PHONEMES_IPA = 0x02


class Espeak:
    """The eSpeak NG library, initialised for text to phonemes only.

    Raises OSError if the library cannot be loaded or finds no data.
    """

    def __init__(self) -> None:
        import espeakng_loader

        self._library = ctypes.CDLL(espeakng_loader.get_library_path())
        data_path = str(espeakng_loader.get_data_path())
        self._library.espeak_TextToPhonemes.restype = ctypes.c_char_p
        self._library.espeak_TextToPhonemes.argtypes = [
            ctypes.POINTER(ctypes.c_void_p),
            ctypes.c_int,
            ctypes.c_int,
        ]
        if self._library.espeak_Initialize(AUDIO_OUTPUT_SYNCHRONOUS, 0, data_path.encode(), 0) < 0:
            raise OSError(f"eSpeak NG found no usable data in {data_path}; reinstall espeakng-loader")
        self._voice = ""

    def clauses(self, text: str, voice: str) -> list[tuple[str, str]]:
        """Phonemes (IPA) and consumed text of each clause, in order.

        The consumed text ends at or one word character after the clause's punctuation, for the
        library reads ahead.  Raises ValueError if the voice does not exist.
        """
        if voice != self._voice:
            if self._library.espeak_SetVoiceByName(voice.encode()) != 0:
                raise ValueError(f"eSpeak NG has no voice {voice!r}; choose one it lists, such as 'en-us'")
            self._voice = voice
        encoded = text.replace("\0", " ").encode()
        buffer = ctypes.create_string_buffer(encoded)  # must outlive the loop: cursor points into it
        start = ctypes.addressof(buffer)
        cursor = ctypes.c_void_p(start)
        consumed, found = 0, []
        while cursor.value is not None and consumed < len(encoded):
            phonemes = self._library.espeak_TextToPhonemes(ctypes.byref(cursor), CHARS_UTF8, PHONEMES_IPA)
            end = len(encoded) if cursor.value is None else cursor.value - start
            found.append(
                (phonemes.decode() if phonemes else "", encoded[consumed:end].decode(errors="replace"))
            )
            consumed = end
        return found


def answer(espeak: Espeak, line: bytes) -> dict[str, object]:
    """The reply to one request line; a request that cannot be served is answered by an error."""
    request = json.loads(line)
    try:
        return {"clauses": espeak.clauses(request["text"], request["voice"])}
    except ValueError as error:
        return {"error": str(error)}


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer request lines until the input ends or nobody reads the replies any more."""
    espeak = Espeak()
    try:
        for line in requests:
            replies.write(json.dumps(answer(espeak, line), ensure_ascii=False).encode() + b"\n")
            replies.flush()
    except BrokenPipeError:
        return


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the parent's business
    serve(sys.stdin.buffer, sys.stdout.buffer)
