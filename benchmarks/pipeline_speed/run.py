"""Speed of pipelines on real processes, compared with the same stages without overlap and with 1F1B.

    python benchmarks/pipeline_speed/run.py --case balanced --ranks 2
    python benchmarks/pipeline_speed/run.py --smoke

Trains with gloo over loopback; each rank has one process, one stage and one thread. All pipelines of a case exist at
the same time and take turns, one window each per round, so that a machine that slows down slows all of them. Prints a
table and writes a file into the folder results next to this file.

Cases:
- balanced: a RevNet of equal blocks, compared with basic model parallelism, one micro-batch at a time ("reversible")
- paper18, paper34: RevNet-18 and RevNet-34, one layer per stage, on ten and eighteen ranks; same comparison
- partition: RevNet-18 on fewer ranks, cut by measured cost; same comparison. "spare" has one and a half times as many
  micro-batches in flight as lock-step, so that a rank that is late once delays no other
- 1f1b, 1f1b-partition: equal blocks, and RevNet-18 cut by cost; compared with 1F1B of torch.distributed.pipelining
  with activation checkpointing, 8 micro-batches per update

The limit is the busiest rank's own time for forward, backward and update, without waiting.
"""

import argparse
import json
import statistics
from dataclasses import dataclass
from pathlib import Path

from ranks import launch

from petra.formatting import render

BASIC = (("reversible", None), ("petra", "lock-step"), ("petra", "low-staleness"))
WITH_SPARE = (*BASIC, ("petra", "spare"))
AGAINST_1F1B = (("torch 1f1b", None), ("1f1b", None), ("petra", "lock-step"), ("petra", "low-staleness"))


@dataclass(frozen=True)
class Case:
    """A network, its cut and the compared pipelines, of which the first is the baseline."""

    model: str
    cut: str
    ranks: int
    methods: tuple[tuple[str, str | None], ...] = BASIC
    accumulate: int = 1
    width: int = 64
    batch_size: int = 32
    blocks: int = 0
    """Blocks of each rank, if the network consists of equal blocks."""


CASES = {
    "balanced": Case("blocks", "blocks", 2, width=16, batch_size=32, blocks=8),
    "paper18": Case("revnet18", "layers", 10),
    "paper34": Case("revnet34", "layers", 18),
    "partition": Case("revnet18", "cost", 8, WITH_SPARE, batch_size=16),
    "1f1b": Case("blocks", "blocks", 8, AGAINST_1F1B, accumulate=8, width=32, batch_size=16, blocks=2),
    "1f1b-partition": Case("revnet18", "cost", 8, AGAINST_1F1B, accumulate=8),
}
SMOKE = {"width": 8, "batch_size": 4, "blocks": 1, "ticks": 2, "rounds": 2, "profile_ticks": 2, "limit": 120.0}


