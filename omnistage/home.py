"""Where Omnistage keeps what it fetched."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def omnistage_home() -> Path:
    """$OMNISTAGE_HOME, or `omnistage` in the user's cache folder ($XDG_CACHE_HOME is honoured)."""
    chosen = os.environ.get("OMNISTAGE_HOME")
    if chosen:
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME")
    if cache:
        return Path(cache) / "omnistage"
    home = Path.home()
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "omnistage"
    return home / ".cache" / "omnistage"
