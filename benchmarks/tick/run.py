"""Milliseconds per tick, images per second and GPU memory of the methods on CIFAR shapes, compared on one GPU.

    python benchmarks/tick/run.py --autocast bf16 --channels-last
    python benchmarks/tick/run.py --autocast bf16 --channels-last --end-to-end -- --channels-last
    python benchmarks/tick/run.py --smoke                       # tiny, on the CPU, to see that it works

Each method runs in its own process, so that its memory can be measured; the processes of a case take turns, one block
of ticks at a time. Times are medians over the blocks. A method is NAME[@SCHEDULE][/STAGES]; the defaults are the
paper's lock-step schedule and one stage per block of the network. Arguments after -- go to the run of --end-to-end, as
options of `petra train`. Prints tables, and writes a file into --out after every case.
"""

import argparse
import json
import statistics
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from petra.formatting import render
from petra.measure import environment

HERE = Path(__file__).parent
CASES = ("revnet18:64", "revnet18:256", "revnet50:64", "revnet50:256")
METHODS = ("petra", "petra@low-staleness", "backprop/1", "backprop", "reversible/1", "delayed", "checkpointed")
AUTHORS = {  # ms and GiB of the authors' code on an H200, tf32: backprop, reversible backprop, PETRA, delayed
    "revnet18:64": {
        "backprop": (24.1, 0.65),
        "reversible": (31.2, 0.46),
        "petra": (29.4, 1.58),
        "delayed": (26.4, 3.01),
    },
    "revnet18:256": {
        "backprop": (26.4, 1.8),
        "reversible": (32.6, 1.12),
        "petra": (29.6, 5.64),
        "delayed": (30.3, 10.7),
    },
    "revnet50:64": {
        "backprop": (66.1, 2.75),
        "reversible": (74.2, 1.35),
        "petra": (70.3, 10.51),
        "delayed": (64.6, 25.08),
    },
    "revnet50:256": {
        "backprop": (68.0, 9.49),
        "reversible": (79.0, 3.97),
        "petra": (74.7, 40.7),
        "delayed": (80.5, 96.3),
    },
}


class Worker:
    """A method in its own process."""

    def __init__(self, case: str, method: str, cuda_graph: bool, given: argparse.Namespace) -> None:
        self.method, self.cuda_graph, self.seconds, self.error = method, cuda_graph, [], None
        model, batch = case.split(":")
        command = [sys.executable, str(HERE / "worker.py"), "--model", model, "--batch-size", batch]
        command += ["--method", method, "--device", given.device, "--width", str(given.width), *how(given)]
        command += ["--cuda-graph"] if cuda_graph else []
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def answer(self, line: str | None = None) -> dict:
        """Return the answer of the process to a line; empty once it has failed."""
        if self.error is not None:
            return {}
        try:
            if line is not None:
                self.process.stdin.write(line + "\n")
                self.process.stdin.flush()
            if said := self.process.stdout.readline():
                return json.loads(said)
        except BrokenPipeError:
            pass
        _, trouble = self.process.communicate()
        self.error = (trouble.strip().splitlines() or ["it ended without a message"])[-1]
        return {}

    def row(self, ticks: int, batch: int) -> dict:
        """End the process and return its measurements."""
        made = {**self.ready, **self.answer("")}
        self.process.communicate()
        row = {"method": self.method, "cuda_graph": self.cuda_graph, "error": self.error, **made}
        if self.seconds and self.error is None:
            blocks = [1e3 * s / ticks for s in self.seconds]
            ms = statistics.median(blocks)
            row |= {"milliseconds": ms, "blocks": blocks, "images_per_second": 1e3 * batch / ms}
        return row


def how(given: argparse.Namespace) -> list[str]:
    """Return the options that all methods share, for the worker's command line."""
    switches = ("channels_last", "cudnn_benchmark", "deterministic")
    return precision(given) + [f"--{name.replace('_', '-')}" for name in switches if getattr(given, name)]


def precision(given: argparse.Namespace) -> list[str]:
    """Return the options of autocast and messages for a command line."""
    found = [("--autocast", given.autocast), ("--comm-dtype", given.comm_dtype)]
    return [word for pair in found if pair[1] for word in pair]


