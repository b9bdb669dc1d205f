"""Drawings of a pipeline: Mermaid text, and an SVG of our own that needs no other program.

Colours are readable on light and dark ground; the ground itself is left transparent.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from omnistage.graph.layout import Layout, Node, place
from omnistage.graph.ports import OUTPUT_PORTS, edge_port, encoder_media
from omnistage.graph.spec import PipelineSpec, StageSpec
from omnistage.types import StageKind

# Each has a contrast of at least 4.5 to the white text on it.
COLOURS = {
    StageKind.ENCODER: "#0f766e",
    StageKind.LLM: "#4f46e5",
    StageKind.GENERATOR: "#a21caf",
    StageKind.VOCODER: "#c2410c",
    StageKind.FUNCTION: "#526075",
}
_LINE = "#8b949e"
_TEXT = "#747c86"  # 4.2 to white, 4.5 to a ground of #0d1117
_FONT = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', 'DejaVu Sans', sans-serif"
_MARGIN = 20.0
_LEGEND = 40.0
_ARROW = 8.0


@dataclass(frozen=True)
class _Edge:
    start: str
    end: str
    label: str
    is_stream: bool


@dataclass(frozen=True)
class _Diagram:
    """stages: boxes by node name.  pills: what a request brings or gets, node name -> text."""

    stages: dict[str, StageSpec]
    pills: dict[str, str]
    edges: tuple[_Edge, ...]


def _diagram(spec: PipelineSpec) -> _Diagram:
    """Inputs, then stages, then outputs.  Names of pills hold a character that no stage name has."""
    inputs: dict[str, str] = {}
    edges: list[_Edge] = []
    for name, stage in spec.stages.items():
        label = _request_input(spec, stage)
        if label:
            inputs[f"in:{name}"] = label
            edges.append(_Edge(f"in:{name}", name, "", False))
    for edge in spec.edges:
        port = edge_port(spec.stages[edge.producer], spec.stages[edge.consumer])
        label = str(port).replace("_", " ") if port else ""
        edges.append(_Edge(edge.producer, edge.consumer, label, edge.stream))
    outputs = {}
    for output, name in spec.outputs.items():
        outputs[f"out:{output}"] = output
        port = OUTPUT_PORTS.get(output)
        edges.append(_Edge(name, f"out:{output}", str(port) if port and port != output else "", True))
    return _Diagram(dict(spec.stages), inputs | outputs, tuple(edges))


def _request_input(spec: PipelineSpec, stage: StageSpec) -> str:
    """What a request itself may bring to the stage, or ""."""
    if stage.kind is StageKind.ENCODER:
        return encoder_media(stage)
    producers = [spec.stages[edge.producer].kind for edge in spec.edges_into(stage.name)]
    if stage.kind is StageKind.LLM and all(kind is StageKind.ENCODER for kind in producers):
        return "text"
    return "" if producers or stage.kind is StageKind.VOCODER else "text"


def _lines(stage: StageSpec) -> list[str]:
    """What a box says below the stage's name."""
    what = str(stage.kind)
    if stage.part and stage.part != stage.name:
        what += f" · {stage.part}"
    if stage.function:
        what += f" · {stage.function.rpartition(':')[2]}"
    where = " ".join(stage.devices)
    if stage.tensor_parallel > 1:
        where += f" · TP {stage.tensor_parallel}"
    if stage.replicas > 1:
        where += f" · {stage.replicas} replicas"
    return [what, where]


# --- Mermaid --------------------------------------------------------------------------------


def to_mermaid(spec: PipelineSpec) -> str:
    """A Mermaid flowchart; dotted edges are streams.  spec must be valid."""
    diagram = _diagram(spec)
    ids = {name: f"n{index}" for index, name in enumerate([*diagram.stages, *diagram.pills])}
    lines = ["flowchart LR"]
    for name, stage in diagram.stages.items():
        text = "<br/>".join([f"<b>{name}</b>", *_lines(stage)]).replace('"', "#quot;")
        lines.append(f'    {ids[name]}["{text}"]:::{stage.kind}')
    for name, label in diagram.pills.items():
        lines.append(f'    {ids[name]}(["{label}"]):::port')
    for edge in diagram.edges:
        arrow = "-.->" if edge.is_stream else "-->"
        label = f'|"{edge.label}"|' if edge.label else ""
        lines.append(f"    {ids[edge.start]} {arrow}{label} {ids[edge.end]}")
    for kind, colour in COLOURS.items():
        lines.append(f"    classDef {kind} fill:{colour},stroke:{colour},color:#ffffff")
    lines.append(f"    classDef port fill:none,stroke:{_LINE},color:{_TEXT}")
    return "\n".join(lines) + "\n"


