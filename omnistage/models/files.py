"""JSON files of a checkpoint that may be left out.  Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from omnistage.errors import WeightsError


def read_settings(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no file.  Raises WeightsError for anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be read as JSON ({error}); fetch the model again") from error
    if not isinstance(content, dict):
        raise WeightsError(f"{path} holds a {type(content).__name__}, not an object; fetch the model again")
    return content
