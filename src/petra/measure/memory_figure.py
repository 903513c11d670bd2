"""Plots activation memory over the number of stages: Figure 5 of the Features Replay paper."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path

from petra.measure.figure import legend_below, new_figure, save_figure, set_ticks
from petra.measure.method_style import styles_of

_FLAT = 4
"""If the largest method takes this many times the smallest, the axis is logarithmic, or small ones would look alike."""


def draw_memory(methods: Mapping[str, Mapping[int, int]], path: Path, title: str = "") -> bool:
    """Plot the activations of several methods into a PNG file.

    Args:
        methods: For each method, the bytes of activations by number of stages.
        path: The file.
        title: The title of the figure.

    Returns:
        True if matplotlib is installed, so that the figure was drawn.
    """
    if find_spec("matplotlib") is None:
        return False
    figure = new_figure(4.6)
    axis = figure.subplots()
    dashes = cycle(["-", "--", "-.", ":"])  # equal lines hide each other otherwise
    for (name, sizes), style in zip(methods.items(), styles_of(list(methods)), strict=True):
        line = {"color": style.light, "marker": style.marker, "markersize": 6, "linestyle": next(dashes)}
        axis.plot(list(sizes), list(sizes.values()), label=name, **line)
    every = [size for sizes in methods.values() for size in sizes.values()]
    set_ticks(axis, "x", [k for sizes in methods.values() for k in sizes], "integer")
    numbers = sorted({k for sizes in methods.values() for k in sizes})
    axis.set_xticks(numbers, list(map(str, numbers)))
    log = max(every) > _FLAT * min(every) > 0
    set_ticks(axis, "y", every, "bytes", zero=not log, log=log)
    kind = " (logarithmic)" if log else ""
    axis.set(xlabel="number of stages J", ylabel=f"activations of all stages{kind}", title=title)
    legend_below(figure, axis)
    save_figure(figure, path)
    return True
