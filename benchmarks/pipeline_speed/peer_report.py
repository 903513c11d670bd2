"""Tables and figure of the comparison of schedules."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from petra.formatting import render

Run = dict[str, Any]
HEADER = [
    "schedule",
    "per second",
    "min..max",
    "times zbv",
    "times 1f1b",
    "work",
    "work per second",
    "times zbv",
    "times 1f1b",
    "MiB, largest rank",
    "mean",
    "of zbv",
    "idle",
]


def per_second(run: Run) -> float:
    """Return the micro-batches per second."""
    return float(1 / statistics.median(run["seconds"]))


def work_per_second(run: Run) -> float:
    """Return the forwards per second that the same arithmetic would make."""
    return per_second(run) * float(run["work"])


def memory(run: Run) -> float:
    """Return the activation memory of the rank that needs most, in MiB."""
    return float(max(run["activation_bytes"]) / 2**20)


def idle(run: Run) -> float:
    """Return the share of time in which a rank does not compute, the mean over ranks."""
    seconds = statistics.median(run["seconds"])
    return 1 - statistics.mean(statistics.median(own) for own in run["own"]) / seconds


def report(runs: Sequence[Run]) -> str:
    """Return a table for each case and number of micro-batches, and what wins."""
    parts = []
    for case, size in dict.fromkeys((run["case"], run["microbatches"]) for run in runs):
        group = [run for run in runs if (run["case"], run["microbatches"]) == (case, size)]
        found = {run["name"]: run for run in group if "seconds" in run}
        parts.append(f"{case}, {size} micro-batches per update")
        parts.append(render(HEADER, [_row(run, found) for run in found.values()], left=1))
        parts += [f"{run['name']}: not possible: {run['error']}" for run in group if "error" in run]
        parts += [*_verdict(found), ""]
    return "\n".join(parts)


def _row(run: Run, found: dict[str, Run]) -> list[str]:
    def times(value: Any, name: str) -> str:
        return f"{value(run) / value(found[name]):.2f}" if name in found else "-"

    values = [1 / s for s in run["seconds"]]
    return [
        run["name"],
        f"{per_second(run):.2f}",
        f"{min(values):.2f}..{max(values):.2f}",
        times(per_second, "torch zbv"),
        times(per_second, "torch 1f1b"),
        f"{run['work']:.2f}",
        f"{work_per_second(run):.1f}",
        times(work_per_second, "torch zbv"),
        times(work_per_second, "torch 1f1b"),
        f"{memory(run):.1f}",
        f"{statistics.mean(run['activation_bytes']) / 2**20:.1f}",
        times(memory, "torch zbv"),
        f"{idle(run):.2f}",
    ]


def _verdict(found: dict[str, Run]) -> list[str]:
    """Compare the best synchronous schedule with the best of PETRA's."""
    ours = [run for name, run in found.items() if name.startswith("petra")]
    others = [run for name, run in found.items() if not name.startswith("petra")]
    if not ours or not others:
        return []
    lines = []
    for what, value, unit in (
        ("throughput", per_second, "per second"),
        ("throughput per arithmetic", work_per_second, "forwards per second"),
        ("memory", lambda run: -memory(run), "MiB"),
    ):
        best, other = max(ours, key=value), max(others, key=value)
        winner = "a synchronous schedule wins" if value(other) > value(best) else "PETRA wins"
        shown = [f"{run['name']} {abs(value(run)):.2f}" for run in (best, other)]
        lines.append(f"{what}: {winner}: {shown[0]}, {shown[1]} {unit}")
    return lines


def draw(runs: Sequence[Run], path: Path) -> None:
    """Draw throughput against the activation memory of the largest rank, one panel per case."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    runs = sorted((run for run in runs if "seconds" in run), key=lambda run: run["microbatches"])
    cases = list(dict.fromkeys(run["case"] for run in runs))
    if not cases:
        return
    names = list(dict.fromkeys(run["name"].removesuffix(" checkpointed") for run in runs))
    figure = Figure(figsize=(6 * len(cases), 5), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, case in zip(figure.subplots(1, len(cases), squeeze=False).flat, cases, strict=True):
        for name in dict.fromkeys(run["name"] for run in runs if run["case"] == case):
            own = [run for run in runs if (run["case"], run["name"]) == (case, name)]
            checkpointed = name.endswith("checkpointed")
            axis.plot(
                [memory(run) for run in own],
                [per_second(run) for run in own],
                ("s" if name.startswith("torch") else "o") + ("--" if checkpointed else "-"),
                color=f"C{names.index(name.removesuffix(' checkpointed')) % 10}",
                markerfacecolor="none" if checkpointed else None,
                label=name,
            )
            for run in own:
                axis.annotate(f"{run['microbatches']}", (memory(run), per_second(run)), fontsize=6)
        axis.set(title=case, xscale="log", xlabel="activation memory of the largest rank, MiB", ylim=(0, None))
        axis.set_ylabel("micro-batches per second")
        axis.legend(fontsize=6)
    figure.savefig(path, dpi=120)
