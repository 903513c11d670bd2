"""Several trainings at a time on one GPU: their total images per second, in several processes and in one.

    python benchmarks/tick/sharing.py --autocast bf16 --channels-last
    python benchmarks/tick/sharing.py --smoke                   # tiny, on the CPU, to see that it works

With `processes`, each training has its own process. The processes take turns on the GPU, or share it through CUDA's
Multi-Process Service if that is running. With `streams`, all trainings are in one process, each on its own CUDA stream,
and run one tick in turn. A case is MODEL:BATCH:METHOD, with methods as in run.py. Prints a table and writes a file.
"""

import argparse
import json
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import worker

from petra.formatting import render
from petra.measure import environment

HERE = Path(__file__).parent
CASES = ("revnet18:128:backprop/1", "revnet18:64:petra", "resnet164-basic:128:backprop/1")


def of_worker(case: str, given: argparse.Namespace) -> list[str]:
    """Return the options of worker.py for a case."""
    model, batch, method = case.split(":")
    found = ["--model", model, "--batch-size", batch, "--method", method, "--device", given.device]
    found += [] if given.width is None else ["--width", str(given.width)]
    found += ["--autocast", given.autocast] if given.autocast else []
    found += ["--channels-last"] if given.channels_last else []
    return found if given.device == "cpu" else [*found, "--cuda-graph", "--deterministic"]


def processes(case: str, number: int, given: argparse.Namespace) -> float:
    """Return the seconds of a block of ticks, in concurrent processes."""
    command = [sys.executable, str(HERE / "worker.py"), *of_worker(case, given)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    workers = [subprocess.Popen(command, **pipes) for _ in range(number)]
    try:
        for own in workers:
            own.stdout.readline()
        for own in workers:  # one block to warm up and one that counts
            own.stdin.write(f"{given.ticks}\n{given.ticks}\n")
            own.stdin.flush()
        blocks = [[json.loads(own.stdout.readline())["seconds"] for own in workers] for _ in range(2)]
        return max(blocks[-1])
    finally:
        for own in workers:
            own.communicate("")


def streams(case: str, number: int, given: argparse.Namespace) -> float:
    """Return the seconds of a block of ticks, on several CUDA streams of this process."""
    each = worker.options(of_worker(case, given))
    cuda = each.device != "cpu"
    lanes = [torch.cuda.stream(torch.cuda.Stream()) if cuda else nullcontext() for _ in range(number)]
    trainers, data = [], worker.batches(each)
    worker.synchronize()
    for lane in lanes:
        with lane:
            trainers.append(worker.make(each))
    began = 0.0
    for block in (worker.until_steady(trainers[0]), given.ticks):
        worker.synchronize()
        began = time.perf_counter()
        for tick in range(block):
            for lane, trainer in zip(lanes, trainers, strict=True):
                with lane:
                    trainer.step(*data[tick % len(data)])
        worker.synchronize()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), metavar="MODEL:BATCH:METHOD")
    parser.add_argument(
        "--together", nargs="+", type=int, default=[1, 2, 4], help="numbers of trainings (default: 1 2 4)"
    )
    parser.add_argument("--ways", nargs="+", choices=("processes", "streams"), default=["processes", "streams"])
    parser.add_argument("--ticks", type=int, default=400, help="ticks of each training (default %(default)s)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--width", type=int, help="width of the networks (default: their own)")
    parser.add_argument("--autocast", choices=("bf16",))
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU; stores nothing")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "sharing.json")
    given = parser.parse_args()
    if given.smoke:
        given.device, given.width, given.ticks, given.together = "cpu", 4, 2, [1, 2]
        given.cases = ["revnet18:2:backprop/1", "revnet18:2:petra"]
    rows, table = [], []
    for case in given.cases:
        batch = int(case.split(":")[1])
        for way in given.ways:
            for number in given.together:
                seconds = {"processes": processes, "streams": streams}[way](case, number, given)
                rate = number * given.ticks * batch / seconds
                rows.append({"case": case, "way": way, "trainings": number, "images_per_second": rate})
                table.append([case, way, str(number), f"{rate:.0f}"])
                print(*table[-1], flush=True)
                shown = {name: v for name, v in vars(given).items() if name != "out"}
                result = {"options": shown, "environment": environment(given.device), "rows": rows}
                if not given.smoke:
                    given.out.parent.mkdir(parents=True, exist_ok=True)
                    given.out.write_text(json.dumps(result, indent=2) + "\n")
    print(render(["case", "as", "trainings", "images/s in total"], table, left=2))


if __name__ == "__main__":
    main()
