"""Draws runs side by side: Figures 3, 4 and 8 of the Features Replay paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from petra.measure.likeness import Row
from petra.measure.likeness_figure import marker, rolling

Record = Mapping[str, Any]
"""What a run notes after an epoch."""
LOSSES = ("test_loss", "train_loss")


@dataclass(frozen=True)
class Curves:
    """What is drawn of a run."""

    name: str
    records: Sequence[Record]
    fidelity: Sequence[Row] = field(default_factory=list)
    """Measurements of `petra fidelity`, if there are any."""


def check_plots() -> None:
    """Raise ValueError unless there is something to draw with."""
    if find_spec("matplotlib") is None:
        raise ValueError("a figure needs a package that is not there: pip install matplotlib")


def draw_runs(runs: Sequence[Curves], path: Path) -> None:
    """Draw the runs into a PNG.

    Above, losses against epochs (Figure 4, first row) and against seconds of training (second row), and test
    accuracy; full lines are of the test, dashed ones of the training split. Below, σ of every stage during training
    (Figure 3), a panel for each run that has measured it.
    """
    check_plots()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    measured = [run for run in runs if run.fidelity]
    columns = max(3, len(measured))
    figure = Figure(figsize=(5 * columns, 4 * (2 if measured else 1)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2 if measured else 1, columns, squeeze=False)
    for axis, over in zip(axes[0], ("epoch", "seconds"), strict=False):
        _over(axis, runs, over, LOSSES, "loss: test, and training (dashed)")
        if _astray([r[name] for run in runs for r in run.records for name in LOSSES if r.get(name) is not None]):
            axis.set_yscale("log")
    _over(axes[0][2], runs, "epoch", ("test_accuracy",), "test accuracy")
    axes[0][0].legend(fontsize="small")
    for axis, run in zip(axes[1] if measured else (), measured, strict=False):
        _sigma(axis, run)
    for axis in (*axes[0][3:], *(axes[1][len(measured) :] if measured else ())):
        axis.set_visible(False)
    whole = path.with_name(path.name + ".tmp")
    figure.savefig(whole, format="png", dpi=120)
    whole.replace(path)


def _over(axis: Any, runs: Sequence[Curves], over: str, names: Sequence[str], of: str) -> None:
    for i, run in enumerate(runs):
        for name, line in zip(names, ("-", "--"), strict=False):
            points = [(r[over], r[name]) for r in run.records if r.get(over) is not None and r.get(name) is not None]
            label = run.name if line == "-" else None
            look = {"color": f"C{i}", "marker": marker(points)}
            axis.plot([x for x, _ in points], [y for _, y in points], line, label=label, **look)
    axis.set(xlabel=over, title=of)


def _astray(losses: Sequence[float]) -> bool:
    """Whether one is so high that the others would be a flat line."""
    return bool(losses) and max(losses) > 100 * median(losses)


def _sigma(axis: Any, run: Curves) -> None:
    from matplotlib import colormaps

    stages = sorted({stage for row in run.fidelity if isinstance(stage := row["stage"], int)})
    for i, stage in enumerate(stages):
        own = [row for row in run.fidelity if row["stage"] == stage and row["sigma"] is not None]
        values = rolling([float(sigma) for row in own if (sigma := row["sigma"]) is not None])
        colour = colormaps["viridis"](i / max(len(stages) - 1, 1))
        axis.plot([row["epoch"] for row in own], values, color=colour, label=stage, marker=marker(own))
    axis.axhline(0.0, color="black", linewidth=0.5)
    axis.axhline(1.0, color="grey", linewidth=0.5)
    axis.set(xlabel="epoch", title=f"σ, {run.name}")
    axis.legend(fontsize="x-small", title="stage")