# --- SVG ------------------------------------------------------------------------------------


def to_svg(spec: PipelineSpec) -> str:
    """A drawing of its own size in pixels: boxes by kind, solid edges whole, dashed edges streams.

    spec must be valid.
    """
    diagram = _diagram(spec)
    sizes = {name: _box_size(name, stage) for name, stage in diagram.stages.items()}
    sizes |= {name: (_text_width(label, 13) + 30, 30.0) for name, label in diagram.pills.items()}
    layout = place(sizes, [(edge.start, edge.end) for edge in diagram.edges])
    width = max(layout.width + 2 * _MARGIN, 320.0)
    height = layout.height + 2 * _MARGIN + _LEGEND
    curves, labels, gaps = _draw_edges(diagram.edges, layout)
    boxes = [_draw_box(layout.nodes[name], stage) for name, stage in diagram.stages.items()]
    boxes += [_draw_pill(layout.nodes[name], label) for name, label in diagram.pills.items()]
    mask = f"omnistage-gaps-{spec.name}"
    area = f'x="{-_MARGIN}" y="{-_MARGIN}" width="{width:.0f}" height="{height:.0f}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}"'
            f' viewBox="{-_MARGIN} {-_MARGIN} {width:.0f} {height:.0f}" role="img"'
            f' font-family="{_FONT}" text-anchor="middle">',
            f"<title>{escape(spec.name)}: a pipeline of {len(spec.stages)} stages</title>",
            f'<mask id="{mask}" maskUnits="userSpaceOnUse" {area}>',
            f'<rect {area} fill="#fff"/>',
            *gaps,
            "</mask>",
            f'<g mask="url(#{mask})" fill="none" stroke="{_LINE}" stroke-width="1.6">',
            *curves,
            "</g>",
            f'<g fill="{_TEXT}" font-size="12">',
            *labels,
            "</g>",
            *boxes,
            *_draw_legend(sorted({stage.kind for stage in spec.stages.values()}), layout.height + 30),
            "</svg>\n",
        ]
    )


def _text_width(text: str, size: float) -> float:
    """An upper estimate, in pixels, for a sans-serif font of this size."""
    return len(text) * size * 0.6


def _box_size(name: str, stage: StageSpec) -> tuple[float, float]:
    widest = max(_text_width(name, 16), *(_text_width(line, 12) for line in _lines(stage)))
    return max(widest + 32, 112.0), 70.0


def _draw_box(node: Node, stage: StageSpec) -> str:
    left, top = node.x - node.width / 2, node.y - node.height / 2
    what, where = (escape(line) for line in _lines(stage))
    return (
        f'<g><rect x="{left:.1f}" y="{top:.1f}" width="{node.width:.1f}" height="{node.height:.1f}" rx="10"'
        f' fill="{COLOURS[stage.kind]}" stroke="#fff" stroke-opacity="0.25"/>'
        f'<text x="{node.x:.1f}" y="{top + 27:.1f}" fill="#fff" font-size="16"'
        f' font-weight="600">{escape(stage.name)}</text>'
        f'<text x="{node.x:.1f}" y="{top + 44:.1f}" fill="#fff" font-size="12">{what}</text>'
        f'<text x="{node.x:.1f}" y="{top + 59:.1f}" fill="#fff" font-size="11"'
        f' opacity="0.85">{where}</text></g>'
    )


def _draw_pill(node: Node, label: str) -> str:
    left, top = node.x - node.width / 2, node.y - node.height / 2
    return (
        f'<g><rect x="{left:.1f}" y="{top:.1f}" width="{node.width:.1f}" height="{node.height:.1f}"'
        f' rx="{node.height / 2:.1f}" fill="none" stroke="{_LINE}" stroke-width="1.4"/>'
        f'<text x="{node.x:.1f}" y="{node.y + 4.5:.1f}" fill="{_TEXT}" font-size="13">'
        f"{escape(label)}</text></g>"
    )


