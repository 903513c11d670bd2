"""Horizontal bars of several parts as SVG: memory by purpose, of stages or of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from petra.measure.ticks import Axis, format_bytes
from petra.report.html import NOTHING, Html, tag

_WIDTH, _RIGHT, _ROW, _BAR, _TOP, _BOTTOM = 400, 14, 24, 15, 4, 26
_MOST_ROWS = 40
_COLOURS = 8
"""The number of colours of parts in the style sheet."""
NAMES = {"graph": "graphs", "stashed_weights": "stashed weights"}


def stage_bars(title: str, rows: Sequence[tuple[str, Mapping[str, float]]], note: str = "") -> Html:
    """Draw one bar for each row, divided into its parts.

    Args:
        title: What the bars show.
        rows: The name of each bar, and its parts in bytes by name.
        note: A sentence below the chart.

    Returns:
        A figure, or nothing without rows.
    """
    parts = [name for name in dict.fromkeys(n for _, own in rows for n in own) if any(own.get(name) for _, own in rows)]
    colours = {name: f"m{i % _COLOURS}" for i, name in enumerate(dict.fromkeys(n for _, own in rows for n in own))}
    if not parts:
        return NOTHING
    shown = rows[:_MOST_ROWS]
    left = 14 + 7 * min(max(len(name) for name, _ in shown), 20)
    axis = Axis.of([0.0, *(sum(own.values()) for _, own in shown)], "bytes", 4, zero=True, tight=True)
    bottom = _TOP + _ROW * len(shown)
    width = _WIDTH - left - _RIGHT
    found = []
    for value, label in zip(axis.ticks, axis.labels, strict=True):
        x = left + axis.position(value) * width
        anchor = "end" if x > _WIDTH - 3 * _RIGHT else "middle"
        found.append(tag("path", d=f"M{x:.1f} {_TOP}V{bottom}", class_="grid"))
        found.append(
            tag("text", label, x=f"{x + (_RIGHT - 2) * (anchor == 'end'):.1f}", y=bottom + 17, text_anchor=anchor)
        )
    for i, (name, own) in enumerate(shown):
        y = _TOP + _ROW * i + (_ROW - _BAR) / 2
        cut = name if len(name) <= 20 else name[:19] + "…"
        found.append(tag("text", cut, x=left - 6, y=f"{y + _BAR - 3.5:g}", text_anchor="end"))
        start = 0.0
        for part in parts:
            size = own.get(part, 0.0)
            if size > 0:
                x = left + axis.position(start) * width
                said = tag("title", f"{name}: {_name(part)} {format_bytes(size)}")
                shape = {"x": f"{x:.1f}", "width": f"{axis.position(size) * width:.1f}", "height": _BAR, "y": f"{y:g}"}
                found.append(tag("rect", said, class_=colours[part], **shape))
                start += size
    left_out = f"The first {_MOST_ROWS} of {len(rows)}. " if len(rows) > _MOST_ROWS else ""
    size_of_svg = {"viewBox": f"0 0 {_WIDTH} {bottom + _BOTTOM}", "role": "img", "aria_label": title}
    svg = tag("svg", tag("title", title), *found, xmlns="http://www.w3.org/2000/svg", **size_of_svg)
    legend = tag("ul", *(tag("li", _swatch(colours[part]), _name(part)) for part in parts), class_="legend")
    below = tag("p", left_out + note, class_="note") if left_out or note else NOTHING
    return tag("figure", tag("figcaption", title), svg, legend, below)


def _name(part: str) -> str:
    return NAMES.get(part, part.replace("_", " "))


def _swatch(colour: str) -> Html:
    size = {"viewBox": "0 0 14 14", "width": 14, "height": 14, "aria_hidden": "true"}
    return tag(
        "svg", tag("rect", x=1, y=1, width=12, height=12, class_=colour), xmlns="http://www.w3.org/2000/svg", **size
    )
