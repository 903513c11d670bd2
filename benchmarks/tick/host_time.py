"""Host time of a captured tick on a middle rank, measured on the CPU with graphs that do nothing.

    python benchmarks/tick/host_time.py
    python benchmarks/tick/host_time.py --profile              # what the rank does
    python benchmarks/tick/host_time.py --smoke

RevNet-18 in ten stages, trained with PETRA. The measured rank has one stage, the ranks before and after it have the
others. A launch of a graph does nothing, so what is left is the host's part of a tick. It is measured twice: without
communication, where a transport returns the same message again and again, and with messages between processes through
gloo. The host time is the processor time of the thread that trains; *all threads* also contains that of the I/O
threads. Prints a table and writes host-time.json, or where --out says.
"""

import argparse
import cProfile
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import petra
from petra.cudagraph import RankTickCapture
from petra.distributed import ProcessTransport, RankPosition, Transport
from petra.distributed.host_message import HostMessage, ReceivedMessage
from petra.formatting import render
from petra.measure import environment
from petra.trainer.optimizers import parameter_groups

HERE = Path(__file__).parent
PLACEMENT = [0, 0, 0, 0, 1, 2, 2, 2, 2, 2]
MEASURED = 1
CLOCKS = (time.thread_time, time.process_time, time.perf_counter)
WAYS = ("no communication", "gloo")


class NoGraphs:
    """A stand-in for CUDA graphs: the work is done when it is captured, and never again."""

    def capture(self, work):
        work()
        return lambda: None

    def branch(self, number):
        return nullcontext()

    def after(self, number, other):
        pass

    def join(self):
        pass


class NoCommunication(Transport):
    """The transport of a rank whose messages are lost, and which receives zeros at once."""

    def __init__(self):
        super().__init__(RankPosition(MEASURED, 3), "cpu")
        self._received = {}

    def send(self, to, action, tensors):
        pass

    def send_packed(self, to, action, message):
        pass

    def receive(self, source, action, layout):
        if layout not in self._received:
            memory = torch.zeros(layout.size, dtype=torch.uint8)
            self._received[layout] = ReceivedMessage(lambda: HostMessage(layout, memory), self.device)
        return self._received[layout]

    def gather(self, value):
        return [value] * self.position.ranks

    def average(self, tensors):
        pass

    def gather_to_main(self, source, tensors):
        return {}


def sgd(parameters):
    return torch.optim.SGD(parameter_groups(parameters, 1e-4), 0.01, momentum=0.9, nesterov=True, fused=True)


def make_trainer(transport: Transport) -> petra.Trainer:
    torch.manual_seed(0)
    trainer = petra.Trainer(
        petra.models.create("revnet18", num_classes=10, width=2),
        method="petra",
        schedule="lock-step",
        stages=len(PLACEMENT),
        placement=PLACEMENT,
        loss=cross_entropy,
        optimizer=sgd,
        transport=transport,
    )
    trainer.loss_checked = True  # it would need an evaluation, and so the other ranks
    trainer.executor.capture = RankTickCapture(trainer.executor, NoGraphs())
    return trainer


def measure(given: argparse.Namespace, communicates: bool) -> list[list[float]]:
    """Train on one rank; return the seconds of every block per tick, for each of the clocks."""
    torch.set_num_threads(1)
    rank = MEASURED
    if communicates:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        rank = dist.get_rank()
    trainer = make_trainer(ProcessTransport(timeout=timedelta(seconds=60)) if communicates else NoCommunication())
    # A middle rank only needs the shapes. As on a GPU, the host does not look for NaN in inputs that it cannot read.
    device = "meta" if rank == MEASURED else "cpu"
    x, y = torch.randn(2, 3, 8, 8).to(device), torch.randint(10, (2,)).to(device)
    for _ in range(given.warmup):
        trainer.step(x, y)
    profile = cProfile.Profile() if given.profile and rank == MEASURED else None
    times = []
    for _ in range(given.blocks):
        captured = trainer.executor.capture.captured_ticks
        before = [clock() for clock in CLOCKS]
        if profile is not None:
            profile.enable()
        for _ in range(given.ticks):
            trainer.step(x, y)
        if profile is not None:
            profile.disable()
        times.append([(clock() - start) / given.ticks for clock, start in zip(CLOCKS, before, strict=True)])
        if trainer.executor.capture.captured_ticks - captured != given.ticks:
            raise RuntimeError(f"some ticks were not captured: {trainer.ineligible_reason}")
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(40)
    if communicates:
        dist.barrier()
        dist.destroy_process_group()
    return times if rank == MEASURED else []


def run(given: argparse.Namespace, way: str) -> dict:
    """Measure in processes of their own; return a row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        launch = [sys.executable]
        if way == "gloo":
            launch += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
        command = [*launch, str(HERE / "host_time.py"), *sys.argv[1:], "--worker", folder, "--way", way]
        subprocess.run(command, check=True, timeout=300, env={"OMP_NUM_THREADS": "1", **os.environ})
        found = json.loads((Path(folder) / "times.json").read_text())
    names = ("host", "all_threads", "wall")
    blocks = zip(*found, strict=True)
    return {"way": way} | {f"{n}_microseconds": [1e6 * s for s in b] for n, b in zip(names, blocks, strict=True)}


def show(rows: list[dict]) -> str:
    lines = [
        [
            row["way"],
            f"{statistics.median(row['host_microseconds']):.0f}",
            f"{min(row['host_microseconds']):.0f}",
            f"{statistics.median(row['all_threads_microseconds']):.0f}",
            f"{statistics.median(row['wall_microseconds']):.0f}",
        ]
        for row in rows
    ]
    return render(["messages", "host µs per tick", "least", "all threads", "wall"], lines, left=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--ticks", type=int, default=200, help="ticks of a block (default %(default)s)")
    parser.add_argument("--blocks", type=int, default=9, help="blocks (default %(default)s)")
    parser.add_argument("--warmup", type=int, default=60, help="ticks before them (default %(default)s)")
    parser.add_argument("--profile", action="store_true", help="show what the rank does")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "host-time.json")
    parser.add_argument("--smoke", action="store_true", help="a few ticks; nothing is stored")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.smoke:
        given.ticks, given.blocks, given.warmup = 3, 1, 30
    if given.worker is not None:
        if times := measure(given, given.way == "gloo"):
            (given.worker / "times.json").write_text(json.dumps(times))
        return
    rows = [run(given, way) for way in given.ways]
    print(show(rows))
    if not given.smoke:
        settings = {name: value for name, value in vars(given).items() if name not in ("out", "worker", "way", "smoke")}
        result = {**settings, "rows": rows, "environment": environment(torch.device("cpu"))}
        given.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
