"""Models by their name on the Hugging Face hub: from its local cache, or downloaded into it.

The cache is huggingface_hub's own (HF_HUB_CACHE), so that what another program fetched is not fetched
again.  Imports neither torch nor transformers.  Knows no architecture.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from omnistage.errors import FetchError, WeightsError
from omnistage.graph.checkpoint import check_shards

_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
# Weights, configuration, templates and every sort of tokenizer.
NEEDED = ("*.json", "*.jinja", "*.txt", "*.safetensors", "*.model")
_IN_FOLDERS = "*/*"  # other formats of the same weights


def is_hub_name(text: str) -> bool:
    """Whether the text has the form "org/name"."""
    return _NAME.fullmatch(text) is not None and ".." not in text


def cached_model(name: str) -> Path | None:
    """The directory of a model that is complete in the local cache, None otherwise.  Asks no server."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        directory = Path(snapshot_download(name, local_files_only=True, allow_patterns=list(NEEDED)))
    except (LocalEntryNotFoundError, OSError):
        return None
    return directory if _is_complete(directory) else None


def download_model(name: str) -> Path:
    """Bring a model into the cache, up to date, and return its directory.

    Shows huggingface_hub's progress bars if standard error is a terminal.
    Raises FetchError with the remedy.
    """
    import httpx
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        directory = snapshot_download(name, allow_patterns=list(NEEDED), ignore_patterns=_IN_FOLDERS)
    except GatedRepoError as error:
        raise FetchError(
            f"{name} is given only to those who accepted its terms; do so on its page and log in with "
            "`hf auth login` (or set HF_TOKEN)"
        ) from error
    except RepositoryNotFoundError as error:
        raise FetchError(
            f"the hub at {constants.ENDPOINT} has no model {name!r}, or not for you; check the name, or log "
            "in with `hf auth login`"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, httpx.HTTPError, OSError) as error:
        raise FetchError(_unreachable(name, constants.ENDPOINT, constants.HF_HUB_CACHE, error)) from error
    found = Path(directory)
    try:
        check_shards(found)
    except WeightsError as error:
        raise FetchError(f"{name} on the hub is not whole: {error.message}") from error
    return found


def _is_complete(directory: Path) -> bool:
    try:
        check_shards(directory)
    except WeightsError:
        return False
    return (directory / "config.json").is_file() and any(directory.glob("*.safetensors"))


def _unreachable(name: str, endpoint: str, cache: str, error: Exception) -> str:
    reason = str(error.__cause__ or error).strip().splitlines()
    return (
        f"{name} is not in the cache {cache} and cannot be downloaded from {endpoint} "
        f"({reason[0] if reason else type(error).__name__}); set HF_ENDPOINT to a mirror, or HF_HUB_CACHE to "
        "a cache that has it, or download it elsewhere and give its directory"
    )
