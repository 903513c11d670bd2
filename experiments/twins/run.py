"""Reversible transformers compared with their plain twins: the same parameters, data, epochs and seed.

    python experiments/twins/run.py vit --data path/to/cifar10 --epochs 30
    python experiments/twins/run.py roberta --data path/to/sst2 --seeds 0 1 2 3
    python experiments/twins/run.py gpt --data text:input.txt

Trains the reversible network with reversible backprop and its twin with backprop, prints test accuracy and loss of the
last and of the best epoch, and writes them into the folder results next to this file. Other options go to `petra
train`. An interrupted run is resumed, a finished one is read, and one with other options is rejected.
"""

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import Any

from petra.cli.main import main as petra
from petra.formatting import render

PAIRS = {
    "vit": ("rev-vit-cifar10", "rev-vit-s"),
    "roberta": ("sst2", "rev-roberta-small"),
    "gpt": ("tiny-shakespeare", "rev-gpt"),
}
"""The recipe and the reversible network of each pair."""


def train(recipe: str, model: str, method: str, seed: int, folder: Path, given: list[str]) -> dict[str, Any]:
    """Return the result of one training; an existing run is resumed, which rejects other options."""
    there = ["--resume"] if (folder / "checkpoint").exists() else []
    arguments = ["--recipe", recipe, "--model", model, "--method", method, "--stages", "1", "--seed", str(seed)]
    if petra(["train", *arguments, *given, "--out", str(folder), *there]):
        raise SystemExit(1)
    summary = json.loads((folder / "summary.json").read_text())
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    best = min(records, key=lambda record: record["test_loss"])
    kept = ("model", "method", "parameters", "epochs", "seed", "test_accuracy", "test_loss", "best_test_accuracy")
    return {
        **{name: summary[name] for name in kept},
        "lowest_test_loss": best["test_loss"],
        "samples_per_second": summary["samples_per_second"],
        "environment": summary["environment"],
        "records": records,
    }


def main() -> None:
    """Train both networks of a pair and compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair", choices=PAIRS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path, default=Path("runs/twins"), help="folder of the runs (default %(default)s)")
    parser.add_argument("--results", type=Path, default=Path(__file__).with_name("results"))
    options, given = parser.parse_known_args()
    recipe, model = PAIRS[options.pair]
    plain = model.removeprefix("rev-")
    rows = [
        train(recipe, name, method, seed, options.out / f"{options.pair}-{method}-{seed}", given)
        for seed in options.seeds
        for name, method in ((plain, "backprop"), (model, "reversible"))
    ]
    measures = ("test_accuracy", "best_test_accuracy", "test_loss", "lowest_test_loss")
    cells = [[row["model"], str(row["seed"]), *(f"{row[m]:.4f}" for m in measures)] for row in rows]
    for name in (plain, model):
        means = (fmean(row[m] for row in rows if row["model"] == name) for m in measures)
        cells.append([name, "mean", *(f"{value:.4f}" for value in means)])
    print(render(["model", "seed", *(m.replace("_", " ") for m in measures)], cells, left=1))
    options.results.mkdir(exist_ok=True, parents=True)
    found = {"pair": options.pair, "given": given, "runs": rows}
    (options.results / f"{options.pair}.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
