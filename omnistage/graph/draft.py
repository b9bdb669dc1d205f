"""From plain data and flags to a pipeline: what was written, where, and what is wrong with its form.

A Draft holds settings as they were written; build() turns it into a PipelineSpec.  Knows neither
YAML nor JSON: both arrive as mappings and lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from omnistage.graph.document import line_of
from omnistage.graph.fields import Setting, hint
from omnistage.graph.function import anchored
from omnistage.graph.problems import Path, Problem
from omnistage.graph.spec import (
    EDGE_SETTINGS,
    PIPELINE_SETTINGS,
    STAGE_SETTINGS,
    STRUCTURE,
    EdgeSpec,
    PipelineSpec,
    StageSpec,
)
from omnistage.graph.validate import find_problems, wrong_kind
from omnistage.types import StageKind

Settings = dict[str, Any]

# A name is the key of its mapping, and an edge's ends are its name: not settable by key.
_STAGE_KEYS = {name: setting for name, setting in STAGE_SETTINGS.items() if name != "name"}
_EDGE_KEYS = {name: s for name, s in EDGE_SETTINGS.items() if name not in ("producer", "consumer")}


@dataclass
class Draft:
    """lines: path -> line in the file.  folder: where relative file paths start (None: as written).

    origins: path -> where a value comes from that stands in neither the file nor a flag.
    """

    folder: FilePath | None = None
    pipeline: Settings = field(default_factory=dict)
    stages: dict[str, Settings] = field(default_factory=dict)
    edges: list[tuple[str, str, Settings]] = field(default_factory=list)
    outputs: Settings = field(default_factory=dict)
    lines: dict[Path, int] = field(default_factory=dict)
    flags: dict[Path, str] = field(default_factory=dict)
    origins: dict[Path, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def add_problem(self, path: Path, message: str) -> None:
        self.problems.append(Problem(path, message))

    def has_problem(self, path: Path) -> bool:
        return any(problem.path == path for problem in self.problems)

    def line(self, path: Path) -> int:
        """The line of the path or of the nearest thing around it; 0 if unknown."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 0)


def draft_from_plain(data: object, *, folder: FilePath | None = None) -> Draft:
    """Take a pipeline apart; what does not have the right shape becomes a problem."""
    draft = Draft(folder=folder)
    if not isinstance(data, Mapping):
        draft.add_problem((), "must be a mapping with name, model, stages, edges and outputs")
        return draft
    for key, value in data.items():
        path = (str(key),)
        draft.lines[path] = line_of(data, key)
        if key == "stages":
            _take_stages(draft, value)
        elif key == "edges":
            _take_edges(draft, value)
        elif key == "outputs":
            _take_outputs(draft, value)
        elif key in PIPELINE_SETTINGS:
            draft.pipeline[key] = value
        else:
            draft.add_problem(path, f"unknown key; {hint(str(key), [*PIPELINE_SETTINGS, *STRUCTURE])}")
    for key in ("name", "stages", "outputs"):
        if key not in data:
            draft.add_problem((key,), "missing; every pipeline needs it")
    return draft


def edge_ends(text: object) -> tuple[str, str] | None:
    """The two stage names of "producer -> consumer", or None if the text is no edge."""
    if not isinstance(text, str) or text.count("->") != 1:
        return None
    producer, _, consumer = text.partition("->")
    return (producer.strip(), consumer.strip()) if producer.strip() and consumer.strip() else None


