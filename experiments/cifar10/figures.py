"""Draws figures of the results if matplotlib is installed."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

from plans import PLANS, TABLE_4
from replay import method_of
from results import EVERY_SIGMA, diverged, records, similarity
from tables import Known, groups, values
from trials import Trial

from petra.measure.run_figure import Curves, draw_runs


def draw(plan: str, known: Known, folder: Path) -> list[str]:
    """Draw the available results of a plan and return the names of the files; none without results or matplotlib."""
    if find_spec("matplotlib") is None:
        return []
    if plan == "replay":
        return _replay(known, folder)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    wide = plan in ("fidelity", "beginning")
    figure = Figure(figsize=(16, 8) if wide else (8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    if not DRAWN[plan](figure, known):
        return []
    figure.savefig(folder / f"{plan}.png", dpi=120)
    return [f"{plan}.png"]


def _replay(known: Known, folder: Path) -> list[str]:
    """Figures 3 and 4 of the Features Replay paper for the first seed, one file per network."""
    names = []
    for model in dict.fromkeys(trial.options["model"] for trial in PLANS["replay"]):
        own = [t for t in PLANS["replay"] if t.options["model"] == model and t.seed == 0 and t.name in known]
        curves = [_of_modules(trial, known) for trial in own]
        if any(run.records for run in curves):
            names.append(f"replay-{model}.png")
            draw_runs(curves, folder / names[-1])
    return names


def _of_modules(trial: Trial, known: Known) -> Curves:
    result = known[trial.name]
    name = f"{method_of(trial)}, K = {trial.options['stages']}"
    name += ", diverged" if diverged(trial, known) else ""
    return Curves(name, records(result), similarity(result) if trial.watched else [])


def _curves(plan: str) -> Any:
    def drawn(figure: Any, known: Known) -> bool:
        axis = figure.subplots()
        for place, (name, trials) in enumerate(groups(plan).items()):
            line = "-" if place < 10 else "--"
            if runs := values(trials, known, "test_accuracies"):
                means = [100 * fmean(v) for v in zip(*runs, strict=True)]
                axis.plot(range(1, len(means) + 1), means, line, color=f"C{place}", label=name)
            for trial in trials:  # curves of diverged trainings end with a cross
                own = known[trial.name]["test_accuracies"] if diverged(trial, known) else []
                if own:
                    axis.plot(range(1, len(own) + 1), [100 * v for v in own], line, color=f"C{place}", lw=0.5)
                    axis.plot(len(own), 100 * own[-1], "x", color=f"C{place}", label=f"{trial.name}, diverged")
        if not axis.lines:
            return False
        axis.legend(fontsize="x-small")
        lowest, highest = axis.get_ylim()
        axis.set(xlabel="epoch", ylabel="test accuracy, %", ylim=(max(80, lowest) if highest > 80 else None, None))
        return True

    return drawn


def _figure4(figure: Any, known: Known) -> bool:
    if not values(PLANS["figure4"], known):
        return False
    axis, gap = figure.subplots(1, 2)
    means: dict[str, dict[int, float]] = {}
    for method, line in (("petra", "o-"), ("backprop", "s--")):
        own = [t for t in PLANS["figure4"] if t.options["method"] == method]
        found = [(t.options["accumulate"], values([t], known, "mean_after_last_drop")) for t in own]
        means[method] = dict(sorted((k, 100 * v) for k, vs in found for v in vs))
        axis.plot(list(means[method]), list(means[method].values()), line, label=method)
    apart = {k: v - means["backprop"][k] for k, v in means["petra"].items() if k in means["backprop"]}
    gap.plot(list(apart), list(apart.values()), "o-")
    gap.axhline(0, color="grey", linewidth=0.8)
    for each in (axis, gap):
        each.set_xscale("log", base=2)
        each.set_xlabel("accumulation k")
    axis.legend()
    axis.set_ylabel("test accuracy, %, mean after the last drop")
    gap.set_ylabel("petra - backprop, points")
    return True


def _table4(figure: Any, known: Known) -> bool:
    if not (all_of_them := values(PLANS["table4"], known)):
        return False
    axis = figure.subplots()
    names = list(dict.fromkeys(t.options["model"] for t in PLANS["table4"] if values([t], known)))
    for place, method in enumerate(TABLE_4):
        found = [
            values([t for t in PLANS["table4"] if (t.options["method"], t.options["model"]) == (method, m)], known)
            for m in names
        ]
        points = [(i + 0.15 * (place - 2), 100 * fmean(v)) for i, v in enumerate(found) if v]
        axis.bar([x for x, _ in points], [y for _, y in points], 0.14, label=method)
    axis.set_xticks(range(len(names)), names)
    axis.legend(fontsize="small")
    axis.set(ylabel="test accuracy, %", xlim=(-0.5, len(names) - 0.5), ylim=(100 * min(all_of_them) - 1, None))
    return True


def _corrections(figure: Any, known: Known) -> bool:
    axis = figure.subplots()
    found = [(name, 100 * v) for name, t in groups("corrections").items() for v in values(t, known)]
    names = list(dict.fromkeys(name for name, _ in found))
    axis.plot([v for _, v in found], [names.index(name) for name, _ in found], "o")
    axis.set_yticks(range(len(names)), [name.removeprefix("revnet18-") for name in names], fontsize="small")
    axis.invert_yaxis()
    axis.grid(axis="x")
    axis.set(xlabel="test accuracy, %, one point per seed")
    return bool(found)


def _fidelity(figure: Any, known: Known) -> bool:
    """Figure 5 for PETRA in lock-step at the top; Figure 6 at the paper's four moments at the bottom."""
    measured = [(t, rows) for t in PLANS["fidelity"] if t.name in known and (rows := similarity(known[t.name]))]
    if not measured:
        return False
    first, rows = measured[0]
    epochs = sorted({row["epoch"] for row in rows})
    axes = figure.subplots(2, 4)
    figure.suptitle(first.group)
    titles = ("5a cosine(used, delayed)", "5b cosine to exact", "5c ‖used‖/‖delayed‖", "5d norm over exact")
    pairs: tuple[tuple[str, str | None], ...] = (("cosine_to_delayed", None), ("cosine", "delayed_cosine"))
    pairs += (("norm_ratio_to_delayed", None), ("norm_ratio", "delayed_norm_ratio"))
    for axis, title, (full, dashed) in zip(axes[0], titles, pairs, strict=True):
        _over_epochs(axis, rows, full, dashed)
        axis.set(title=title + (" (dashed: delayed)" if dashed else ""), xlabel="epoch")
    axes[0][0].legend(fontsize="x-small", title="stage", ncols=2)
    for axis, share in zip(axes[1], (1 / 12, 5 / 12, 7 / 12, 5 / 6), strict=True):
        epoch = epochs[min(len(epochs) - 1, round(share * len(epochs)))]
        _over_stages(axis, [row for row in rows if row["epoch"] == epoch])
        axis.set(title=f"6 cosines in epoch {epoch}", xlabel="stage", ylim=(None, 1.02))
    axes[1][0].legend(fontsize="small")
    return True


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