def _draw_edges(edges: Sequence[_Edge], layout: Layout) -> tuple[list[str], list[str], list[str]]:
    """Curves with arrow heads, labels, and the gaps that labels cut into the curves."""
    exits, entries = _port_rows(edges, layout)
    curves, labels, gaps = [], [], []
    for edge in edges:
        key = (edge.start, edge.end)
        path = [layout.nodes[name] for name in layout.paths[key]]
        points = [(path[0].x + path[0].width / 2, exits[key])]
        points += [(node.x, node.y) for node in path[1:-1]]
        tip = path[-1].x - path[-1].width / 2
        points.append((tip - _ARROW + 1, entries[key]))
        curve = f"M{points[0][0]:.1f} {points[0][1]:.1f}"
        for (x0, y0), (x1, y1) in itertools.pairwise(points):
            middle = (x0 + x1) / 2
            curve += f" C{middle:.1f} {y0:.1f} {middle:.1f} {y1:.1f} {x1:.1f} {y1:.1f}"
        dash = ' stroke-dasharray="6 4"' if edge.is_stream else ""
        curves.append(f'<path d="{curve}"{dash}/>')
        row = entries[key]
        curves.append(
            f'<path d="M{tip - _ARROW:.1f} {row - 4.5:.1f} L{tip - 1:.1f} {row:.1f}'
            f' L{tip - _ARROW:.1f} {row + 4.5:.1f} Z" fill="{_LINE}" stroke="none"/>'
        )
        if edge.label:
            (x0, y0), (x1, y1) = points[0], points[1]
            x, y, half = (x0 + x1) / 2, (y0 + y1) / 2, _text_width(edge.label, 12) / 2 + 3
            labels.append(f'<text x="{x:.1f}" y="{y + 4:.1f}">{escape(edge.label)}</text>')
            gaps.append(f'<rect x="{x - half:.1f}" y="{y - 9:.1f}" width="{2 * half:.1f}" height="18"/>')
    return curves, labels, gaps


Rows = dict[tuple[str, str], float]


def _port_rows(edges: Sequence[_Edge], layout: Layout) -> tuple[Rows, Rows]:
    """Where each edge leaves and enters its boxes: spread over the side, in the order of the far ends."""
    leaving: dict[str, list[_Edge]] = defaultdict(list)
    arriving: dict[str, list[_Edge]] = defaultdict(list)
    for edge in edges:
        leaving[edge.start].append(edge)
        arriving[edge.end].append(edge)
    nodes, paths = layout.nodes, layout.paths
    exits: Rows = {}
    entries: Rows = {}
    for table, rows, neighbour in ((leaving, exits, 1), (arriving, entries, -2)):
        for name, group in table.items():
            group.sort(key=lambda edge: nodes[paths[edge.start, edge.end][neighbour]].y)
            step = min(18.0, (nodes[name].height - 20) / len(group))
            for index, edge in enumerate(group):
                rows[edge.start, edge.end] = nodes[name].y + (index - (len(group) - 1) / 2) * step
    return exits, entries


def _draw_legend(kinds: Sequence[StageKind], y: float) -> list[str]:
    parts, x = [], 0.0
    for text, dash in (("whole", ""), ("stream", ' stroke-dasharray="6 4"')):
        parts.append(f'<path d="M{x} {y} h26" stroke="{_LINE}" stroke-width="1.6"{dash}/>')
        parts.append(_legend_text(text, x + 32, y))
        x += 32 + _text_width(text, 12) + 20
    for kind in kinds:
        parts.append(f'<rect x="{x}" y="{y - 6}" width="12" height="12" rx="3" fill="{COLOURS[kind]}"/>')
        parts.append(_legend_text(kind, x + 18, y))
        x += 18 + _text_width(kind, 12) + 18
    return parts


def _legend_text(text: str, x: float, y: float) -> str:
    return f'<text x="{x}" y="{y + 4}" fill="{_TEXT}" font-size="12" text-anchor="start">{text}</text>'
