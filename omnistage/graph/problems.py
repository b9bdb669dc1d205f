"""Problems of a pipeline, collected so that a user sees all of them at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from omnistage.errors import PipelineError

Path = tuple[str, ...]


@dataclass(frozen=True)
class Problem:
    """path: where, for instance ("stages", "thinker", "kv_cache").  message: value, limit, remedy."""

    path: Path
    message: str


def pipeline_error(
    pipeline: str, problems: Sequence[Problem], where: Callable[[Path], str] = lambda path: ""
) -> PipelineError:
    """All problems in one error, a line each.  where: the file and line of a path, or ""."""
    lines = []
    for problem in problems:
        place = ".".join(problem.path)
        lines.append(": ".join(text for text in (where(problem.path), place, problem.message) if text))
    if len(lines) == 1:
        return PipelineError(f"pipeline {pipeline!r}: {lines[0]}")
    return PipelineError(f"pipeline {pipeline!r} has {len(lines)} problems:\n  " + "\n  ".join(lines))
