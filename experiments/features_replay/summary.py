"""What the runs came to, beside the paper's Table 2."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from petra.cli.plot import read
from petra.measure.likeness import summarise as means
from petra.measure.run_figure import draw_runs

TABLE_2 = {  # best test error in % on CIFAR-10; K = 2 for DDG and Features Replay
    ("resnet164-basic", "backprop", 1): 6.40,
    ("resnet164-basic", "ddg", 2): 6.45,
    ("resnet164-basic", "features-replay", 2): 6.03,
    ("resnet101-cifar", "backprop", 1): 5.25,
    ("resnet101-cifar", "ddg", 2): 5.35,
    ("resnet101-cifar", "features-replay", 2): 4.97,
}
DIVERGED = "diverged.json"


@dataclass(frozen=True)
class Case:
    """A training: a network, a method and the number of modules K."""

    model: str
    method: str
    modules: int
    sigma: bool = False
    """Whether σ is measured meanwhile, which does not change the weights."""

    @property
    def name(self) -> str:
        modules = f"-{self.modules}" if self.modules > 1 else ""
        return f"{self.model.split('-')[0]}-{self.method}{modules}"

    @property
    def paper(self) -> float | str:
        if self.method == "dni":
            return "diverges"
        return TABLE_2.get((self.model, self.method, self.modules), "-")


def describe(case: Case, folder: Path) -> dict[str, Any] | None:
    """What a run has come to so far; None if it has not begun."""
    if not (folder / "config.json").exists():
        return None
    run = read(folder, case.name)
    config = json.loads((folder / "config.json").read_text())
    ended = "done" if (folder / "summary.json").exists() else "under way"
    found: dict[str, Any] = {
        "name": case.name,
        "model": case.model,
        "method": case.method,
        "modules": case.modules,
        "state": "diverged" if (folder / DIVERGED).exists() else ended,
        "epochs": len(run.records),
        "of": config["epochs"],
        "paper": case.paper,
        "config": config,
    }
    if found["state"] == "diverged":
        found["said"] = json.loads((folder / DIVERGED).read_text())["said"]
    if run.records:
        found["best_error"] = 100 * (1 - max(r["test_accuracy"] for r in run.records))
        found["last_error"] = 100 * (1 - run.records[-1]["test_accuracy"])
    if (folder / "summary.json").exists():
        summary = json.loads((folder / "summary.json").read_text())
        found |= {name: summary[name] for name in ("environment", "samples_per_second", "weights_sha256")}
    if run.fidelity:
        names = ("stage", "measurements", "sigma", "lowest_sigma")
        found["sigma"] = [{name: row[name] for name in names} for row in means(run.fidelity)]
    found["records"] = run.records
    return found


def summarise(cases: list[Case], out: Path, results: Path) -> None:
    """Write and print the tables of whatever is there, and draw σ and losses if matplotlib is."""
    described = [(case, describe(case, out / case.name)) for case in cases]
    there = [(case, found) for case, found in described if found is not None]
    text = _errors([found for _, found in there]) + _sigmas([found for _, found in there])
    results.mkdir(parents=True, exist_ok=True)
    (results / "table.md").write_text(text)
    (results / "runs.json").write_text(json.dumps([found for _, found in there], indent=1) + "\n")
    print(f"\n{text}")
    if find_spec("matplotlib") is not None:
        for model in dict.fromkeys(case.model for case, _ in there):
            curves = [read(out / case.name, case.name) for case, found in there if case.model == model]
            if any(run.records for run in curves):
                draw_runs(curves, results / f"{model}.png")


def _errors(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| network | method | K | best test error | last | against backprop | paper, best | epochs |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    basic = {r["model"]: r["best_error"] for r in rows if r["method"] == "backprop" and "best_error" in r}
    for r in rows:
        best, last, against = "-", "-", "-"
        if "best_error" in r:
            best, last = f"{r['best_error']:.2f} %", f"{r['last_error']:.2f} %"
            if r["model"] in basic and r["method"] != "backprop":
                against = f"{r['best_error'] - basic[r['model']]:+.2f}"
        paper = r["paper"] if isinstance(r["paper"], str) else f"{r['paper']:.2f} %"
        state = "" if r["state"] == "done" else f", {r['state']}"
        cells = (r["model"], r["method"], r["modules"], best, last, against, paper, f"{r['epochs']}/{r['of']}{state}")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def _sigmas(rows: list[dict[str, Any]]) -> str:
    measured = [r for r in rows if "sigma" in r]
    if not measured:
        return ""
    lines = ["", "| σ: mean (lowest) | " + " | ".join(f"module {s}" for s in range(4)) + " | measurements |"]
    lines.append("| --- " * 6 + "|")
    for r in measured:
        own = {row["stage"]: row for row in r["sigma"]}
        cells = [f"{own[s]['sigma']:.3f} ({own[s]['lowest_sigma']:.3f})" if s in own else "-" for s in range(4)]
        lines.append(f"| {r['name']} | {' | '.join(cells)} | {r['sigma'][-1]['measurements']} |")
    return "\n".join(lines) + "\n"
