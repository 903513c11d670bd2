"""Plots the curves of several runs: Figures 3, 4 and 8 of the Features Replay paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from petra.measure.gradient_similarity import Row
from petra.measure.similarity_figure import marker, rolling_mean

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


def check_plots() -> None:
    """Raise `ValueError` unless matplotlib is installed."""
    if find_spec("matplotlib") is None:
        raise ValueError("a figure needs matplotlib, which is not installed: pip install matplotlib")


def draw_runs(runs: Sequence[Curves], path: Path) -> None:
    """Plot several runs into a PNG file.

    The first row has losses over epochs (Figure 4, first row), losses over seconds of training (Figure 4, second row)
    and the test accuracy. Solid lines show the test split, dashed lines the training split. The second row has σ of
    every stage during training (Figure 3), with one panel for each run that has measured it.

    Args:
        runs: The curves of the runs.
        path: The file.

    Raises:
        ValueError: If matplotlib is not installed.
    """
    check_plots()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    measured = [run for run in runs if run.fidelity]
    columns = max(3, len(measured))
    figure = Figure(figsize=(5 * columns, 4 * (2 if measured else 1)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2 if measured else 1, columns, squeeze=False)
    for axis, x in zip(axes[0], ("epoch", "seconds"), strict=False):
        _plot(axis, runs, x, LOSSES, "loss: test (solid) and training (dashed)")
        if _has_outlier([r[name] for run in runs for r in run.records for name in LOSSES if r.get(name) is not None]):
            axis.set_yscale("log")
    _plot(axes[0][2], runs, "epoch", ("test_accuracy",), "test accuracy")
    axes[0][0].legend(fontsize="small")
    for axis, run in zip(axes[1] if measured else (), measured, strict=False):
        _plot_sigma(axis, run)
    for axis in (*axes[0][3:], *(axes[1][len(measured) :] if measured else ())):
        axis.set_visible(False)
    temporary = path.with_name(path.name + ".tmp")
    figure.savefig(temporary, format="png", dpi=120)
    temporary.replace(path)


def _plot(axis: Any, runs: Sequence[Curves], x: str, names: Sequence[str], title: str) -> None:
    for i, run in enumerate(runs):
        for name, line in zip(names, ("-", "--"), strict=False):
            points = [(r[x], r[name]) for r in run.records if r.get(x) is not None and r.get(name) is not None]
            label = run.name if line == "-" else None
            style = {"color": f"C{i}", "marker": marker(points)}
            axis.plot([p[0] for p in points], [p[1] for p in points], line, label=label, **style)
    axis.set(xlabel=x, title=title)


def _has_outlier(losses: Sequence[float]) -> bool:
    """Return whether one loss is so high that the others would look like a flat line."""
    return bool(losses) and max(losses) > 100 * median(losses)


def _plot_sigma(axis: Any, run: Curves) -> None:
    from matplotlib import colormaps

    stages = sorted({stage for row in run.fidelity if isinstance(stage := row["stage"], int)})
    for i, stage in enumerate(stages):
        own = [row for row in run.fidelity if row["stage"] == stage and row["sigma"] is not None]
        values = rolling_mean([float(sigma) for row in own if (sigma := row["sigma"]) is not None])
        colour = colormaps["viridis"](i / max(len(stages) - 1, 1))
        axis.plot([row["epoch"] for row in own], values, color=colour, label=stage, marker=marker(own))
    axis.axhline(0.0, color="black", linewidth=0.5)
    axis.axhline(1.0, color="grey", linewidth=0.5)
    axis.set(xlabel="epoch", title=f"σ, {run.name}")
    axis.legend(fontsize="x-small", title="stage")