def settings(options: argparse.Namespace, name: str) -> argparse.Namespace:
    """Return the options of one case, with defaults filled in."""
    case = CASES[name]
    chosen = argparse.Namespace(**{**vars(options), "case": name})
    chosen.model, chosen.cut, chosen.methods = case.model, case.cut, case.methods
    chosen.accumulate = options.accumulate or case.accumulate
    small = case.model == "blocks"
    for size in ("width", "batch_size", "blocks"):
        setattr(chosen, size, getattr(options, size) or getattr(case, size))
    chosen.ranks = options.ranks or case.ranks
    if options.smoke:
        vars(chosen).update(SMOKE)
        if case.cut != "layers" and not options.ranks:
            chosen.ranks = 2 if small else 3
    if case.cut == "layers" and chosen.ranks != case.ranks:
        raise SystemExit(f"--ranks is {chosen.ranks}, but {name} has {case.ranks} stages, one per rank: leave it out")
    if case.methods == AGAINST_1F1B and chosen.ranks > chosen.accumulate:
        raise SystemExit(
            f"--accumulate is {chosen.accumulate}, but 1F1B needs a micro-batch for each of {chosen.ranks} ranks: "
            "raise it"
        )
    chosen.ticks = -(-chosen.ticks // chosen.accumulate) * chosen.accumulate  # whole updates
    return chosen


def spread(values: list[float], form: str = ".2f") -> str:
    return f"{min(values):{form}}..{max(values):{form}}"


def report(options: argparse.Namespace, ranks: list[dict]) -> dict:
    """Print and return medians over rounds; the time of a window is that of its slowest rank."""
    rows, runs, first = [], [], None
    for number, (method, schedule) in enumerate(options.methods):
        windows = [rank["windows"][number] for rank in ranks]
        seconds = [max(times) for times in zip(*(w["seconds"] for w in windows), strict=True)]
        first = first or seconds
        speedups = [basic / own for basic, own in zip(first, seconds, strict=True)]
        tick, speedup = statistics.median(seconds), statistics.median(speedups)
        limit = max(statistics.median(w["own"]) for w in windows)
        rows.append(
            [
                method,
                schedule or ("sequential" if method == "reversible" else "flush"),
                f"{tick * 1e3:.1f} ms",
                spread([s * 1e3 for s in seconds], ".1f"),
                f"{1 / tick:.2f}",
                f"{speedup:.2f}",
                spread(speedups),
                f"{limit / tick:.2f}",
            ]
        )
        runs.append(
            {
                "method": method,
                "schedule": schedule,
                "seconds": tick,
                "per_second": 1 / tick,
                "speedup": speedup,
                "of_limit": limit / tick,
                "rounds": seconds,
                "speedup_rounds": speedups,
                "ranks": windows,
            }
        )
    times = f"times {'basic' if options.methods[0] == BASIC[0] else options.methods[0][0]}"
    header = ["method", "schedule", "per micro-batch", "min..max", "per second", times, "min..max", "of the limit"]
    print(f"{options.case}: {options.ranks} ranks, stages of {ranks[0]['cut']} layers")
    print(render(header, rows, left=2), flush=True)
    shared = {name: ranks[0][name] for name in ("environment", "cut", "placement", "layer_seconds")}
    asked = {name: value for name, value in vars(options).items() if name != "out"}
    return {**asked, **shared, "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, help="default: balanced; with --smoke, all of them")
    parser.add_argument("--smoke", action="store_true", help="tiny, to see that it works; stores nothing")
    parser.add_argument("--ranks", type=int, help="number of ranks, if the case does not fix it")
    parser.add_argument("--blocks", type=int, help="blocks of each rank, for equal blocks")
    parser.add_argument("--width", type=int, help="default: 64 for RevNets, 16 for equal blocks, 32 in the case 1f1b")
    parser.add_argument("--batch-size", type=int, help="of a micro-batch (default: 32; 16 in partition and 1f1b)")
    parser.add_argument("--accumulate", type=int, help="micro-batches per update (default: 1; 8 in the 1f1b cases)")
    parser.add_argument("--ticks", type=int, default=8, help="ticks in a window; rounded up to whole updates")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile-ticks", type=int, default=3, help="ticks to measure the cost of layers")
    parser.add_argument("--threads", type=int, default=1, help="threads of a rank (default 1)")
    parser.add_argument("--no-onednn", action="store_true", help="PyTorch's own convolutions, faster on some ARM cores")
    parser.add_argument("--timeout", type=float, default=120, help="seconds that a rank waits for another")
    parser.add_argument("--limit", type=float, default=560, help="seconds after which a case is stopped")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    options = parser.parse_args()
    names = [options.case] if options.case else (list(CASES) if options.smoke else ["balanced"])
    for chosen in [settings(options, name) for name in names]:
        result = report(chosen, launch(chosen))
        if not options.smoke:
            where = result["environment"]
            name = f"{where['machine']}-{where['cores']}-cores-{chosen.case}-{chosen.ranks}-ranks.json"
            options.out.mkdir(exist_ok=True)
            (options.out / name).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
