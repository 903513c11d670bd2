"""Settings of all figures: a size that is readable at 800 pixels, round ticks, and legends outside plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from petra.measure.ticks import Axis

WIDTH = 8.0
"""The width of figures in inches."""
DPI = 200
MOST_NAMED = 8
"""The largest number of stages that a legend names."""
STAGE_MARKERS = "os^Dv*Xdph"


def new_figure(height: float) -> Any:
    """Return an empty figure of matplotlib that can be saved without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure as a PNG file in one step."""
    temporary = path.with_name(path.name + ".tmp")
    figure.savefig(temporary, format="png")
    temporary.replace(path)


def set_ticks(
    axis: Any, x_or_y: str, values: Sequence[float], kind: str, *, zero: bool = False, log: bool = False
) -> None:
    """Give an axis round ticks for its values: whole epochs, percent, or round sizes.

    Args:
        axis: The axes of matplotlib.
        x_or_y: Which of its two axes.
        values: The values that are drawn.
        kind: The kind of these values (see `Axis`).
        zero: The axis begins at 0.
        log: The axis is logarithmic.
    """
    found = Axis.of(values, kind, 5, zero=zero, log=log, tight=log or x_or_y == "x")
    margin = 0.03 * (found.high - found.low)
    if found.log:
        getattr(axis, f"set_{x_or_y}scale")("log")
        getattr(axis, f"{x_or_y}axis").set_minor_locator(_no_ticks())
        low, high = found.low / 1.1, found.high * 1.1
    else:
        low, high = found.low if zero else found.low - margin, found.high + margin
    getattr(axis, f"set_{x_or_y}lim")(low, high)
    getattr(axis, f"set_{x_or_y}ticks")(found.ticks, found.labels)
    axis.grid(True, color="#dfe4ea", linewidth=0.7)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _no_ticks() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()


def stage_styles(stages: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Return colour and marker of each stage, for matplotlib.

    Args:
        stages: The stages.

    Returns:
        Arguments of `plot`. Of many stages, some have a label.
    """
    from matplotlib import colormaps

    last = max(len(stages) - 1, 1)
    named = {round(i * last / (MOST_NAMED - 1)) for i in range(MOST_NAMED)} if last >= MOST_NAMED else range(last + 1)
    return {
        stage: {
            "color": colormaps["viridis"](0.92 * i / last),
            "marker": STAGE_MARKERS[i % len(STAGE_MARKERS)],
            "markersize": 4,
            "label": f"stage {stage}" if i in named else None,
        }
        for i, stage in enumerate(stages)
    }


def mark_every(points: Sequence[object]) -> int:
    """Return how many points of a line are between two markers."""
    return max(1, len(points) // 10)


def legend_below(figure: Any, axis: Any) -> None:
    """Draw the legend of an axis below all plots of a figure."""
    handles, labels = axis.get_legend_handles_labels()
    if labels:
        widest = max(map(len, labels))
        columns = max(1, min(len(labels), 90 // (widest + 6)))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize="medium")
