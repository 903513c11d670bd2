"""Training in fixed point against training in floating point: the accuracy of both.

    python experiments/exact_coupling/run.py

Trains the recipe `digits` with reversible backprop, with the usual additive coupling and with the exact one, from five
seeds each; prints a table and writes results.json beside this file.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

from petra.cli.main import main as petra
from petra.measure import environment
from petra.tables import render


def accuracy(seed: int, exact: bool, extra: list[str]) -> float:
    """Test accuracy of one training."""
    with tempfile.TemporaryDirectory() as folder:
        given = ["train", "--recipe", "digits", "--method", "reversible", "--seed", str(seed), "--quiet"]
        if petra([*given, *(["--exact"] if exact else []), *extra, "--out", f"{folder}/run"]):
            raise SystemExit(1)
        return float(json.loads(Path(folder, "run", "summary.json").read_text())["test_accuracy"])


def main() -> None:
    """Train and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", help="fewer than the recipe's, for a trial whose results are not kept")
    options = parser.parse_args()
    extra = ["--epochs", options.epochs] if options.epochs else []
    seeds = range(options.seeds)
    found = {name: [accuracy(seed, name == "exact", extra) for seed in seeds] for name in ("additive", "exact")}
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