def _beginning(figure: Any, known: Known) -> bool:
    """Figure 3 of the Features Replay paper, update by update, one panel per training."""
    measured = [(t, sigmas) for t in PLANS["beginning"] if (sigmas := known.get(t.name, {}).get(EVERY_SIGMA))]
    if not measured:
        return False
    axes = figure.subplots(-(-len(measured) // 2), 2, sharey=True, squeeze=False).flat
    for axis, (trial, sigmas) in zip(axes, measured, strict=False):
        for stage, values_of_stage in sigmas.items():
            points = [(u, v) for u, v in enumerate(values_of_stage, start=1) if v is not None]
            style = {"color": "black", "label": "all"} if stage == "all" else {"label": f"module {stage}"}
            axis.plot([u for u, _ in points], [v for _, v in points], linewidth=0.8, **style)
        axis.axhline(0, color="grey", linewidth=0.8)
        axis.set(title=trial.group, xlabel="update", ylabel="σ")
        axis.legend(fontsize="x-small", loc="lower right")
    return True


DRAWN: dict[str, Any] = {
    "table2": _curves("table2"),
    "full": _curves("full"),
    "figure4": _figure4,
    "table4": _table4,
    "corrections": _corrections,
    "fidelity": _fidelity,
    "beginning": _beginning,
}
"""The drawing function of each plan with one figure; it returns False if there are no results."""
