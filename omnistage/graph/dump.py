"""Pipelines as text: YAML for people, JSON for the wire, and the resolved form with sources."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import yaml

from omnistage.graph.fields import Setting
from omnistage.graph.loader import Resolved
from omnistage.graph.problems import Path
from omnistage.graph.spec import (
    EDGE_SETTINGS,
    PIPELINE_SETTINGS,
    STAGE_SETTINGS,
    EdgeSpec,
    PipelineSpec,
    StageSpec,
)

_COMMENT_COLUMN = 48


def to_plain(spec: PipelineSpec) -> dict[str, Any]:
    """Every setting that applies, defaults included, as mappings, lists, text and numbers."""
    return {
        **_plain(_of_pipeline(), spec),
        "stages": {name: _plain(_of_stage(stage), stage) for name, stage in spec.stages.items()},
        "edges": [{_edge_key(edge): _plain(_of_edge(edge), edge)} for edge in spec.edges],
        "outputs": dict(spec.outputs),
    }


def to_json(spec: PipelineSpec) -> bytes:
    """For the Configure message; omnistage.graph.loader.from_json reads it.  Defaults are written out."""
    return msgspec.json.encode(to_plain(spec))


def to_yaml(spec: PipelineSpec) -> str:
    """The short form: what differs from the defaults, a line per stage and edge."""
    lines = [_entry(key, value) for key, value in _changed(_of_pipeline(), spec).items()]
    lines.append("stages:" if spec.stages else "stages: {}")
    for name, stage in spec.stages.items():
        settings = _changed(_of_stage(stage), stage)
        if settings.get("part") == name:
            del settings["part"]
        lines.append(f"  {_entry(name, settings)}")
    if spec.edges:
        lines.append("edges:")
    for edge in spec.edges:
        changed = _changed(_of_edge(edge), edge)
        lines.append(f"  - {_entry(_edge_key(edge), changed) if changed else _edge_key(edge)}")
    lines.append(_entry("outputs", dict(spec.outputs)))
    return "\n".join(lines) + "\n"


def render_config(resolved: Resolved) -> str:
    """The long form as YAML that loads to the same pipeline, each value's source in a comment."""
    spec = resolved.spec
    lines = _rendered(resolved, (), _of_pipeline(), spec, indent=0)
    lines.append("stages:")
    for name, stage in spec.stages.items():
        lines.append(f"  {_key(name)}:")
        lines += _rendered(resolved, ("stages", name), _of_stage(stage), stage, indent=4)
    if spec.edges:
        lines.append("edges:")
    for edge in spec.edges:
        lines.append(f"  - {_edge_key(edge)}:")
        lines += _rendered(resolved, ("edges", edge.name), _of_edge(edge), edge, indent=6)
    lines.append("outputs:")
    for output, stage_name in spec.outputs.items():
        source = resolved.source(("outputs", output))
        lines.append(_commented(f"  {_entry(output, stage_name)}", source))
    return "\n".join(lines) + "\n"


def _of_pipeline() -> Iterable[Setting]:
    return PIPELINE_SETTINGS.values()


def _of_stage(stage: StageSpec) -> Iterable[Setting]:
    return [s for name, s in STAGE_SETTINGS.items() if name != "name" and s.allows(stage.kind)]


def _of_edge(edge: EdgeSpec) -> Iterable[Setting]:
    ends = ("producer", "consumer")
    return [s for name, s in EDGE_SETTINGS.items() if name not in ends and s.allows(edge.mode)]


def _plain(settings: Iterable[Setting], part: object) -> dict[str, Any]:
    return {setting.name: setting.dump(getattr(part, setting.name)) for setting in settings}


def _changed(settings: Iterable[Setting], part: object) -> dict[str, Any]:
    return _plain([s for s in settings if s.is_required or getattr(part, s.name) != s.default], part)


def _rendered(
    resolved: Resolved, path: Path, settings: Iterable[Setting], part: object, *, indent: int
) -> list[str]:
    lines = []
    for setting in settings:
        value = setting.dump(getattr(part, setting.name))
        place = (*path, setting.name)
        if isinstance(value, Mapping) and value:
            lines.append(" " * indent + f"{setting.name}:")
            for key, inner in value.items():
                # A mapping written in one piece is one source; a flag may have replaced one key.
                source = resolved.sources.get((*place, key)) or resolved.source(place)
                lines.append(_commented(" " * (indent + 2) + _entry(key, inner), source))
        else:
            lines.append(_commented(" " * indent + _entry(setting.name, value), resolved.source(place)))
    return lines


def _commented(line: str, source: str) -> str:
    return f"{line.ljust(_COMMENT_COLUMN - 2)}  # {' '.join(source.split())}"


def _edge_key(edge: EdgeSpec) -> str:
    return f"{edge.producer} -> {edge.consumer}"


def _key(name: str) -> str:
    return _entry(name, 0).rpartition(":")[0]


def _entry(key: str, value: Any) -> str:
    """ "key: value" on one line; nested values in flow style."""
    text = yaml.safe_dump({key: value}, default_flow_style=True, width=float("inf"), sort_keys=False)
    return text.strip()[1:-1]
