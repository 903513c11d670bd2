"""Figures from results; without matplotlib there are none."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

from plans import PLANS, TABLE_4
from tables import Known, groups, values


def draw(plan: str, known: Known, path: Path) -> bool:
    """Draw what there is of a plan; False if there is nothing, or nothing to draw with."""
    if find_spec("matplotlib") is None or not any(trial.name in known for trial in PLANS[plan]):
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    wide = plan == "fidelity"
    figure = Figure(figsize=(16, 8) if wide else (8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    DRAWN[plan](figure, known)
    figure.savefig(path, dpi=120)
    return True


def _curves(plan: str) -> Any:
    def drawn(figure: Any, known: Known) -> None:
        axis = figure.subplots()
        for place, (name, trials) in enumerate(groups(plan).items()):
            runs = [known[t.name]["test_accuracies"] for t in trials if t.name in known]
            if runs:
                means = [100 * fmean(v) for v in zip(*runs, strict=True)]
                axis.plot(range(1, len(means) + 1), means, "-" if place < 10 else "--", label=name)
        axis.legend(fontsize="x-small")
        axis.set(xlabel="epoch", ylabel="test accuracy, %", ylim=(max(80, axis.get_ylim()[0]), None))

    return drawn


def _figure4(figure: Any, known: Known) -> None:
    axis = figure.subplots()
    for method, line in (("petra", "o-"), ("backprop", "s--")):
        own = [t for t in PLANS["figure4"] if t.options["method"] == method and t.name in known]
        points = sorted((t.options["accumulate"], 100 * known[t.name]["mean_after_last_drop"]) for t in own)
        axis.plot([k for k, _ in points], [y for _, y in points], line, label=method)
    axis.set_xscale("log", base=2)
    axis.legend()
    axis.set(xlabel="accumulation k", ylabel="test accuracy, %, mean after the last drop")


def _table4(figure: Any, known: Known) -> None:
    axis = figure.subplots()
    names = ("revnet18", "revnet34", "revnet50")
    for place, method in enumerate(TABLE_4):
        found = [
            values([t for t in PLANS["table4"] if (t.options["method"], t.options["model"]) == (method, m)], known)
            for m in names
        ]
        points = [(i + 0.15 * (place - 2), 100 * fmean(v)) for i, v in enumerate(found) if v]
        axis.bar([x for x, _ in points], [y for _, y in points], 0.14, label=method)
    axis.set_xticks(range(3), names)
    axis.legend(fontsize="small")
    lowest = min(100 * known[t.name]["test_accuracy"] for t in PLANS["table4"] if t.name in known)
    axis.set(ylabel="test accuracy, %", ylim=(lowest - 1, None))


def _corrections(figure: Any, known: Known) -> None:
    axis = figure.subplots()
    found = [(name, 100 * v) for name, t in groups("corrections").items() for v in values(t, known)]
    names = list(dict.fromkeys(name for name, _ in found))
    axis.plot([v for _, v in found], [names.index(name) for name, _ in found], "o")
    axis.set_yticks(range(len(names)), [name.removeprefix("revnet18-") for name in names], fontsize="small")
    axis.invert_yaxis()
    axis.grid(axis="x")
    axis.set(xlabel="test accuracy, %, a point a seed")


def _fidelity(figure: Any, known: Known) -> None:
    """Above, Figure 5 for PETRA in lock-step; below, Figure 6 at four moments of it."""
    done = [t for t in PLANS["fidelity"] if t.name in known]
    rows = known[done[0].name]["likeness"]
    epochs = sorted({row["epoch"] for row in rows})
    axes = figure.subplots(2, 4)
    figure.suptitle(done[0].group)
    titles = ("5a cosine(used, delayed)", "5b cosine to exact", "5c ‖used‖/‖delayed‖", "5d norm over exact")
    pairs = (("cosine_to_delayed", None), ("cosine", "delayed_cosine"))
    pairs += (("norm_ratio_to_delayed", None), ("norm_ratio", "delayed_norm_ratio"))
    for axis, title, (full, dashed) in zip(axes[0], titles, pairs, strict=True):
        _over_epochs(axis, rows, full, dashed)
        axis.set(title=title + (" (dashed: delayed)" if dashed else ""), xlabel="epoch")
    axes[0][0].legend(fontsize="x-small", title="stage", ncols=2)
    for axis, share in zip(axes[1], (1 / 6, 5 / 12, 7 / 12, 5 / 6), strict=True):
        epoch = epochs[min(len(epochs) - 1, round(share * len(epochs)))]
        _over_stages(axis, [row for row in rows if row["epoch"] == epoch])
        axis.set(title=f"6 cosines in epoch {epoch}", xlabel="stage", ylim=(None, 1.02))
    axes[1][0].legend(fontsize="small")


def _over_epochs(axis: Any, rows: Sequence[dict[str, Any]], full: str, dashed: str | None) -> None:
    from matplotlib import colormaps

    stages = sorted({row["stage"] for row in rows})
    for i, stage in enumerate(stages):
        colour = colormaps["viridis"](i / max(len(stages) - 1, 1))
        for name, line in ((dashed, "--"), (full, "-")):
            points = [(r["epoch"], r[name]) for r in rows if name and r["stage"] == stage and r[name] is not None]
            axis.plot([x for x, _ in points], [y for _, y in points], line, color=colour, label=_label(stage, line))


def _label(stage: int, line: str) -> str:
    return str(stage) if line == "-" else "_"


def _over_stages(axis: Any, rows: Sequence[dict[str, Any]]) -> None:
    for name, label in (
        ("cosine", "PETRA and end to end"),
        ("delayed_cosine", "delayed and end to end"),
        ("cosine_to_delayed", "PETRA and delayed"),
    ):
        points = [(row["stage"], row[name]) for row in rows if row[name] is not None]
        axis.plot([x for x, _ in points], [y for _, y in points], "o-", label=label)


DRAWN: dict[str, Any] = {
    "table2": _curves("table2"),
    "full": _curves("full"),
    "figure4": _figure4,
    "table4": _table4,
    "corrections": _corrections,
    "fidelity": _fidelity,
}
"""What draws each plan."""
