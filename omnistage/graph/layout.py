"""Where the boxes of a drawing go: columns by depth, rows by the neighbours' mean.

A layered layout after Sugiyama, Tagawa and Toda (1981): edges that skip columns get way-points, a few
barycentre sweeps order each column, and rows are pulled towards their neighbours without overlap.
Knows sizes and edges, not what is drawn.  All lengths in pixels.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

COLUMN_GAP = 118.0
ROW_GAP = 26.0
_SWEEPS = 13


@dataclass
class Node:
    """x, y: the centre.  is_waypoint: a bend of an edge that skips the column."""

    name: str
    width: float
    height: float
    column: int = 0
    x: float = 0.0
    y: float = 0.0
    is_waypoint: bool = False


@dataclass
class Layout:
    """nodes by name, way-points included.  paths: for each edge, the nodes it passes, ends included."""

    nodes: dict[str, Node]
    paths: dict[tuple[str, str], list[str]]
    width: float = 0.0
    height: float = 0.0
    columns: list[list[Node]] = field(default_factory=list)


def place(sizes: Mapping[str, tuple[float, float]], edges: Sequence[tuple[str, str]]) -> Layout:
    """Place boxes of the given (width, height) so that edges run from left to right.

    edges: (from, to) without cycles.  The origin is the top left corner of the bounding box.
    """
    nodes = {name: Node(name, width, height) for name, (width, height) in sizes.items()}
    _assign_columns(nodes, edges)
    layout = Layout(nodes, {})
    links: list[tuple[str, str]] = []
    for start, end in edges:
        path = [start]
        for column in range(nodes[start].column + 1, nodes[end].column):
            bend = Node(f"{start}>{end}>{column}", 0.0, 14.0, column, is_waypoint=True)
            nodes[bend.name] = bend
            path.append(bend.name)
        path.append(end)
        layout.paths[start, end] = path
        links += itertools.pairwise(path)
    count = 1 + max((node.column for node in nodes.values()), default=0)
    layout.columns = [[node for node in nodes.values() if node.column == index] for index in range(count)]
    _place_rows(layout, links)
    _place_columns(layout)
    return layout


def _assign_columns(nodes: Mapping[str, Node], edges: Sequence[tuple[str, str]]) -> None:
    """The longest way from a source; then sources move up next to what they feed."""
    for _ in nodes:
        for start, end in edges:
            nodes[end].column = max(nodes[end].column, nodes[start].column + 1)
    fed = {end for _, end in edges}
    for _ in range(2):  # a pill, then its encoder, or the other way round
        for name, node in nodes.items():
            followers = [nodes[end].column for start, end in edges if start == name]
            feeders = [nodes[start] for start, end in edges if end == name]
            if followers and all(feeder.name not in fed for feeder in feeders):
                node.column = min(followers) - 1


def _place_rows(layout: Layout, links: Sequence[tuple[str, str]]) -> None:
    nodes = layout.nodes
    before: dict[str, list[Node]] = {name: [] for name in nodes}
    after: dict[str, list[Node]] = {name: [] for name in nodes}
    for start, end in links:
        after[start].append(nodes[end])
        before[end].append(nodes[start])
    for column in layout.columns:
        _stack(column, [index * 80.0 for index in range(len(column))])
    for sweep in range(_SWEEPS):
        forward = sweep % 2 == 0
        for column in layout.columns if forward else reversed(layout.columns):
            wanted = []
            for node in column:
                near = before[node.name] if forward else after[node.name]
                near = near or before[node.name] + after[node.name]
                wanted.append(_mean_row(near) if near else node.y)
            order = sorted(range(len(column)), key=wanted.__getitem__)
            column[:] = [column[index] for index in order]
            _stack(column, [wanted[index] for index in order])
    top = min((node.y - node.height / 2 for node in nodes.values()), default=0.0)
    for node in nodes.values():
        node.y -= top
    layout.height = max((node.y + node.height / 2 for node in nodes.values()), default=0.0)


def _mean_row(near: Sequence[Node]) -> float:
    """Tall boxes count most, so that the main line stays straight."""
    weights = [node.height**2 for node in near]
    return sum(node.y * weight for node, weight in zip(near, weights, strict=True)) / sum(weights)


def _stack(column: Sequence[Node], wanted: Sequence[float]) -> None:
    """Give each node its wanted row as nearly as their order and sizes allow."""
    blocks: list[
        tuple[list[Node], list[float], float]
    ] = []  # nodes, offsets from the first, row of the first
    for node, row in zip(column, wanted, strict=True):
        members, offsets, start = [node], [0.0], row
        while blocks:
            last, last_offsets, last_start = blocks[-1]
            gap = (last[-1].height + members[0].height) / 2 + ROW_GAP
            if last_start + last_offsets[-1] + gap <= start:
                break
            blocks.pop()
            shift = last_offsets[-1] + gap
            mean = (last_start * len(last) + (start - shift) * len(members)) / (len(last) + len(members))
            members = last + members
            offsets = last_offsets + [shift + offset for offset in offsets]
            start = mean
        blocks.append((members, offsets, start))
    for members, offsets, start in blocks:
        for node, offset in zip(members, offsets, strict=True):
            node.y = start + offset


def _place_columns(layout: Layout) -> None:
    left = 0.0
    for column in layout.columns:
        width = max((node.width for node in column), default=0.0)
        for node in column:
            node.x = left + width / 2
        left += width + COLUMN_GAP
    layout.width = left - COLUMN_GAP
