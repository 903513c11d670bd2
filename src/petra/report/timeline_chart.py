"""A measured timeline as SVG: what every stage did in a few ticks of a full pipeline."""

from __future__ import annotations

from petra.measure.ticks import Axis
from petra.measure.timeline import Event, Trace
from petra.report.html import NOTHING, Html, tag
from petra.schedule import Kind

_CLASSES = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.UPDATE: "update", Kind.LEARN: "learn"}
NAMES = {**_CLASSES, Kind.LEARN: "synthesizer learns"}
_WIDTH, _LEFT, _RIGHT, _TOP, _ROW, _BAR, _BOTTOM = 760, 118, 12, 4, 26, 18, 40
_TICKS = 6
_MOST_EVENTS = 400


def shown_events(trace: Trace) -> list[Event]:
    """Return the actions of a few ticks with a full pipeline: of all such windows, one of median duration."""
    ticks = sorted({e.tick for e in trace.events})
    full = [tick for tick in ticks if tick >= trace.fill] or ticks
    in_tick = max(len(trace.events) // max(len(ticks), 1), 1)
    count = max(1, min(_TICKS, _MOST_EVENTS // in_tick))
    began: dict[int, float] = {}
    ended: dict[int, float] = {}
    for e in trace.events:
        began[e.tick] = min(began.get(e.tick, e.began), e.began)
        ended[e.tick] = max(ended.get(e.tick, e.ended), e.ended)
    starts = range(max(len(full) - count, 0) + 1) if full else ()
    windows = sorted(starts, key=lambda i: ended[full[min(i + count, len(full)) - 1]] - began[full[i]])
    first = windows[len(windows) // 2] if windows else 0
    chosen = set(full[first : first + count])
    return [e for e in trace.events if e.tick in chosen]


def timeline_chart(trace: Trace, title: str) -> Html:
    """Draw a few ticks of a trace, with one row per stage.

    Args:
        trace: The trace.
        title: The title of the figure.

    Returns:
        A figure, or nothing if the trace is empty.
    """
    events = shown_events(trace)
    if not events:
        return NOTHING
    rows = sorted({(e.process, e.action.stage) for e in events})
    start, stop = min(e.began for e in events), max(e.ended for e in events)
    axis = Axis.of(
        [0.0, (stop - start) * 1000], "integer" if stop - start > 0.01 else "number", 6, zero=True, tight=True
    )
    width, bottom = _WIDTH - _LEFT - _RIGHT, _TOP + _ROW * len(rows)
    found = []
    for value, label in zip(axis.ticks, axis.labels, strict=True):
        x = _LEFT + axis.position(value) * width
        found.append(tag("path", d=f"M{x:.1f} {_TOP}V{bottom}", class_="grid"))
        found.append(tag("text", label, x=f"{x:.1f}", y=bottom + 16, text_anchor="middle"))
    found.append(tag("text", "milliseconds", x=_LEFT + width / 2, y=bottom + 33, text_anchor="middle", class_="label"))
    for i, (process, stage) in enumerate(rows):
        owner = f"{trace.names[process]}, " if len(trace.names) > 1 else ""
        y = _TOP + _ROW * i
        found.append(tag("text", f"{owner}stage {stage}", x=_LEFT - 8, y=y + _BAR - 1, text_anchor="end"))
        found.append(tag("rect", x=_LEFT, y=y + 4, width=width, height=_BAR, class_="idle"))
    for e in events:
        x = _LEFT + axis.position((e.began - start) * 1000) * width
        wide = max(axis.position((e.ended - e.began) * 1000 + axis.low) * width, 0.5)
        y = _TOP + _ROW * rows.index((e.process, e.action.stage)) + 4
        number = f"micro-batch {e.action.microbatch}, " if e.action.microbatch >= 0 else ""
        said = f"tick {e.tick}: {NAMES[e.action.kind]}, {number}{(e.ended - e.began) * 1000:.2f} ms"
        shape = {"x": f"{x:.1f}", "y": y, "width": f"{wide:.1f}", "height": _BAR}
        found.append(tag("rect", tag("title", said), class_=_CLASSES[e.action.kind], **shape))
        if e.action.kind is not Kind.UPDATE and wide > 9 * len(str(e.action.microbatch)):
            place = {"x": f"{x + wide / 2:.1f}", "y": y + 13, "text_anchor": "middle", "class_": "inside"}
            found.append(tag("text", e.action.microbatch, **place))
    size = {"viewBox": f"0 0 {_WIDTH} {bottom + _BOTTOM}", "role": "img", "aria_label": title, "class_": "wide"}
    svg = tag("svg", tag("title", title), *found, xmlns="http://www.w3.org/2000/svg", **size)
    kinds = [kind for kind in _CLASSES if any(e.action.kind is kind for e in events)]
    legend = tag("ul", *(tag("li", _swatch(kind), NAMES[kind]) for kind in kinds), class_="legend")
    return tag("figure", tag("figcaption", title), tag("div", svg, class_="scroll"), legend)


def _swatch(kind: Kind) -> Html:
    size = {"viewBox": "0 0 14 14", "width": 14, "height": 14, "aria_hidden": "true"}
    shape = tag("rect", x=1, y=1, width=12, height=12, class_=_CLASSES[kind])
    return tag("svg", shape, xmlns="http://www.w3.org/2000/svg", **size)
