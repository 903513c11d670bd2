"""How fast pipelines on real processes are: against the same stages without overlap, and against 1F1B.

    python benchmarks/pipeline_speed/run.py --case balanced --ranks 2
    python benchmarks/pipeline_speed/run.py --smoke

Trains on gloo and loopback, a process, a stage and a thread a rank. The pipelines of a case are alive side by side
and take turns, a window each, round after round, so that a machine that slows down slows all of them. Prints a
table and writes a file into results/ beside this file.

Cases:
- balanced: a RevNet of equal blocks; against basic model parallelism, one micro-batch at a time ("reversible")
- paper18, paper34: RevNet-18 and RevNet-34, a layer a stage, on ten and eighteen ranks; against the same
- partition: RevNet-18 on fewer ranks, cut by measured cost; against the same. "spare" has one and a half times
  as many micro-batches in flight as lock-step, so that a rank that is late for once delays nobody
- 1f1b, 1f1b-partition: equal blocks, and RevNet-18 cut by cost; against 1F1B with activation checkpointing of
  torch.distributed.pipelining, with 8 micro-batches an update

The limit is the busiest rank's own time for forward, backward and update, without any waiting.
"""

import argparse
import json
import statistics
from dataclasses import dataclass
from pathlib import Path

from ranks import launch

from petra.tables import render

BASIC = (("reversible", None), ("petra", "lock-step"), ("petra", "low-staleness"))
WITH_SPARE = (*BASIC, ("petra", "spare"))
AGAINST_1F1B = (("torch 1f1b", None), ("1f1b", None), ("petra", "lock-step"), ("petra", "low-staleness"))


@dataclass(frozen=True)
class Case:
    """A network, how it is cut, and which pipelines are compared; the first of them is the measure."""

    model: str
    cut: str
    ranks: int
    methods: tuple[tuple[str, str | None], ...] = BASIC
    accumulate: int = 1
    width: int = 64
    batch_size: int = 32
    blocks: int = 0
    """Of each rank, where the network is made of equal ones."""


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
    """The options of one case, with what was left out filled in."""
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
        raise SystemExit(f"{name} has {case.ranks} stages, one a rank: leave --ranks {chosen.ranks} out")
    if case.methods == AGAINST_1F1B and chosen.ranks > chosen.accumulate:
        raise SystemExit(f"1F1B wants a micro-batch for each of {chosen.ranks} ranks: raise --accumulate")
    chosen.ticks = -(-chosen.ticks // chosen.accumulate) * chosen.accumulate  # whole updates
    return chosen


def spread(values: list[float], form: str = ".2f") -> str:
    return f"{min(values):{form}}..{max(values):{form}}"


def report(options: argparse.Namespace, ranks: list[dict]) -> dict:
    """Medians over rounds; a window took as long as it took the slowest rank."""
    rows, runs, first = [], [], None
    for number, (method, order) in enumerate(options.methods):
        windows = [rank["windows"][number] for rank in ranks]
        seconds = [max(times) for times in zip(*(w["seconds"] for w in windows), strict=True)]
        first = first or seconds
        speedups = [basic / own for basic, own in zip(first, seconds, strict=True)]
        tick, speedup = statistics.median(seconds), statistics.median(speedups)
        limit = max(statistics.median(w["own"]) for w in windows)
        rows.append(
            [
                method,
                order or ("sequential" if method == "reversible" else "flush"),
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
                "order": order,
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
    header = ["method", "order", "per micro-batch", "min..max", "per second", times, "min..max", "of the limit"]
    print(f"{options.case}: {options.ranks} ranks, stages of {ranks[0]['cut']} layers")
    print(render(header, rows, left=2), flush=True)
    shared = {name: ranks[0][name] for name in ("environment", "cut", "placement", "layer_seconds")}
    asked = {name: value for name, value in vars(options).items() if name != "out"}
    return {**asked, **shared, "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, help="balanced if left out; with --smoke all of them")
    parser.add_argument("--smoke", action="store_true", help="tiny, to see that it runs; results are thrown away")
    parser.add_argument("--ranks", type=int, help="where the case leaves a choice")
    parser.add_argument("--blocks", type=int, help="of each rank, where blocks are equal")
    parser.add_argument("--width", type=int, help="64 for RevNets; equal blocks: 16, in the case 1f1b 32")
    parser.add_argument("--batch-size", type=int, help="of a micro-batch; 32, in the cases partition and 1f1b 16")
    parser.add_argument("--accumulate", type=int, help="micro-batches an update; 1, in the 1f1b cases 8")
    parser.add_argument("--ticks", type=int, default=8, help="in a window; rounded up to whole updates")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile-ticks", type=int, default=3, help="for the costs of layers")
    parser.add_argument("--threads", type=int, default=1, help="of a rank (default 1)")
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
