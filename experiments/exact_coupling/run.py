"""Accuracy of training with the fixed-point coupling compared with the additive coupling.

    python experiments/exact_coupling/run.py

Trains the recipe `digits` with reversible backprop, with the additive and with the fixed-point coupling, five seeds
each; prints a table and writes results.json next to this file.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from petra.cli.main import main as petra
from petra.formatting import render
from petra.measure import environment


def accuracy(seed: int, extra: list[str]) -> float:
    """Return the test accuracy of one training."""
    with tempfile.TemporaryDirectory() as folder:
        given = ["train", "--recipe", "digits", "--method", "reversible", "--seed", str(seed), "--quiet"]
        if petra([*given, *extra, "--out", f"{folder}/run"]):
            raise SystemExit(1)
        return float(json.loads(Path(folder, "run", "summary.json").read_text())["test_accuracy"])


def main() -> None:
    """Train with both couplings and compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", help="fewer epochs than the recipe, to try the script; stores nothing")
    options = parser.parse_args()
    extra = ["--epochs", options.epochs] if options.epochs else []
    seeds = range(options.seeds)
    couplings = {"additive": [], "fixed-point": ["--coupling", "fixed-point"]}
    found = {name: [accuracy(seed, [*given, *extra]) for seed in seeds] for name, given in couplings.items()}
    rows = []
    for name, values in found.items():
        summary = statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0
        rows.append([name, *(f"{100 * value:.2f}" for value in (*values, *summary))])
    print(render(["coupling", *(f"seed {i}" for i in seeds), "mean", "deviation"], rows, left=1))
    if not options.epochs:
        Path(__file__).with_name("results.json").write_text(
            json.dumps({"accuracy": found, "environment": environment()}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
