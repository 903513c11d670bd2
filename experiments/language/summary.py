"""Tables and the figure, from the stored results only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import inf
from pathlib import Path
from statistics import fmean

from plans import EXACT_K, KS, QUESTIONS
from results import Known, trial_of
from trials import Trial, short

FIGURE = "frontier.png"
TABLES = "tables.md"
DIVERGED = "diverged"


@dataclass(frozen=True)
class Best:
    """The learning rate with the lowest mean loss over seeds, with all that were tried."""

    lr: float
    loss: float
    bits: float
    seeds: int
    tried: dict[float, float]

    @property
    def text(self) -> str:
        """The loss as in tables."""
        return f"{self.loss:.4f}" if self.loss < inf else DIVERGED


Groups = Mapping[Trial, Best]


def best_of(known: Known) -> dict[Trial, Best]:
    """Return the best learning rate of every training that differs in something else than that and the seed."""
    values: dict[Trial, dict[float, list[tuple[float, float]]]] = {}
    for result in known.values():
        trial = trial_of(result)
        pair = (inf, inf) if result[DIVERGED] else (result["test_loss"], result["bits_per_byte"])
        values.setdefault(trial.group, {}).setdefault(trial.lr, []).append(pair)
    found = {}
    for group, by_rate in values.items():
        tried = {lr: fmean(loss for loss, _ in pairs) for lr, pairs in sorted(by_rate.items())}
        lr = min(tried, key=lambda rate: tried[rate])
        bits = fmean(bits for _, bits in by_rate[lr])
        found[group] = Best(lr, tried[lr], bits, len(by_rate[lr]), tried)
    return found


def backprop_of(group: Trial, groups: Groups) -> Best | None:
    """Return backprop with the same optimizer, network and epochs, and the optimizer's own momentum."""
    return groups.get(replace(group, kind="backprop", k=1, momentum=None, corrections=None, flush=0))


def difference(best: Best | None, other: Best | None) -> str:
    """Return the difference of two losses, empty where one of them is missing."""
    if best is None or other is None or inf in (best.loss, other.loss):
        return ""
    return f"{best.loss - other.loss:+.4f}"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def table(groups: Groups, wanted: Iterable[Trial]) -> str:
    """Return one line per training: the best learning rate, its loss, and the difference from backprop."""
    rows = []
    for group in dict.fromkeys(trial.group for trial in wanted):
        if (best := groups.get(group)) is not None:
            others = ", ".join(f"{short(lr)}: {replace(best, loss=x).text}" for lr, x in best.tried.items())
            gap = difference(best, backprop_of(group, groups)) if group.kind != "backprop" else ""
            bits = f"{best.bits:.4f}" if best.bits < inf else ""
            rows.append([group.label, short(best.lr), best.text, bits, gap, str(best.seeds), others])
    head = ["training", "best lr", "test loss", "bits per byte", "minus backprop", "seeds", "all learning rates"]
    return markdown(head, rows) if rows else "none yet"


def by_epoch(groups: Groups, wanted: Iterable[Trial], known: Known) -> str:
    """Return the mean loss after every epoch with the best learning rate, of trainings with more than one epoch."""
    rows, longest = [], 0
    for group in dict.fromkeys(trial.group for trial in wanted):
        if group.epochs > 1 and group in groups and groups[group].loss < inf:
            best = groups[group].lr
            own = [r["epochs"] for r in known.values() if trial_of(r) == replace(group, lr=best, seed=trial_of(r).seed)]
            rows.append(
                [group.label, *(f"{fmean(e['test_loss'] for e in same):.4f}" for same in zip(*own, strict=True))]
            )
            longest = max(longest, group.epochs)
    rows = [row + [""] * (longest + 1 - len(row)) for row in rows]
    head = ["test loss after epoch", *(str(epoch) for epoch in range(1, longest + 1))]
    return f"\n\n{markdown(head, rows)}" if rows else ""


def frontier(groups: Groups, wanted: Iterable[Trial]) -> str:
    """Return the loss against k for each optimizer, and under it the difference from backprop."""
    points = {(g.optimizer, g.kind, g.k): g for g in (trial.group for trial in wanted)}
    rows = []
    for optimizer in dict.fromkeys(name for name, _, _ in points):
        keys = [(optimizer, "backprop", 1), (optimizer, "exact", EXACT_K), *((optimizer, "petra", k) for k in KS)]
        cells = [groups.get(points[key]) if key in points else None for key in keys]
        rows.append([optimizer, *(f"{best.text} ({short(best.lr)})" if best else "" for best in cells)])
        rows.append(["", "", *(difference(best, cells[0]) for best in cells[1:])])
    head = ["optimizer", "backprop", f"exact, k = {EXACT_K}", *(f"PETRA, k = {k}" for k in KS)]
    return (
        markdown(head, rows) + "\n\nTest loss in nats per token (best learning rate), and the difference from backprop."
    )


def draw(groups: Groups, wanted: Iterable[Trial], file: Path) -> bool:
    """Draw the loss against k, one line per optimizer; return False without results or matplotlib."""
    points = [g for g in dict.fromkeys(trial.group for trial in wanted) if g in groups and groups[g].loss < inf]
    if not any(g.kind == "petra" for g in points) or find_spec("matplotlib") is None:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for place, optimizer in enumerate(dict.fromkeys(g.optimizer for g in points)):
        line = sorted((g.k, groups[g].loss) for g in points if (g.optimizer, g.kind) == (optimizer, "petra"))
        axis.plot(*zip(*line, strict=True), "o-", color=f"C{place}", label=f"{optimizer}, PETRA") if line else None
        for g in points:
            if (g.optimizer, g.kind) == (optimizer, "exact"):
                axis.axhline(groups[g].loss, linestyle="--", color=f"C{place}", label=f"{optimizer}, exact pipeline")
    axis.set_xscale("log", base=2)
    axis.set_xticks(KS, [str(k) for k in KS])
    axis.set_xlabel("k, micro-batches per update")
    axis.set_ylabel("test loss in nats per token")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(file, dpi=120)
    return True


def write(plans: Mapping[str, Sequence[Trial]], known: Known, folder: Path) -> None:
    """Print the tables of the plans and write them; draw the figure of the frontier."""
    groups = best_of(known)
    parts = []
    for plan, trials in plans.items():
        left = [trial.name for trial in trials if trial.name not in known]
        note = f"\n\n{len(trials) - len(left)} of {len(trials)} trainings have ended." if left else ""
        both = f"{frontier(groups, trials)}\n\n" if plan == "frontier" else ""
        parts.append(
            f"## {plan}\n\n{QUESTIONS[plan]}\n\n{both}{table(groups, trials)}{by_epoch(groups, trials, known)}{note}\n"
        )
    if known:
        every = [trial_of(result) for _, result in sorted(known.items())]
        parts.append(f"## All trainings\n\n{table(groups, every)}{by_epoch(groups, every, known)}\n")
    print("\n" + "\n".join(parts), flush=True)
    if known:
        (folder / TABLES).write_text("\n".join(parts))
    if "frontier" in plans and draw(groups, plans["frontier"], folder / FIGURE):
        print(f"figure: {folder / FIGURE}")
