"""Line charts as SVG. Their lines can be told apart without colours, and their legend is outside the plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

from petra.measure.ticks import Axis, spans_decades
from petra.report.html import NOTHING, Html, tag

Point = tuple[float, float]

_WIDTH, _HEIGHT = 400, 250  # what a phone shows without scaling text down much
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 10, 40
_MOST_POINTS = 300
"""Lines of more points are drawn with the lowest and the highest of neighbouring ones."""
_MARKS = 8
"""About how many points of a long line have a marker."""

# Shapes around (0, 0), by their names in matplotlib.
_SHAPES = {
    "o": "M-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0 -7 0z",
    "s": "M-3 -3h6v6h-6z",
    "^": "M0 -4L3.8 3H-3.8z",
    "D": "M0 -4.2L4.2 0L0 4.2L-4.2 0z",
    "v": "M0 4L3.8 -3H-3.8z",
    "P": "M-1.4 -4h2.8v2.6h2.6v2.8h-2.6v2.6h-2.8v-2.6h-2.6v-2.8h2.6z",
    "X": "M-4 -2L-2 -4L0 -2L2 -4L4 -2L2 0L4 2L2 4L0 2L-2 4L-4 2L-2 0z",
    "d": "M0 -4.8L3 0L0 4.8L-3 0z",
    "*": "M0 -4.6L1.3 -1.4L4.6 -1.2L2 .9L2.9 4.2L0 2.3L-2.9 4.2L-2 .9L-4.6 -1.2L-1.3 -1.4z",
    "h": "M0 -4L3.5 -2V2L0 4L-3.5 2V-2z",
}
MARKERS = tuple(_SHAPES)
"""The markers that charts can draw."""


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    name: str
    """Its name in the legend."""
    points: Sequence[tuple[float | None, float | None]]
    """Its points. Those with a missing or infinite coordinate are left out, and the line has a gap there."""
    colour: str
    """The class of its colour in the style sheet."""
    marker: str
    """Its marker, one of `MARKERS`."""
    dashed: bool = False
    """The line is dashed."""
    in_legend: bool = True
    """The legend names it."""


def line_chart(
    title: str,
    series: Sequence[Series],
    x_label: str,
    x_kind: str = "integer",
    y_kind: str = "number",
    *,
    zero: bool = False,
    log: bool = False,
    legend: bool = False,
    note: str = "",
) -> Html:
    """Draw a chart.

    Args:
        title: What the lines show.
        series: The lines; those without points are left out.
        x_label: What the horizontal axis shows.
        x_kind: The kind of its numbers (see `Axis`).
        y_kind: The kind of the numbers of the vertical axis.
        zero: The vertical axis begins at 0.
        log: The vertical axis is logarithmic; it is also if few values are far above all others.
        legend: There is a legend also for a single line.
        note: A sentence below the chart.

    Returns:
        A figure, or nothing if there are no points.
    """
    drawn = [(one, parts) for one in series if (parts := _parts(one.points))]
    points = [point for _, parts in drawn for part in parts for point in part]
    if not points:
        return NOTHING
    across = Axis.of([x for x, _ in points], x_kind, 6, tight=True)
    heights = [y for _, y in points]
    up = Axis.of(heights, y_kind, 5, zero=zero, log=log or (y_kind == "number" and not zero and spans_decades(heights)))
    frame = _frame(across, up, x_label)
    lines = [_line(one, parts, across, up) for one, parts in drawn]
    size = {"viewBox": f"0 0 {_WIDTH} {_HEIGHT}", "role": "img", "aria_label": title}
    svg = tag("svg", tag("title", title), *frame, *lines, xmlns="http://www.w3.org/2000/svg", **size)
    scale = ", logarithmic" if up.log else ""
    caption = tag("figcaption", title + scale)
    named = [one for one, _ in drawn if one.in_legend]
    names = _legend(named) if legend or len(series) > 1 else NOTHING
    below = tag("p", note, class_="note") if note else NOTHING
    return tag("figure", caption, svg, names, below)


def _parts(points: Sequence[tuple[float | None, float | None]]) -> list[list[Point]]:
    """Divide a line at points that cannot be drawn."""
    parts: list[list[Point]] = [[]]
    for x, y in points:
        if x is not None and y is not None and isfinite(x) and isfinite(y):
            parts[-1].append((float(x), float(y)))
        elif parts[-1]:
            parts.append([])
    return [thin(part) for part in parts if part]


def thin(points: list[Point], most: int = _MOST_POINTS) -> list[Point]:
    """Return at most so many points: of neighbouring ones, the lowest and the highest.

    Args:
        points: The points of a line.
        most: The largest number of points to return.

    Returns:
        Some of the points, in their order; the first and the last are among them.
    """
    if len(points) <= most:
        return points
    groups = max((most - 2) // 2, 1)
    inner, found = points[1:-1], [points[0]]
    for i in range(groups):
        group = inner[i * len(inner) // groups : (i + 1) * len(inner) // groups]
        ends = {min(range(len(group)), key=lambda j: group[j][1]), max(range(len(group)), key=lambda j: group[j][1])}
        found += [group[j] for j in sorted(ends)]
    return [*found, points[-1]]


def _place(point: Point, across: Axis, up: Axis) -> Point:
    x = _LEFT + across.position(point[0]) * (_WIDTH - _LEFT - _RIGHT)
    y = _HEIGHT - _BOTTOM - up.position(point[1]) * (_HEIGHT - _TOP - _BOTTOM)
    return round(x, 1), round(y, 1)


def _line(one: Series, parts: Sequence[Sequence[Point]], across: Axis, up: Axis) -> Html:
    places = [[_place(point, across, up) for point in part] for part in parts]
    path = "".join("M" + "L".join(f"{x:g} {y:g}" for x, y in part) for part in places if len(part) > 1)
    shapes = []
    number = sum(map(len, parts))
    every = max(1, round(number / _MARKS)) if number > 3 * _MARKS else 1
    flat = [pair for part, of_part in zip(parts, places, strict=True) for pair in zip(part, of_part, strict=True)]
    for i, ((x, y), (left, top)) in enumerate(flat):
        if i % every == 0 or i == len(flat) - 1:
            said = tag("title", f"{one.name}: {y:.6g} at {x:g}")
            shapes.append(tag("path", said, d=_SHAPES[one.marker], transform=f"translate({left:g} {top:g})"))
    line = tag("path", d=path, class_="dashed line" if one.dashed else "line") if path else NOTHING
    return tag("g", line, *shapes, class_=one.colour)


def _frame(across: Axis, up: Axis, x_label: str) -> list[Html]:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    found = []
    for value, label in zip(up.ticks, up.labels, strict=True):
        y = _place((across.low, value), across, up)[1]
        found.append(tag("path", d=f"M{_LEFT} {y:g}H{right}", class_="grid"))
        found.append(tag("text", label, x=_LEFT - 6, y=f"{y + 4:g}", text_anchor="end"))
    for value, label in zip(across.ticks, across.labels, strict=True):
        x = _place((value, up.low), across, up)[0]
        found.append(tag("path", d=f"M{x:g} {bottom}v4", class_="axis"))
        found.append(tag("text", label, x=f"{x:g}", y=bottom + 17, text_anchor="middle"))
    found.append(tag("path", d=f"M{_LEFT} {bottom}H{right}", class_="axis"))
    found.append(tag("text", x_label, x=(_LEFT + right) / 2, y=_HEIGHT - 6, text_anchor="middle", class_="label"))
    return found


def _legend(series: Sequence[Series]) -> Html:
    return tag("ul", *(tag("li", _swatch(one), one.name) for one in series), class_="legend")


def _swatch(one: Series) -> Html:
    line = tag("path", d="M1 7H27", class_="dashed line" if one.dashed else "line")
    marker = tag("path", d=_SHAPES[one.marker], transform="translate(14 7)")
    size = {"viewBox": "0 0 28 14", "width": 28, "height": 14, "aria_hidden": "true"}
    return tag("svg", tag("g", line, marker, class_=one.colour), xmlns="http://www.w3.org/2000/svg", **size)
