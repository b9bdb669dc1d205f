"""Pipelines from files and flags, with the source of every value.

Built-in pipelines are the YAML files of omnistage.configs.  Everything that is wrong is reported at
once, with file and line.  The written forms are in omnistage.graph.dump.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path as FilePath
from types import MappingProxyType

import msgspec

from omnistage.errors import PipelineError
from omnistage.graph.document import read_yaml
from omnistage.graph.draft import Draft, build, draft_from_plain
from omnistage.graph.fields import hint
from omnistage.graph.flags import apply_flag
from omnistage.graph.problems import Path, pipeline_error
from omnistage.graph.spec import PipelineSpec

_CONFIGS = "omnistage.configs"  # by name: that package lies above this one


@dataclass(frozen=True)
class Resolved:
    """A valid pipeline and where its values come from.

    sources: path -> "starter.yaml:12", "flag thinker.max_num_seqs=8" or what an `adapt` says; a path that
    is absent has its default.  Paths are ("stages", "thinker", "max_num_seqs"), ("edges", "a->b", "chunk")
    or ("model",).
    """

    spec: PipelineSpec
    sources: Mapping[Path, str]

    def source(self, path: Path) -> str:
        return self.sources.get(path, "default")


def built_in_names() -> tuple[str, ...]:
    """Names that load_pipeline takes without a file."""
    files = resources.files(_CONFIGS).iterdir()
    return tuple(sorted(file.name[:-5] for file in files if file.name.endswith(".yaml")))


def load_pipeline(source: str | os.PathLike[str], *, overrides: Sequence[str] = ()) -> PipelineSpec:
    """The pipeline of a YAML file or of a built-in name.

    overrides: settings such as "thinker.max_num_seqs=8", later ones win.
    Raises PipelineError that lists every problem with its line.
    """
    return resolve_pipeline(source, overrides=overrides).spec


def resolve_pipeline(
    source: str | os.PathLike[str],
    *,
    overrides: Sequence[str] = (),
    adapt: Callable[[Draft], None] | None = None,
) -> Resolved:
    """As load_pipeline, with the source of each value.

    adapt: changes what was written before the overrides are applied; it notes what it sets in
    Draft.origins.
    """
    text, filename, folder = _read(source)
    return resolve_text(text, filename=filename, folder=folder, overrides=overrides, adapt=adapt)


def resolve_text(
    text: str,
    *,
    filename: str = "pipeline",
    folder: FilePath | None = None,
    overrides: Sequence[str] = (),
    adapt: Callable[[Draft], None] | None = None,
) -> Resolved:
    """As resolve_pipeline, from YAML text.  filename: for messages.  folder: where relative paths start."""
    draft = draft_from_plain(read_yaml(text, filename), folder=folder)
    if adapt is not None:
        adapt(draft)
    for flag in overrides:
        apply_flag(draft, flag)
    spec = build(draft)
    if draft.problems:
        name = draft.pipeline.get("name", filename)
        problems = sorted(draft.problems, key=lambda problem: draft.line(problem.path))
        raise pipeline_error(str(name), problems, lambda path: _where(draft, filename, path))
    sources = {path: f"{filename}:{line}" for path, line in draft.lines.items() if line}
    sources |= draft.origins
    sources |= {path: f"flag {flag}" for path, flag in draft.flags.items()}
    return Resolved(spec, MappingProxyType(sources))


def from_json(data: bytes) -> PipelineSpec:
    """The pipeline that omnistage.graph.dump.to_json wrote.  Raises PipelineError."""
    try:
        plain = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise PipelineError(f"the pipeline is not valid JSON: {error}") from None
    draft = draft_from_plain(plain)
    spec = build(draft)
    if draft.problems:
        raise pipeline_error(str(draft.pipeline.get("name", "from JSON")), draft.problems)
    return spec


def _where(draft: Draft, filename: str, path: Path) -> str:
    if path and path[0].startswith("--set"):
        return ""
    for length in range(len(path), 0, -1):
        if path[:length] in draft.flags:
            return f"--set {draft.flags[path[:length]]}"
        if path[:length] in draft.lines:
            break
    line = draft.line(path)
    return f"{filename}:{line}" if line else filename


def _read(source: str | os.PathLike[str]) -> tuple[str, str, FilePath | None]:
    """Text, name for messages, and folder of a pipeline file or built-in."""
    name = os.fspath(source)
    is_file = isinstance(source, os.PathLike) or name.endswith((".yaml", ".yml")) or os.sep in name
    if not is_file:
        if name not in built_in_names():
            remedy = hint(name, built_in_names())
            raise PipelineError(f"no built-in pipeline {name!r}; {remedy}; or give a file that ends in .yaml")
        file = resources.files(_CONFIGS) / f"{name}.yaml"
        return file.read_text(encoding="utf-8"), f"{name}.yaml", None
    path = FilePath(name)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise PipelineError(f"{name} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise PipelineError(f"{name} is not UTF-8 text (byte {error.start})") from None
    return text, path.name, path.resolve().parent
