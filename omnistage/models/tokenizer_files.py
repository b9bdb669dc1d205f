"""A checkpoint's tokenizer.json, made once from older files where the checkpoint has none.

Imports neither torch nor transformers: a conversion runs in a process of its own, which is this module
as a program.  What it makes is kept under omnistage_home(), by a digest of what it was made from.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path

from omnistage.errors import WeightsError
from omnistage.home import omnistage_home

TOKENIZER_FILE = "tokenizer.json"
_VOCABULARIES = ("vocab.json", "vocab.txt", "tokenizer.model", "sentencepiece.bpe.model", "spiece.model")
_COMPANIONS = (
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
    "config.json",
)
_MAX_SECONDS = 300.0  # of a conversion; importing transformers on a cold disk takes half a minute


def tokenizer_file(directory: Path) -> Path:
    """`directory`/tokenizer.json, or else the one made from the vocabulary in `directory`.

    The first call for a vocabulary takes seconds.  Raises WeightsError, with the remedy, if there is no
    vocabulary either or it cannot be converted.
    """
    own = directory / TOKENIZER_FILE
    if own.is_file():
        return own
    if not any((directory / name).is_file() for name in _VOCABULARIES):
        raise WeightsError(
            f"no tokenizer in {directory}: neither {TOKENIZER_FILE} nor {', '.join(_VOCABULARIES)}; "
            "fetch the model again"
        )
    made = omnistage_home() / "tokenizers" / _digest(directory) / TOKENIZER_FILE
    if not made.is_file():
        _make(directory, made)
    return made


def _digest(directory: Path) -> str:
    """Of the files that a conversion reads, and of the version of transformers that does it."""
    digest = blake2b(version("transformers").encode(), digest_size=16)
    for name in (*_VOCABULARIES, *_COMPANIONS):
        try:
            content = (directory / name).read_bytes()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise WeightsError(
                f"{directory / name} cannot be read ({error.strerror}); fetch the model again"
            ) from error
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _make(directory: Path, made: Path) -> None:
    """Convert into a file beside `made`, and give it its name once it is whole."""
    try:
        made.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="making-", dir=made.parent) as folder:
            unfinished = Path(folder) / TOKENIZER_FILE
            _run(directory, unfinished)
            os.replace(unfinished, made)
    except OSError as error:
        raise WeightsError(
            f"cannot write {made} ({error.strerror or error}); make room there, or set OMNISTAGE_HOME to a "
            "folder that can be written"
        ) from error


def _run(directory: Path, target: Path) -> None:
    command = [sys.executable, "-m", "omnistage.models.tokenizer_files", str(directory), str(target)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_MAX_SECONDS,
            check=False,
        )
        complaint = "" if done.returncode == 0 and target.is_file() else _last_line(done.stderr)
    except subprocess.TimeoutExpired:
        complaint = f"it took more than {_MAX_SECONDS:g} s"
    if complaint:
        raise WeightsError(
            f"the tokenizer in {directory} cannot be converted to {TOKENIZER_FILE} ({complaint}); fetch the "
            f"model again, or put its {TOKENIZER_FILE} there"
        )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "the converter ended without a word"


def _convert(directory: str, target: str) -> None:
    """What the process of its own does."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise SystemExit(f"{type(tokenizer).__name__} has no form that {TOKENIZER_FILE} could hold")
    backend.save(target)


if __name__ == "__main__":
    _convert(*sys.argv[1:])
