"""Plots the similarity of gradients during training: Figures 5 and 6 of PETRA, Figure 3 of Features Replay."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from petra.measure.figure import legend_below, mark_every, new_figure, save_figure, set_ticks, stage_styles
from petra.measure.gradient_similarity import Row, summarise

_PAIRS = (
    ("cosine", "used and exact"),
    ("delayed_cosine", "delayed and exact"),
    ("cosine_to_delayed", "used and delayed"),
)


def draw(rows: Sequence[Row], path: Path, title: str = "") -> bool:
    """Plot measurements into a PNG file.

    The first three plots compare the used gradient (solid lines) and the delayed gradient (dashed lines) with the exact
    one, the fourth shows cosines over stages in the last tenth of the measurements, and the last two compare the used
    gradient with the delayed one. Each stage has a colour and a marker. Lines are rolling means over a twentieth of the
    measurements.

    Args:
        rows: The measurements.
        path: The file.
        title: The title of the figure.

    Returns:
        True if matplotlib is installed, so that the figure was drawn.
    """
    if find_spec("matplotlib") is None:
        return False
    stages = sorted({stage for row in rows if isinstance(stage := row["stage"], int)})
    figure = new_figure(9.6)
    axes = figure.subplots(3, 2).flat
    _over_updates(axes[0], rows, stages, "cosine", "delayed_cosine", "cosine to the exact gradient")
    _over_updates(axes[1], rows, stages, "norm_ratio", "delayed_norm_ratio", "norm / norm of the exact gradient")
    _over_updates(axes[2], rows, stages, "sigma", "delayed_sigma", "σ")
    _over_stages(axes[3], rows, stages)
    _over_updates(axes[4], rows, stages, "cosine_to_delayed", None, "cosine to the delayed gradient")
    _over_updates(axes[5], rows, stages, "norm_ratio_to_delayed", None, "norm / norm of the delayed gradient")
    legend_below(figure, axes[0])
    figure.suptitle(title)
    save_figure(figure, path)
    return True


def _over_updates(
    axis: Any, rows: Sequence[Row], stages: Sequence[int], name: str, dashed: str | None, title: str
) -> None:
    drawn, shown = [1.0], [float(update) for row in rows if (update := row["update"]) is not None]
    for stage, style in stage_styles(stages).items():
        own = [row for row in rows if row["stage"] == stage]
        for key, line in ((dashed, "--"), (name, "-")):
            if key is not None:
                points = [(row["update"], row[key]) for row in own if row[key] is not None]
                values = rolling_mean([float(y) for _, y in points if y is not None])
                look = {**style, "markevery": mark_every(points), "linewidth": 1.2}
                look["label"] = style["label"] if line == "-" else None
                axis.plot([x for x, _ in points], values, line, **look)
                drawn += values
    axis.axhline(1.0, color="#57606a", linewidth=0.8, linestyle=":")
    set_ticks(axis, "x", shown, "integer")
    set_ticks(axis, "y", drawn, "number")
    axis.set_title(title if dashed is None else f"{title}\n(dashed: of the delayed gradient)", fontsize="medium")
    axis.set_xlabel("update")


def _over_stages(axis: Any, rows: Sequence[Row], stages: Sequence[int]) -> None:
    updates = sorted({update for row in rows if isinstance(update := row["update"], int)})
    late = [row for row in rows if row["stage"] != "all" and row["update"] in updates[-max(1, len(updates) // 10) :]]
    means = {row["stage"]: row for row in summarise(late)}
    drawn = [1.0]
    for (name, label), line in zip(_PAIRS, ("o-", "s--", "^:"), strict=True):
        points = [(stage, means[stage][name]) for stage in stages if stage in means and means[stage][name] is not None]
        axis.plot([x for x, _ in points], [y for _, y in points], line, label=label)
        drawn += [float(y) for _, y in points if y is not None]
    set_ticks(axis, "x", stages, "integer")
    set_ticks(axis, "y", drawn, "number")
    axis.set_title("cosine, last tenth of the measurements", fontsize="medium")
    axis.set_xlabel("stage")
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=3, frameon=False, fontsize="x-small")


def rolling_mean(values: Sequence[float]) -> list[float]:
    """Return the mean of each value and those before it, over a window of a twentieth of all values."""
    window = max(1, len(values) // 20)
    parts = [values[max(0, i + 1 - window) : i + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]
