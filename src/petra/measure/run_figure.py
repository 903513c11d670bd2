"""Plots the curves of several runs: Figures 3, 4 and 8 of the Features Replay paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from petra.measure.figure import legend_below, mark_every, new_figure, save_figure, set_ticks, stage_styles
from petra.measure.gradient_similarity import Row
from petra.measure.method_style import LineStyle, styles_of
from petra.measure.similarity_figure import rolling_mean
from petra.measure.ticks import spans_decades

Record = Mapping[str, Any]
"""The metrics of a run after one epoch."""
LOSSES = ("test_loss", "train_loss")


@dataclass(frozen=True)
class Curves:
    """The curves of one run."""

    name: str
    """The label of the run."""
    records: Sequence[Record]
    """The metrics after each epoch."""
    fidelity: Sequence[Row] = field(default_factory=list)
    """Measurements of `petra fidelity`, if there are any."""
    method: str = ""
    """The method of the run, which decides its colour."""


def check_plots() -> None:
    """Raise `ValueError` unless matplotlib is installed."""
    if find_spec("matplotlib") is None:
        raise ValueError("a figure needs matplotlib, which is not installed: pip install matplotlib")


def draw_runs(runs: Sequence[Curves], path: Path) -> None:
    """Plot several runs into a PNG file.

    The first rows have losses over epochs (Figure 4, first row), losses over the time of training (Figure 4, second
    row), and the test accuracy over both. Solid lines show the test split, dashed lines the training split. The other
    rows have σ of every stage during training (Figure 3), with one panel for each run that has measured it.

    Args:
        runs: The curves of the runs.
        path: The file.

    Raises:
        ValueError: If matplotlib is not installed.
    """
    check_plots()
    measured = [run for run in runs if run.fidelity]
    rows = 2 + (len(measured) + 1) // 2
    figure = new_figure(3.1 * rows)
    axes = figure.subplots(rows, 2, squeeze=False)
    styles = styles_of([run.method for run in runs])
    for axis, x in zip(axes[0], ("epoch", "seconds"), strict=True):
        _plot(axis, runs, styles, x, LOSSES, "loss")
    for axis, x in zip(axes[1], ("epoch", "seconds"), strict=True):
        _plot(axis, runs, styles, x, ("test_accuracy",), "test accuracy")
    panels = list(axes[2:].flat)
    for axis, run in zip(panels, measured, strict=False):
        _plot_sigma(axis, run)
    for axis in panels[len(measured) :]:
        axis.set_visible(False)
    legend_below(figure, axes[0][0])
    save_figure(figure, path)


def _plot(
    axis: Any, runs: Sequence[Curves], styles: Sequence[LineStyle], x: str, names: Sequence[str], title: str
) -> None:
    drawn = []
    for run, style in zip(runs, styles, strict=True):
        for name, line in zip(names, ("-", "--"), strict=False):
            points = [(r[x], r[name]) for r in run.records if r.get(x) is not None and r.get(name) is not None]
            look = {"color": style.light, "marker": style.marker, "markersize": 5, "markevery": mark_every(points)}
            label = run.name if line == "-" else None
            axis.plot([p[0] for p in points], [p[1] for p in points], line, label=label, linewidth=1.6, **look)
            drawn += points
    values = [y for _, y in drawn]
    kind = "percent" if names[0].endswith("accuracy") else "number"
    set_ticks(axis, "x", [at for at, _ in drawn], "integer" if x == "epoch" else x)
    set_ticks(axis, "y", values, kind, log=kind == "number" and spans_decades(values))
    split = ": test (solid), training (dashed)" if len(names) > 1 else ""
    axis.set_title(f"{title}{split}", fontsize="medium")
    axis.set_xlabel("epoch" if x == "epoch" else "training time")


def _plot_sigma(axis: Any, run: Curves) -> None:
    stages = sorted({stage for row in run.fidelity if isinstance(stage := row["stage"], int)})
    drawn = [1.0]
    for stage, style in stage_styles(stages).items():
        own = [row for row in run.fidelity if row["stage"] == stage and row["sigma"] is not None]
        values = rolling_mean([float(sigma) for row in own if (sigma := row["sigma"]) is not None])
        axis.plot([row["epoch"] for row in own], values, markevery=mark_every(own), linewidth=1.4, **style)
        drawn += values
    axis.axhline(1.0, color="#57606a", linewidth=0.8, linestyle=":")
    set_ticks(axis, "x", [float(epoch) for row in run.fidelity if (epoch := row["epoch"]) is not None], "integer")
    set_ticks(axis, "y", drawn, "number")
    axis.set_title(f"σ, {run.name}", fontsize="medium")
    axis.set_xlabel("epoch")
    axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=4, frameon=False, fontsize="small")
