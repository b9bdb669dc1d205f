"""A picture of one request's timeline: a bar per stage on a common axis of seconds.

The colours are readable on light and dark ground; the ground itself is left transparent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape

from omnistage.serving.timeline import StageRow, Timeline

_FONT = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', 'DejaVu Sans', sans-serif"
_TEXT = "#747c86"
_LINE = "#8b949e"
_QUEUED, _FIRST, _REST = "#8b949e", "#4f46e5", "#818cf8"
_MARKS = ("#c2410c", "#12897b")  # first token, first audio
_ROW, _BAR = 34.0, 16.0
_HEAD, _AXIS, _FOOT = 64.0, 34.0, 34.0
_PLOT = 460.0
_NUMBERS = 270.0
_Scale = Callable[[float], float]  # seconds -> x
_CHARACTER = 7.6  # the width of a letter at 13 pixels


def timeline_as_svg(timeline: Timeline) -> str:
    """A drawing of its own size in pixels.

    Per stage: queued, from the start to the first output, from there to the end; beside it the
    seconds queued, computed and transferred.  Upright lines: the first token and the first audio.
    """
    left = 24.0 + _CHARACTER * max([len(row.stage) for row in timeline.rows] + [5])
    span = _nice_span(timeline)
    plot_height = _ROW * max(1, len(timeline.rows))
    width = left + _PLOT + _NUMBERS
    height = _HEAD + plot_height + _AXIS + _FOOT

    def x_of(seconds: float) -> float:
        return left + _PLOT * min(seconds, span) / span

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}"'
        f' viewBox="0 0 {width:.0f} {height:.0f}" role="img" font-family="{_FONT}" font-size="13">',
        f"<title>{escape(_title(timeline))}</title>",
        f'<text x="16" y="22" fill="{_TEXT}" font-weight="600">{escape(_title(timeline))}</text>',
        *_axis(span, x_of(0.0), _HEAD + plot_height),
        *_column_heads(left + _PLOT),
    ]
    for index, row in enumerate(timeline.rows):
        middle = _HEAD + _ROW * (index + 0.5)
        parts.append(
            f'<text x="{left - 10:.1f}" y="{middle + 4.5:.1f}" fill="{_TEXT}" text-anchor="end">'
            f"{escape(row.stage)}</text>"
        )
        parts += _bars(row, timeline.total, middle, x_of)
        parts += _numbers(row, left + _PLOT, middle)
    parts += _marks(timeline, x_of, _HEAD + plot_height, left + _PLOT)
    parts += _legend(left, height - 14)
    return "\n".join([*parts, "</svg>\n"])


def _title(timeline: Timeline) -> str:
    title = f"One request: {timeline.total:.2f} s"
    if timeline.real_time_factor is not None:
        title += (
            f", {timeline.audio_seconds:.2f} s of speech, real-time factor {timeline.real_time_factor:.2f}"
        )
    return title


def _nice_span(timeline: Timeline) -> float:
    """The axis's end in seconds, a little after everything."""
    ends = [row.finished or 0.0 for row in timeline.rows]
    return max([timeline.total, *ends, 0.001]) * 1.02


def _axis(span: float, x: float, y: float) -> list[str]:
    step = _nice_step(span / 6)
    digits = max(0, -math.floor(math.log10(step)))
    lines = [f'<g stroke="{_LINE}" stroke-opacity="0.35">']
    ticks = [index * step for index in range(int(span / step) + 1)]
    for tick in ticks:
        position = x + _PLOT * tick / span
        lines.append(f'<line x1="{position:.1f}" y1="{_HEAD:.1f}" x2="{position:.1f}" y2="{y + 4:.1f}"/>')
    lines.append("</g>")
    for tick in ticks:
        position = x + _PLOT * tick / span
        lines.append(
            f'<text x="{position:.1f}" y="{y + 20:.1f}" fill="{_TEXT}" font-size="12" text-anchor="middle">'
            f"{tick:.{digits}f}{' s' if tick == ticks[-1] else ''}</text>"
        )
    return lines


