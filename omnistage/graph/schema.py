"""The settings of a pipeline for editors (JSON Schema, draft 2020-12) and for the docs (Markdown).

Both are made from the tables in omnistage.graph.spec.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from omnistage.graph.fields import NAME_PATTERN, Setting
from omnistage.graph.ports import OUTPUT_PORTS
from omnistage.graph.spec import EDGE_SETTINGS, PIPELINE_SETTINGS, STAGE_SETTINGS, STRUCTURE
from omnistage.types import StageKind

_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_EDGE_PATTERN = rf"^\s*{NAME_PATTERN}\s*->\s*{NAME_PATTERN}\s*$"
_ENDS = ("producer", "consumer")


def pipeline_schema() -> dict[str, Any]:
    """The schema of a pipeline file.  What needs the whole graph (cycles, ports) it cannot say."""
    kinds = [
        {
            "if": {"properties": {"kind": {"const": str(kind)}}},
            "then": {"$ref": f"#/$defs/{kind}"},
        }
        for kind in StageKind
    ]
    return {
        "$schema": _DRAFT,
        "title": "Omnistage pipeline",
        "type": "object",
        "required": ["name", "stages", "outputs"],
        "additionalProperties": False,
        "properties": {
            **{name: setting.schema() for name, setting in PIPELINE_SETTINGS.items()},
            "stages": {
                "description": STRUCTURE["stages"],
                "type": "object",
                "minProperties": 1,
                "propertyNames": {"pattern": f"^(?:{NAME_PATTERN})$"},
                "additionalProperties": {"$ref": "#/$defs/stage"},
            },
            "edges": {
                "description": STRUCTURE["edges"],
                "type": ["array", "null"],
                "items": {"$ref": "#/$defs/edge"},
            },
            "outputs": {
                "description": STRUCTURE["outputs"],
                "type": "object",
                "minProperties": 1,
                "additionalProperties": False,
                "properties": {
                    name: {"type": "string", "description": f"The stage whose {port} it is."}
                    for name, port in OUTPUT_PORTS.items()
                },
            },
        },
        "$defs": {
            "stage": {
                "type": "object",
                "required": ["kind"],
                "properties": {"kind": STAGE_SETTINGS["kind"].schema()},
                "allOf": kinds,
            },
            **{str(kind): _stage_schema(kind) for kind in StageKind},
            "edge": {
                "anyOf": [
                    {"type": "string", "pattern": _EDGE_PATTERN},
                    {
                        "type": "object",
                        "minProperties": 1,
                        "maxProperties": 1,
                        "patternProperties": {_EDGE_PATTERN: _edge_schema()},
                        "additionalProperties": False,
                    },
                ]
            },
        },
    }


def schema_json() -> str:
    """The schema as JSON text."""
    return json.dumps(pipeline_schema(), indent=2, ensure_ascii=False) + "\n"


def settings_markdown() -> str:
    """Three tables of all settings, for the docs."""
    stage_settings = [setting for name, setting in STAGE_SETTINGS.items() if name != "name"]
    edge_settings = [setting for name, setting in EDGE_SETTINGS.items() if name not in _ENDS]
    sections = (
        ("Pipeline", PIPELINE_SETTINGS.values(), ""),
        ("Stage", stage_settings, "kinds"),
        ("Edge", edge_settings, "edges"),
    )
    return "\n".join(_table(title, settings, of) for title, settings, of in sections)


def _stage_schema(kind: StageKind) -> dict[str, Any]:
    settings = {name: s for name, s in STAGE_SETTINGS.items() if name != "name" and s.allows(kind)}
    properties = {name: setting.schema() for name, setting in settings.items()}
    properties["kind"] = {"const": str(kind)}
    required = ["kind", "function"] if kind is StageKind.FUNCTION else ["kind"]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _edge_schema() -> dict[str, Any]:
    settings = {name: setting for name, setting in EDGE_SETTINGS.items() if name not in _ENDS}
    return {
        "type": ["object", "null"],
        "additionalProperties": False,
        "properties": {name: setting.schema() for name, setting in settings.items()},
        "if": {"not": {"required": ["stream"], "properties": {"stream": {"const": True}}}},
        "then": {"properties": {name: False for name, setting in settings.items() if setting.kinds}},
    }


def _table(title: str, settings: Iterable[Setting], of: str) -> str:
    head = ["setting", *([of] if of else []), "type", "unit", "default", "meaning"]
    lines = [f"### {title}", "", f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for setting in settings:
        kinds = [", ".join(sorted(setting.kinds)) or "all"] if of else []
        cells = [
            f"`{setting.name}`",
            *kinds,
            setting.type.label,
            setting.unit,
            _default(setting),
            setting.doc,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _default(setting: Setting) -> str:
    if setting.is_required:
        return "required"
    if setting.default is None or setting.default == "":
        return ""
    return f"`{json.dumps(setting.dump(setting.default))}`".replace('"', "")