def build(draft: Draft) -> PipelineSpec:
    """The spec; problems of form and of the graph are added to draft.problems.

    A setting that is wrong in form is left at its default, so that the rest can still be checked.
    """
    stages = {}
    for name, settings in draft.stages.items():
        path = ("stages", name)
        kind = settings.get("kind")
        if kind is None and not draft.has_problem(path):
            draft.add_problem((*path, "kind"), f"missing; one of {', '.join(StageKind)}")
        known_kind = kind if isinstance(kind, str) and kind in tuple(StageKind) else ""
        taken = _known_settings(draft, path, settings, _STAGE_KEYS, kind=known_kind)
        if draft.folder is not None and isinstance(taken.get("function"), str):
            taken["function"] = anchored(taken["function"], draft.folder)
        stages[name] = StageSpec(**{**taken, "kind": str(kind), "name": name})
    edges = []
    for producer, consumer, settings in draft.edges:
        path = ("edges", f"{producer}->{consumer}")
        is_stream = settings.get("stream", False)
        mode = ("stream" if is_stream else "whole") if isinstance(is_stream, bool) else ""
        taken = _known_settings(draft, path, settings, _EDGE_KEYS, kind=mode)
        edges.append(EdgeSpec(producer, consumer, **taken))
    spec = PipelineSpec(
        **{"name": "", **draft.pipeline}, stages=stages, edges=tuple(edges), outputs=draft.outputs
    )
    already = {problem.path for problem in draft.problems}
    if not draft.outputs and any(path[:1] == ("outputs",) for path in already):
        already.add(("outputs",))  # "no outputs" would only repeat what is wrong with each of them
    if () not in already:
        for problem in find_problems(spec):
            if problem.path not in already and problem.path[:2] not in already:
                draft.problems.append(problem)
    return spec


def _known_settings(
    draft: Draft, path: Path, settings: Settings, table: Mapping[str, Setting], *, kind: str
) -> Settings:
    """The settings that exist and that this kind takes (every kind if it is not known)."""
    taken = {}
    for key, value in settings.items():
        setting = table.get(key)
        if setting is None:
            usable = [name for name, known in table.items() if not kind or known.allows(kind)]
            draft.add_problem((*path, str(key)), f"unknown key; {hint(str(key), usable)}")
        elif kind and not setting.allows(kind):
            draft.add_problem((*path, key), wrong_kind(setting, kind))
        else:
            taken[key] = value
    return taken


def _take_stages(draft: Draft, value: object) -> None:
    if not isinstance(value, Mapping):
        draft.add_problem(("stages",), f"must be a mapping of names to stages, not {value!r}")
        return
    for name, settings in value.items():
        path = ("stages", str(name))
        draft.lines[path] = line_of(value, name)
        if not isinstance(name, str):  # YAML reads on, yes and 3 as something else
            draft.add_problem(path, f"a stage's name must be text, not {name!r}; put it in quotes")
        draft.stages[str(name)] = _take_settings(draft, path, settings)


def _take_edges(draft: Draft, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, list | tuple):
        draft.add_problem(("edges",), f"must be a list of 'producer -> consumer', not {value!r}")
        return
    for index, item in enumerate(value):
        key: object = item
        settings: object = {}
        if isinstance(item, Mapping) and len(item) == 1:
            ((key, settings),) = item.items()
        ends = edge_ends(key)
        if ends is None:
            where = ("edges", str(index + 1))
            draft.lines[where] = line_of(value, index)
            draft.add_problem(where, f"{item!r} is not an edge; write 'producer -> consumer'")
            continue
        path = ("edges", "->".join(ends))
        draft.lines[path] = line_of(value, index)
        draft.edges.append((*ends, _take_settings(draft, path, {} if settings is None else settings)))


def _take_outputs(draft: Draft, value: object) -> None:
    if not isinstance(value, Mapping):
        draft.add_problem(("outputs",), f"must be a mapping of outputs to stages, not {value!r}")
        return
    for name, stage in value.items():
        path = ("outputs", str(name))
        draft.lines[path] = line_of(value, name)
        if isinstance(stage, str):
            draft.outputs[str(name)] = stage
        else:
            draft.add_problem(path, f"must be a stage's name, not {stage!r}")


def _take_settings(draft: Draft, path: Path, settings: object) -> Settings:
    if not isinstance(settings, Mapping):
        draft.add_problem(path, f"must be a mapping of settings, not {settings!r}; write {{key: value}}")
        return {}
    for key, value in settings.items():
        draft.lines[(*path, str(key))] = line_of(settings, key)
        if isinstance(value, Mapping):
            for inner in value:
                draft.lines[(*path, str(key), str(inner))] = line_of(value, inner)
    return {str(key): value for key, value in settings.items()}
