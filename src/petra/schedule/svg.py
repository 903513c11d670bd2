"""Draws a schedule as an SVG picture: one row per stage, one column per phase."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from petra.schedule.action import Action, Kind
from petra.schedule.table import ScheduleTable

# Okabe and Ito's palette, which colour-blind readers can tell apart. Black text is readable on all of them.
_COLOURS = {Kind.FORWARD: "#56b4e9", Kind.BACKWARD: "#e69f00", Kind.UPDATE: "#009e73", Kind.LEARN: "#cc79a7"}
_LEGEND = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.UPDATE: "update",
    Kind.LEARN: "synthesizer learns",
}
_WIDTH = 700  # what pages have room for; schedules with more columns get wider
_COLUMN = (24, 44)  # narrowest and widest
_MARGIN, _LABELS, _TICKS = 12, 60, 22
_LANE, _GAP = 20, 8  # height of the forward or the backward half of a row, and the space between rows
_UPDATE = 6  # width of an update, which follows a backward in the same column
_BACKGROUND, _IDLE, _LINE, _TEXT = "#ffffff", "#eef0f3", "#c3c8d0", "#1f2328"


def draw_svg(table: ScheduleTable, title: str = "") -> str:
    """Draw a schedule as an SVG picture.

    Each row is a stage, with forwards in its upper half and backwards in its lower half, and each column is a phase.
    Stages that act in the same column can work at the same time. Numbers are micro-batches. The picture has a
    background, so that it looks the same on light and dark pages.

    Args:
        table: The schedule.
        title: A heading; none if empty.

    Returns:
        The text of an SVG file.
    """
    phases = [(t, phase) for t, tick in enumerate(table.ticks) for phase in tick]
    column = min(max((_WIDTH - 2 * _MARGIN - _LABELS) / max(len(phases), 1), _COLUMN[0]), _COLUMN[1])
    left, top = _MARGIN + _LABELS, _MARGIN + (26 if title else 0) + _TICKS
    row = 2 * _LANE + _GAP
    right, bottom = left + column * len(phases), top + row * table.stages
    kinds = [kind for kind in _LEGEND if any(action.kind is kind for action in table.actions)]
    legend = [(_LEGEND[kind], _COLOURS[kind]) for kind in kinds] + [("number: micro-batch", _BACKGROUND)]
    offsets = [sum(38 + 6.5 * len(text) for text, _ in legend[:i]) for i in range(len(legend) + 1)]
    width = max(right, left + offsets[-1], left + 8 * len(title)) + _MARGIN
    height = bottom + _GAP + 22 + _MARGIN

    body = [f'<rect width="{width:g}" height="{height:g}" rx="6" fill="{_BACKGROUND}"/>']
    if title:
        body.append(_text(_MARGIN, _MARGIN + 14, title, "start", 'font-weight="bold" font-size="14"'))
    body.append(_text(_MARGIN, top - 8, "tick", "start"))
    for stage in range(table.stages):
        y = top + row * stage
        body.append(_text(_MARGIN, y + _LANE + 4, f"stage {stage}", "start"))
        body.append(_rect(left, y, right - left, 2 * _LANE, _IDLE))
    for x, label, end in _spans(phases, left, column):
        body.append(_text((x + end) / 2, top - 8, label, "middle"))
        body.append(f'<path d="M{end:g} {top - _TICKS + 4}V{bottom - _GAP}" stroke="{_LINE}"/>')
    for i, (t, phase) in enumerate(phases):
        for stage in range(table.stages):
            actions = [action for action in phase if action.stage == stage]
            body += _cell(actions, t, left + i * column, top + row * stage, column)
    for (text, colour), offset in zip(legend, offsets[:-1], strict=True):
        body.append(_rect(left + offset, bottom + _GAP + 4, 14, 14, colour))
        body.append(_text(left + offset + 20, bottom + _GAP + 16, text, "start"))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" height="{height:g}" '
        f'viewBox="0 0 {width:g} {height:g}" role="img" font-family="system-ui, sans-serif" font-size="12" '
        f'fill="{_TEXT}">'
    )
    described = f"<title>{escape(title or f'Schedule of {table.stages} stages')}</title>"
    return "\n".join([head, described, *body, "</svg>"]) + "\n"


def _spans(phases: Sequence[tuple[int, object]], left: float, column: float) -> list[tuple[float, str, float]]:
    """Return where each tick begins, its number, and where it ends."""
    ticks = [t for t, _ in phases]
    return [
        (left + column * ticks.index(t), str(t), left + column * (ticks.index(t) + ticks.count(t)))
        for t in dict.fromkeys(ticks)
    ]


def _cell(actions: Sequence[Action], tick: int, x: float, y: float, column: float) -> list[str]:
    """Return the shapes of one stage in one phase: forwards above; backwards, updates and synthesizers below."""
    found: list[str] = []
    lanes = [a for a in actions if a.kind is Kind.FORWARD], [a for a in actions if a.kind is not Kind.FORWARD]
    for lane, top in zip(lanes, (y, y + _LANE), strict=True):
        updates = sum(action.kind is Kind.UPDATE for action in lane)
        wide = (column - 2 - updates * _UPDATE) / max(len(lane) - updates, 1)
        start = x + 1 if len(lane) > updates else x + column - 1 - updates * _UPDATE
        for action in lane:
            width = _UPDATE if action.kind is Kind.UPDATE else wide
            found.append(_action(action, tick, start, top + 1, width))
            start += width
    return found


def _action(action: Action, tick: int, x: float, y: float, width: float) -> str:
    """Return the rectangle of an action, with its micro-batch and a description to hover over."""
    said = f"tick {tick}, stage {action.stage}: {_LEGEND[action.kind]}"
    if action.kind is Kind.UPDATE:
        said += f" after micro-batch {action.microbatch}" if action.microbatch >= 0 else " with zero gradients"
    else:
        said += f", micro-batch {action.microbatch}"
    shape = _rect(x, y, width, _LANE - 2, _COLOURS[action.kind], f' class="{action.kind.name.lower()}"')
    number = "" if action.kind is Kind.UPDATE else _text(x + width / 2, y + 13, str(action.microbatch), "middle")
    return f"<g><title>{said}</title>{shape}{number}</g>"


def _rect(x: float, y: float, width: float, height: float, colour: str, more: str = "") -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2" fill="{colour}"{more}/>'


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{" " * bool(more)}{more}>{escape(text)}</text>'
