"""Draws the operations of a simulation on a time axis, as SVG."""

from __future__ import annotations

from html import escape

from petra.simulation.result import Simulation

# Okabe and Ito's palette, as in `petra.schedule.svg`.
_COLOURS = {"F": "#56b4e9", "B": "#e69f00", "W": "#f0e442", "U": "#009e73", "L": "#cc79a7"}
_NAMES = {
    "F": "forward",
    "B": "backward",
    "W": "gradients of parameters",
    "U": "update",
    "L": "synthesizer learns",
}
_WIDTH, _MARGIN, _LABELS, _ROW, _GAP = 1000.0, 12.0, 76.0, 20.0, 4.0
_NUMBERED = 16  # pixels that the number of a micro-batch needs
_BACKGROUND, _IDLE, _TEXT = "#ffffff", "#eef0f3", "#1f2328"


def draw_timeline(simulation: Simulation, title: str = "", updates: int = 2) -> str:
    """Draw what every worker of the first replica does, for the last updates of the simulation.

    Each row is a worker, and the width of an operation is its time. Numbers are micro-batches, where there is room.

    Args:
        simulation: The simulation.
        title: A heading; none if empty.
        updates: The number of updates to show, if as many were recorded.

    Returns:
        The text of an SVG file.
    """
    events = simulation.trace.events()
    stop = max(event.end for event in events)
    start = max(stop - updates * simulation.seconds_per_update, min(event.start for event in events))
    scale = (_WIDTH - 2 * _MARGIN - _LABELS) / max(stop - start, 1e-300)
    left, top = _MARGIN + _LABELS, _MARGIN + (26 if title else 0)
    workers = simulation.cycle.workers
    bottom = top + (_ROW + _GAP) * workers
    kinds = [kind for kind in _COLOURS if kind in simulation.cycle.kinds]
    height = bottom + 22 + _MARGIN
    body = [f'<rect width="{_WIDTH:g}" height="{height:g}" rx="6" fill="{_BACKGROUND}"/>']
    if title:
        body.append(_text(_MARGIN, _MARGIN + 14, title, 'font-weight="bold" font-size="14"'))
    for worker in range(workers):
        y = top + (_ROW + _GAP) * worker
        body.append(_text(_MARGIN, y + 14, f"worker {worker}"))
        body.append(_rect(left, y, _WIDTH - _MARGIN - left, _ROW, _IDLE))
    for event in events:
        begin, end = max(event.start, start), event.end
        if end > begin:
            x, width = left + (begin - start) * scale, (end - begin) * scale
            y = top + (_ROW + _GAP) * event.worker
            said = f"stage {event.stage}: {_NAMES[event.kind]}, micro-batch {event.microbatch}"
            number = ""
            if width >= _NUMBERED and event.kind != "U":
                number = _text(x + width / 2, y + 14, str(event.microbatch), 'text-anchor="middle"')
            shape = _rect(x, y, max(width - 0.5, 0.5), _ROW, _COLOURS[event.kind])
            body.append(f"<g><title>{said}</title>{shape}{number}</g>")
    x = left
    for kind in kinds:
        body += [_rect(x, bottom + 4, 14, 14, _COLOURS[kind]), _text(x + 20, bottom + 16, _NAMES[kind])]
        x += 40 + 6.5 * len(_NAMES[kind])
    body.append(_text(_WIDTH - _MARGIN, bottom + 16, f"{stop - start:.3g} s", 'text-anchor="end"'))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH:g}" height="{height:g}" '
        f'viewBox="0 0 {_WIDTH:g} {height:g}" role="img" font-family="system-ui, sans-serif" font-size="12" '
        f'fill="{_TEXT}">'
    )
    described = f"<title>{escape(title or f'Timeline of {workers} workers')}</title>"
    return "\n".join([head, described, *body, "</svg>"]) + "\n"


def _rect(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{height:g}" fill="{colour}"/>'


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.2f}" y="{y:g}"{" " * bool(more)}{more}>{escape(text)}</text>'
