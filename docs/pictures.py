"""Draws the pictures of the documentation with Petra's own commands, into docs/images: `make pictures`.

Schedules come from `petra schedule --svg`, memory from `petra memory`, the timeline from `petra train --trace`, and
memory against depth from the results of `benchmarks/reversible`. The report is a screenshot made by Chromium, if it is
installed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
SCHEDULES = {
    "petra": ["lock-step", "--microbatches", "9"],
    "lock-step": ["lock-step", "--microbatches", "7"],
    "low-staleness": ["low-staleness", "--microbatches", "7"],
    "locked-forward": ["locked-forward", "--microbatches", "4"],
    "sequential": ["sequential", "--microbatches", "2"],
    "gpipe": ["gpipe", "--microbatches", "8", "--accumulate", "4"],
    "1f1b": ["1f1b", "--microbatches", "8", "--accumulate", "4"],
    "interleaved": ["interleaved:2", "--microbatches", "8", "--accumulate", "4"],
    "flush": ["flush:2", "--microbatches", "8", "--accumulate", "2"],
    "decoupled": ["decoupled", "--microbatches", "3"],
}
COLORS = {"forward": "#4c72b0", "backward": "#dd8452", "update": "#55a868"}


def petra(*arguments: str) -> None:
    """Run a command of Petra."""
    subprocess.run([sys.executable, "-m", "petra", *arguments], check=True, cwd=ROOT)  # noqa: S603


def schedules() -> None:
    """One picture for every schedule, on four stages."""
    for name, arguments in SCHEDULES.items():
        petra("schedule", *arguments, "--stages", "4", "--svg", str(IMAGES / f"{name}.svg"))


def memory(folder: Path) -> None:
    """Activations of several methods against the number of stages."""
    methods = ["backprop", "ddg", "delayed", "petra"]
    network = ["--model", "revnet50", "--batch-size", "64"]
    petra("memory", *network, "--methods", *methods, "--stages", "1,2,4,8", "--out", str(folder), "--quiet")
    shutil.copy(folder / "memory.png", IMAGES / "memory.png")


def timeline(folder: Path) -> None:
    """Two ranks in the steady state, from a trace."""
    network = ["--model", "revnet18", "--width", "16", "--data", "synthetic:3x32x32:10:1024", "--batch-size", "32"]
    where = ["--ranks", "2", "--stages", "4", "--epochs", "1", "--trace", "16", "--out", str(folder), "--quiet"]
    petra("train", *network, *where)
    events = json.loads((folder / "trace.json").read_text())
    events = events["traceEvents"] if isinstance(events, dict) else events
    bars = [e for e in events if e.get("ph") == "X" and str(e.get("name", "")).split(" ")[0] in COLORS]
    ticks = sorted({e["args"]["tick"] for e in bars})
    shown = ticks[len(ticks) // 2 :][:6]
    _draw_timeline([e for e in bars if e["args"]["tick"] in shown])


def _draw_timeline(bars: list[dict[str, Any]]) -> None:
    rows = sorted({(e["pid"], e["tid"]) for e in bars})
    start = min(e["ts"] for e in bars)
    figure = Figure(figsize=(9, 2.2), layout="constrained")
    axes = figure.subplots()
    labels: set[str] = set()
    for event in bars:
        kind = event["name"].split(" ")[0]
        label = None if kind in labels else kind
        labels.add(kind)
        y = rows.index((event["pid"], event["tid"]))
        left, width = (event["ts"] - start) / 1000, event["dur"] / 1000
        axes.barh(y, width, left=left, color=COLORS[kind], edgecolor="white", linewidth=0.4, label=label)
    axes.set_yticks(range(len(rows)), [f"rank {pid}, stage {tid}" for pid, tid in rows])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds")
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(IMAGES / "timeline.svg", metadata={"Date": None})


def report(folder: Path) -> None:
    """The top of a report of three methods."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print("docs/images/report.png is not drawn again: Chromium is not installed")
        return
    compared = ["--recipe", "digits", "--methods", "reversible", "delayed", "petra", "--stages", "4", "--epochs", "8"]
    petra("compare", *compared, "--out", str(folder), "--quiet")
    petra("report", str(folder))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars"]
    where = [f"--user-data-dir={folder / 'browser'}", "--window-size=1100,960", f"--screenshot={IMAGES / 'report.png'}"]
    page = f"file://{folder / 'report.html'}"
    subprocess.run([browser, *flags, *where, page], check=True, capture_output=True)  # noqa: S603


def depth() -> None:
    """Activations of a reversible network against its depth, as measured on a GPU."""
    result = json.loads((ROOT / "benchmarks/reversible/results/h200-depth.json").read_text())
    figure = Figure(figsize=(6, 3), layout="constrained")
    axes = figure.subplots()
    rows = [row for row in result["rows"] if "vit" in row["model"]]
    for way in dict.fromkeys(row["way"] for row in rows):
        points = [row for row in rows if row["way"] == way]
        axes.plot([p["depth"] for p in points], [p["activations"] / 2**20 for p in points], "o-", label=way)
    axes.set(xlabel="blocks", ylabel="activations, MiB", ylim=(0, None))
    axes.legend(fontsize="small")
    figure.savefig(IMAGES / "depth.svg", metadata={"Date": None})


def main() -> None:
    """Draw everything."""
    IMAGES.mkdir(exist_ok=True)
    schedules()
    depth()
    with tempfile.TemporaryDirectory() as folder:
        memory(Path(folder) / "memory")
        timeline(Path(folder) / "timeline")
        report(Path(folder) / "report")


if __name__ == "__main__":
    main()
