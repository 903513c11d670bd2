"""Seconds per iteration of Features Replay, DDG and DNI, compared with model-parallel backprop on the same cut.

    python benchmarks/replay_speed/run.py --threads 4
    python benchmarks/replay_speed/run.py --smoke

ResNet-152 on CIFAR shapes, K = 4 modules on four processes (gloo over loopback), cut by measured cost. The pipelines of
all methods exist at the same time and take turns, one window each per round; ratios are computed for each round. The
ranks are those of benchmarks/pipeline_speed: a run takes at most --limit seconds. Prints a table and writes a file into
the folder results next to this file.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "pipeline_speed"))
from ranks import launch

from petra.formatting import render

METHODS = ("backprop", "features-replay", "ddg", "dni")
TARGET = 0.60
"""Goal of Features Replay: its seconds relative to those of backprop."""
SMOKE = {"model": "resnet18", "width": 4, "batch_size": 2, "ticks": 2, "rounds": 2, "profile_ticks": 2, "limit": 200.0}


def report(options: argparse.Namespace, ranks: list[dict]) -> dict:
    """Print and return medians over rounds; the time of a window is that of its slowest rank."""
    rows, runs, basic = [], [], None
    for number, (method, _) in enumerate(options.methods):
        windows = [rank["windows"][number] for rank in ranks]
        seconds = [max(times) for times in zip(*(w["seconds"] for w in windows), strict=True)]
        basic = basic or seconds
        ratios = [own / first for own, first in zip(seconds, basic, strict=True)]
        own = [statistics.median(w["own"]) for w in windows]
        run = {"method": method, "seconds": statistics.median(seconds), "of_backprop": statistics.median(ratios)}
        runs.append({**run, "rounds": seconds, "of_backprop_rounds": ratios, "own_seconds": own, "ranks": windows})
        rows.append(
            [
                method,
                f"{1e3 * run['seconds']:.0f} ms",
                f"{1e3 * min(seconds):.0f}..{1e3 * max(seconds):.0f}",
                f"{run['of_backprop']:.2f}",
                f"{min(ratios):.2f}..{max(ratios):.2f}",
                " ".join(f"{1e3 * s:.0f}" for s in own),
            ]
        )
    print(f"{options.model}, {len(ranks)} ranks of {options.threads} threads, modules of {ranks[0]['cut']} layers")
    header = ["method", "per iteration", "min..max", "of backprop", "min..max", "work of each rank, ms"]
    print(render(header, rows), flush=True)
    asked = {name: value for name, value in vars(options).items() if name != "out"}
    shared = {name: ranks[0][name] for name in ("environment", "cut", "layer_seconds")}
    return {**asked, **shared, "target": TARGET, "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny, to see that it works; stores nothing")
    parser.add_argument("--model", default="resnet152-cifar")
    parser.add_argument(
        "--methods", nargs="+", default=METHODS, choices=METHODS, metavar="NAME", help="backprop first (default: all)"
    )
    parser.add_argument("--ranks", type=int, default=4, help="ranks, each with one module (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="threads of a rank (default 1)")
    parser.add_argument("--no-onednn", action="store_true", help="PyTorch's own convolutions, faster on some ARM cores")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--ticks", type=int, default=6, help="iterations in a window, fewer for backprop")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile-ticks", type=int, default=3, help="ticks to measure the cost of layers")
    parser.add_argument("--timeout", type=float, default=120, help="seconds that a rank waits for another")
    parser.add_argument("--limit", type=float, default=400, help="seconds after which the run is stopped")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    options = parser.parse_args()
    if options.smoke:
        vars(options).update(SMOKE)
    if options.methods[0] != "backprop":
        parser.error(
            f"--methods starts with {options.methods[0]}, but ratios are relative to backprop: put backprop first"
        )
    options.methods = [(name, None) for name in options.methods]
    options.cut, options.accumulate = "replay", 1
    result = report(options, launch(options))
    if not options.smoke:
        where = result["environment"]
        options.out.mkdir(exist_ok=True)
        name = f"{where['machine']}-{where['cores']}-cores-{options.ranks}-ranks.json"
        (options.out / name).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