def measure(case: str, methods: list[str], cuda_graph: bool, given: argparse.Namespace) -> list[dict]:
    """Measure all methods of a case in turns, or one after the other where they do not fit together."""
    batch = int(case.split(":")[1])
    ticks, blocks = (given.ticks, given.blocks) if cuda_graph else (max(2, given.ticks // 5), max(1, given.blocks // 2))
    rows = []
    together = 1 if case in given.alone else len(methods)
    for first in range(0, len(methods), together):
        workers = [Worker(case, method, cuda_graph, given) for method in methods[first : first + together]]
        for worker in workers:
            worker.ready = worker.answer()
        for block in range(blocks + 1):
            for worker in workers:
                if (said := worker.answer(str(ticks))) and block:  # the first is warm-up
                    worker.seconds.append(said["seconds"])
        rows += [worker.row(ticks, batch) for worker in workers]
    return rows


def add_ratios(rows: list[dict]) -> None:
    """Add the throughput relative to the fastest captured backprop, or to the fastest one if none is captured."""
    backprop = [r for r in rows if r["method"].startswith("backprop") and "milliseconds" in r]
    captured = [r for r in backprop if r["cuda_graph"]] or backprop
    if not captured:
        return
    floor = min(r["milliseconds"] for r in captured)
    for row in rows:
        if "milliseconds" in row:
            row["of_backprop"] = floor / row["milliseconds"]


def show(case: str, rows: list[dict]) -> str:
    """Return the table of a case."""
    cells = []
    for row in rows:
        authors = AUTHORS.get(case, {}).get(row["method"].partition("@")[0].partition("/")[0])
        theirs = [f"{authors[0]:.1f}", f"{authors[1]:.2f}"] if authors else ["", ""]
        name = row["method"] + ("" if row["cuda_graph"] else ", not captured")
        if row["error"] is not None:
            cells.append([name, row["error"][:60], *[""] * 4, *theirs])
            continue
        note = f" ({row['ineligible_reason']})" if row.get("ineligible_reason") else ""
        gib = [f"{row[peak] / 2**30:.2f}" for peak in ("peak_allocated", "peak_reserved")]
        figures = [f"{row['milliseconds']:.2f}", f"{row['images_per_second']:.0f}", f"{row.get('of_backprop', 0):.2f}"]
        cells.append([name + note, *figures, *gib, *theirs])
    header = ["method", "ms per tick", "images/s", "of captured backprop", "peak GiB", "reserved GiB"]
    return f"{case.replace(':', ', batch ')}\n\n" + render([*header, "authors' ms", "authors' GiB"], cells)


def end_to_end(rows: list[dict], given: argparse.Namespace, extra: list[str]) -> dict:
    """Time a whole run with PETRA, and compare it with the bare ticks of the first case."""
    model, batch = given.cases[0].split(":")
    command = [
        sys.executable,
        str(HERE / "end_to_end.py"),
        "--model",
        model,
        "--batch-size",
        batch,
        "--method",
        "petra",
    ]
    command += ["--accumulate", "1", "--epochs", str(given.epochs), "--warmup-epochs", "1", "--lr", "0.001"]
    command += ["--data", f"synthetic:3x32x32:10:{given.images}", "--width", str(given.width)]
    command += ["--device", given.device, "--schedule", "lock-step", *extra, *precision(given)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["it ended without a message"])[-1], "command": command}
    found = {**json.loads(done.stdout.strip().splitlines()[-1]), "command": command[1:]}
    schedule = [value for name, value in pairwise(command) if name == "--schedule"][-1]
    same = [r for r in rows if r["method"].split("@")[0] == "petra" and r.get("schedule") == schedule]
    bare = [r["images_per_second"] for r in same if "images_per_second" in r]
    if bare:
        found["of_the_bare_tick"] = found["training_images_per_second"] / max(bare)
    return found


def options() -> tuple[argparse.Namespace, list[str]]:
    arguments = sys.argv[1:]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), metavar="MODEL:BATCH")
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--alone", nargs="*", default=["revnet50:256"], help="cases whose methods do not fit together")
    parser.add_argument("--modes", nargs="+", choices=("captured", "plain"), default=["captured", "plain"])
    parser.add_argument(
        "--plain-cases", nargs="*", default=["revnet18:64", "revnet50:64"], help="cases also measured without capture"
    )
    parser.add_argument("--ticks", type=int, default=50, help="ticks in a block (default %(default)s)")
    parser.add_argument("--blocks", type=int, default=9)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--autocast", choices=("bf16",))
    parser.add_argument("--comm-dtype", choices=("bf16",))
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--cudnn-benchmark", action="store_true", help="let cuDNN time its kernels and use the best")
    parser.add_argument("--deterministic", action="store_true", help="deterministic cuDNN kernels, as in `petra train`")
    parser.add_argument("--end-to-end", action="store_true", help="also time a whole run of the first case")
    parser.add_argument("--epochs", type=int, default=6, help="epochs of that run; the first and the last do not count")
    parser.add_argument("--images", type=int, default=50000, help="images in an epoch of that run")
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU; stores nothing")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the results")
    parser.add_argument("--name", default="result", help="name of the file in it (default %(default)s)")
    given = parser.parse_args(arguments[:split])
    if given.smoke:
        given.device, given.width, given.ticks, given.blocks, given.modes = "cpu", 8, 2, 1, ["plain"]
        given.cases = given.plain_cases = ["revnet18:2"]
        given.images, given.epochs = 64, 3
    return given, arguments[split + 1 :]


def main() -> None:
    given, extra = options()
    shown = {name: str(value) if isinstance(value, Path) else value for name, value in vars(given).items()}
    result: dict = {"options": shown, "environment": environment(given.device), "cases": {}}

    def write() -> None:
        if given.smoke:
            return
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / f"{given.name}.json").write_text(json.dumps(result, indent=2) + "\n")

    for case in given.cases:
        rows = []
        if "captured" in given.modes:
            rows += measure(case, given.methods, True, given)
        if "plain" in given.modes and case in given.plain_cases:
            rows += measure(case, given.methods, False, given)
        add_ratios(rows)
        result["cases"][case] = rows
        print(show(case, rows) + "\n", flush=True)
        write()
    if given.end_to_end:
        result["end_to_end"] = found = end_to_end(result["cases"][given.cases[0]], given, extra)
        print("End to end:", {name: value for name, value in found.items() if name != "command"}, flush=True)
        write()


if __name__ == "__main__":
    main()
