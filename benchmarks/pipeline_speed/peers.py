"""Compares Petra's schedules with all of torch.distributed.pipelining: throughput, memory per rank, idle share.

    python benchmarks/pipeline_speed/peers.py --ranks 8
    python benchmarks/pipeline_speed/peers.py --smoke

Trains with gloo over loopback; each rank has one process and one thread. One launch measures all configurations. The
pipelines of a case with the same number of micro-batches exist at the same time and take turns. Pipelines of torch and
`backprop` train the plain twin of the reversible network, which has the same arithmetic in a forward.

Writes a JSON file and a figure into the folder results next to this file; the JSON file is written again after every
configuration. A configuration that fails is reported, and the others are measured without it.

Cases:
- transformer: blocks of a language model
- revnet: equal blocks of a RevNet
"""

import argparse
import json
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from peak_memory import bytes_in_use
from peer_ranks import NAMES, measure
from peer_report import draw, report
from ranks import launch

from petra.measure import environment

CASES: dict[str, dict[str, Any]] = {
    "transformer": {"model": "gpt", "width": 256, "seq_len": 128, "batch_size": 2, "blocks": 2},
    "revnet": {"model": "revnet", "width": 32, "batch_size": 6, "blocks": 2},
}
SMOKE: dict[str, dict[str, Any]] = {
    "transformer": {"model": "gpt", "width": 32, "seq_len": 8, "batch_size": 2, "blocks": 2},
    "revnet": {"model": "revnet", "width": 4, "batch_size": 2, "blocks": 2},
}
DEFAULT = [name for name in NAMES if name != "backprop 1f1b"]


def groups(options: argparse.Namespace, failed: dict[tuple[Any, ...], str], done: list[dict]) -> list[tuple[Any, ...]]:
    """Return the configurations that are left: case, micro-batches, names."""
    complete = {(run["case"], run["microbatches"]) for run in done}
    found = []
    for size in options.microbatches:
        for case in options.cases:
            names = [
                name
                for name in options.schedules
                if (case, size, name) not in failed
                and (name != "reversible sequential" or size == min(options.microbatches))  # the same for all sizes
            ]
            if (case, size) not in complete and names:
                found.append((case, size, names))
    return found


def run_all(options: argparse.Namespace, path: Path) -> list[dict[str, Any]]:
    """Measure everything. After a failure, begin again with the group in which it happened, without the culprit.

    Rank 0 writes all results so far into the file `path` after every configuration.
    """
    deadline = time.monotonic() + options.limit
    failed: dict[tuple[Any, ...], str] = {}
    done: list[dict] = []
    asked = {name: value for name, value in vars(options).items() if name != "out"}
    while (left := groups(options, failed, done)) and (seconds := deadline - time.monotonic()) > options.limit / 20:
        errors = [
            {"case": case, "microbatches": size, "name": name, "error": error}
            for (case, size, name), error in failed.items()
        ]
        path.write_text(json.dumps({**asked, "environment": environment(), "current": None, "runs": done + errors}))
        # Ranks begin nothing new when time is nearly over; the parent stops them if they hang.
        chosen = {**asked, "groups": left, "path": path, "limit": seconds, "seconds": 0.95 * seconds - 10}
        error = None
        try:
            launch(argparse.Namespace(**chosen), measure)
        except SystemExit as stopped:
            error = str(stopped)
        said = json.loads(path.read_text())
        if error is None:
            return list(said["runs"])
        print(error, flush=True)
        current = said["current"]
        if current is None or options.check:
            raise SystemExit(1)
        done = [run for run in said["runs"] if "error" in run or [run["case"], run["microbatches"]] != current[:2]]
        done = [run for run in done if (run["case"], run["microbatches"], run["name"]) not in failed]
        failed[tuple(current)] = _reason(error)
    return list(json.loads(path.read_text())["runs"])


def _reason(error: str) -> str:
    """Return the last line of a traceback, which is followed by what the ranks did; or the first line."""
    lines = error.split("\n\n")[0].splitlines()
    return lines[-1] if "Traceback" in error else lines[0]


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny, two ranks, checks gradients; stores nothing")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--microbatches", type=int, nargs="+", default=[8, 32, 16, 4], help="per update")
    parser.add_argument("--schedules", nargs="+", choices=NAMES, default=DEFAULT, metavar="NAME", help=str(NAMES))
    parser.add_argument("--rounds", type=int, default=2, help="windows of each configuration")
    parser.add_argument("--window", type=int, default=16, help="micro-batches in a window, at least")
    parser.add_argument("--width", type=int, help="of the networks (default: 256 and 32)")
    parser.add_argument("--batch-size", type=int, help="of a micro-batch (default: 2 texts, 6 images)")
    parser.add_argument("--blocks", type=int, help="blocks of each rank, an even number (default: 2)")
    parser.add_argument("--seq-len", type=int, help="tokens of a text (default: 128)")
    parser.add_argument("--check", action="store_true", help="compare all exact gradients with plain backprop")
    parser.add_argument("--threads", type=int, default=1, help="threads of a rank")
    parser.add_argument("--no-onednn", action="store_true", help="PyTorch's own convolutions")
    parser.add_argument("--timeout", type=float, default=60, help="seconds that a rank waits for another")
    parser.add_argument("--limit", type=float, default=560, help="seconds for everything")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("results"))
    options = parser.parse_args(arguments)
    options.sizes = {name: dict(case) for name, case in (SMOKE if options.smoke else CASES).items()}
    for case in options.sizes.values():
        case |= {
            key: getattr(options, key) for key in ("width", "batch_size", "blocks", "seq_len") if vars(options)[key]
        }
        if case["blocks"] % 2:
            parser.error(f"--blocks is {case['blocks']}: give an even number, for two stages per rank")
    if options.smoke:
        options.ranks, options.microbatches, options.rounds, options.window, options.check = 2, [4], 1, 4, True
    bytes_in_use()  # raises an error before anything begins if memory cannot be measured
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) if options.smoke else options.out
        out.mkdir(exist_ok=True, parents=True)
        where = environment()
        path = out / f"{where['machine']}-{where['cores']}-cores-peers-{options.ranks}-ranks.json"
        runs = run_all(options, path)
        print(report(runs))
        if find_spec("matplotlib") is not None:
            draw(runs, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
