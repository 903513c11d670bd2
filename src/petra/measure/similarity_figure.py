"""Plots the similarity of gradients during training: Figures 5 and 6 of PETRA, Figure 3 of Features Replay."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from petra.measure.gradient_similarity import Row, summarise


def draw(rows: Sequence[Row], path: Path, title: str = "") -> bool:
    """Plot measurements into a PNG file.

    The first row compares the used gradient (solid lines) and the delayed gradient (dashed lines) with the exact one.
    The second row compares the used gradient with the delayed one, and shows cosines over stages in the last tenth of
    the measurements. Each stage has a colour. Lines are rolling means over a twentieth of the measurements.

    Args:
        rows: The measurements.
        path: The file.
        title: The title of the figure.

    Returns:
        Whether matplotlib is installed, so that the figure was drawn.
    """
    if find_spec("matplotlib") is None:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    stages = sorted({stage for row in rows if isinstance(stage := row["stage"], int)})
    figure = Figure(figsize=(15, 8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 3).flat
    _over_updates(axes[0], rows, stages, "cosine", "delayed_cosine", "cosine to the exact gradient")
    _over_updates(axes[1], rows, stages, "norm_ratio", "delayed_norm_ratio", "norm relative to the exact gradient")
    _over_updates(axes[2], rows, stages, "sigma", "delayed_sigma", "σ")
    _over_updates(axes[3], rows, stages, "cosine_to_delayed", None, "cosine to the delayed gradient")
    _over_updates(axes[4], rows, stages, "norm_ratio_to_delayed", None, "norm relative to the delayed gradient")
    _over_stages(axes[5], rows, stages)
    axes[0].legend(fontsize="x-small", ncols=2, title="stage")
    figure.suptitle(title)
    temporary = path.with_name(path.name + ".tmp")
    figure.savefig(temporary, format="png", dpi=120)
    temporary.replace(path)
    return True


def _over_updates(
    axis: Any, rows: Sequence[Row], stages: Sequence[int], name: str, dashed: str | None, title: str
) -> None:
    from matplotlib import colormaps

    for i, stage in enumerate(stages):
        own = [row for row in rows if row["stage"] == stage]
        colour = colormaps["viridis"](i / max(len(stages) - 1, 1))
        for key, line in ((dashed, "--"), (name, "-")):
            if key is not None:
                points = [(row["update"], row[key]) for row in own if row[key] is not None]
                updates, values = [x for x, _ in points], [float(y) for _, y in points if y is not None]
                style = {"color": colour, "marker": marker(points)}
                axis.plot(updates, rolling_mean(values), line, label=stage if line == "-" else None, **style)
    axis.axhline(1.0, color="grey", linewidth=0.5)
    axis.set(xlabel="update", title=title if dashed is None else f"{title}\n(dashed: of the delayed gradient)")


def _over_stages(axis: Any, rows: Sequence[Row], stages: Sequence[int]) -> None:
    updates = sorted({update for row in rows if isinstance(update := row["update"], int)})
    late = [row for row in rows if row["stage"] != "all" and row["update"] in updates[-max(1, len(updates) // 10) :]]
    means = {row["stage"]: row for row in summarise(late)}
    for name, label in (
        ("cosine", "used and exact"),
        ("delayed_cosine", "delayed and exact"),
        ("cosine_to_delayed", "used and delayed"),
    ):
        points = [(stage, means[stage][name]) for stage in stages if stage in means and means[stage][name] is not None]
        axis.plot([x for x, _ in points], [y for _, y in points], "o-", label=label)
    axis.legend(fontsize="small")
    axis.set_xticks(stages)
    axis.set(xlabel="stage", title="cosine, last tenth of the measurements")


def rolling_mean(values: Sequence[float]) -> list[float]:
    """Return the mean of each value and those before it, over a window of a twentieth of all values."""
    window = max(1, len(values) // 20)
    parts = [values[max(0, i + 1 - window) : i + 1] for i in range(len(values))]
    return [sum(part) / len(part) for part in parts]


def marker(points: Sequence[object]) -> str | None:
    """Return a marker for a line of a single point, which would be invisible without one."""
    return "o" if len(points) == 1 else None