def _nice_step(rough: float) -> float:
    """1, 2 or 5 times a power of ten, at least `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)


_COLUMNS = (("queued", 72.0), ("computed", 156.0), ("transferred", 252.0))  # right edges after the plot


def _column_heads(x: float) -> list[str]:
    return [
        f'<text x="{x + offset:.1f}" y="{_HEAD - 6:.1f}" fill="{_TEXT}" font-size="12" text-anchor="end">'
        f"{name}</text>"
        for name, offset in _COLUMNS
    ]


def _numbers(row: StageRow, x: float, middle: float) -> list[str]:
    values = (row.queued, row.computed, row.transferred)
    return [
        f'<text x="{x + offset:.1f}" y="{middle + 4.5:.1f}" fill="{_TEXT}" font-size="12" text-anchor="end">'
        f"{value:.3f} s</text>"
        for value, (_, offset) in zip(values, _COLUMNS, strict=True)
    ]


def _bars(row: StageRow, total: float, middle: float, x_of: _Scale) -> list[str]:
    end = row.finished if row.finished is not None else total
    start = row.started if row.started is not None else end
    first = min(max(row.first_output if row.first_output is not None else end, start), end)
    pieces = [
        (row.received, start, _QUEUED, 0.45, "queued"),
        (start, first, _FIRST, 1.0, "until its first output"),
        (first, end, _REST, 1.0, "until its last output"),
    ]
    bars = []
    for begin, finish, colour, opacity, name in pieces:
        length = x_of(finish) - x_of(begin)
        if length <= 0:
            continue
        bars.append(
            f'<rect x="{x_of(begin):.1f}" y="{middle - _BAR / 2:.1f}" width="{max(length, 1.0):.1f}"'
            f' height="{_BAR:.0f}" rx="2" fill="{colour}" fill-opacity="{opacity}">'
            f"<title>{escape(row.stage)} {name}: {finish - begin:.3f} s</title></rect>"
        )
    return bars


def _marks(timeline: Timeline, x_of: _Scale, bottom: float, right: float) -> list[str]:
    """Labels stand at two heights, so that close instants do not overprint each other."""
    instants = (
        ("first token", timeline.time_to_first_token),
        ("first audio", timeline.time_to_first_audio),
    )
    marks = []
    for height, colour, (name, instant) in zip((40.0, 56.0), _MARKS, instants, strict=True):
        if instant is None:
            continue
        x = x_of(instant)
        is_near_edge = x + 130 > right
        anchor, shift = ("end", -5.0) if is_near_edge else ("start", 5.0)
        marks.append(
            f'<line x1="{x:.1f}" y1="{height - 9:.1f}" x2="{x:.1f}" y2="{bottom + 4:.1f}" stroke="{colour}"'
            ' stroke-width="1.6" stroke-dasharray="4 3"/>'
            f'<text x="{x + shift:.1f}" y="{height:.1f}" fill="{colour}" font-size="12" font-weight="600"'
            f' text-anchor="{anchor}">{name} {instant:.3f} s</text>'
        )
    return marks


def _legend(x: float, y: float) -> list[str]:
    legend = []
    for colour, opacity, name, width in (
        (_QUEUED, 0.45, "queued", 84.0),
        (_FIRST, 1.0, "until the first output", 168.0),
        (_REST, 1.0, "until the last output", 160.0),
    ):
        legend.append(
            f'<rect x="{x:.1f}" y="{y - 10:.1f}" width="12" height="12" rx="2" fill="{colour}"'
            f' fill-opacity="{opacity}"/>'
            f'<text x="{x + 18:.1f}" y="{y:.1f}" fill="{_TEXT}" font-size="12">{name}</text>'
        )
        x += width
    return legend
