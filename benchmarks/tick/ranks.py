"""Ticks of several ranks that share one GPU, with and without CUDA graphs: host time of a rank, and throughput.

    python benchmarks/tick/ranks.py --ranks 1 2 10
    python benchmarks/tick/ranks.py --smoke                    # tiny, on the CPU, without graphs

RevNet-18 in ten stages, trained with PETRA; messages pass through gloo. The host time is the processor time of the
thread that trains, without the time in which it waits. Prints a table and writes ranks.json, or where --out says.
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
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import petra
from petra.distributed import ProcessTransport
from petra.formatting import render
from petra.measure import environment
from petra.trainer.optimizers import sgd

HERE = Path(__file__).parent


def make_trainer(given: argparse.Namespace, cuda_graph: bool, transport: ProcessTransport | None) -> petra.Trainer:
    torch.manual_seed(0)
    network = petra.models.create("revnet18", num_classes=10, width=given.width)
    if given.channels_last:
        network.to(memory_format=torch.channels_last)
    return petra.Trainer(
        network,
        method="petra",
        schedule="lock-step",
        stages=10,
        loss=cross_entropy,
        optimizer=partial(sgd, lr=0.01),
        autocast=torch.bfloat16 if given.autocast else None,
        comm_dtype=torch.bfloat16 if given.comm_dtype else None,
        device=given.device,
        transport=transport,
        cuda_graph=None if cuda_graph else False,
    )


def measure(given: argparse.Namespace) -> None:
    """Train on one rank, eagerly and captured in turns; write the times of every block of ticks."""
    torch.set_num_threads(1)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    device = torch.device(given.device)
    x = torch.randn(given.batch_size, 3, 32, 32, device=device)
    y = torch.randint(10, (given.batch_size,), device=device)
    if given.channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    modes = [False, True] if device.type == "cuda" else [False]
    trainers = [
        make_trainer(given, graph, ProcessTransport(device, timeout=timedelta(seconds=60)) if ranks > 1 else None)
        for graph in modes
    ]
    times: dict[str, list[tuple[float, float]]] = {}
    rank = int(os.environ.get("RANK", "0"))
    profile = cProfile.Profile() if given.profile and rank == ranks // 2 else None
    for block in range(given.blocks + 1):
        for graph, trainer in zip(modes, trainers, strict=True):
            if block == 0:
                for _ in range(given.warmup):
                    trainer.step(x, y)
                continue
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if ranks > 1:
                dist.barrier()
            wall, host = time.perf_counter(), time.thread_time()
            if profile is not None and graph:
                profile.enable()
            for _ in range(given.ticks):
                trainer.step(x, y)
            if profile is not None:
                profile.disable()
            host = time.thread_time() - host
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            wall = time.perf_counter() - wall
            times.setdefault(str(graph), []).append((wall / given.ticks, host / given.ticks))
    reasons = [trainer.ineligible_reason for trainer in trainers]
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    (given.worker / f"{rank}.json").write_text(json.dumps({"times": times, "reasons": reasons}))
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def run(given: argparse.Namespace, ranks: int) -> list[dict]:
    """Measure with so many ranks; return a row for each way to run a tick."""
    with tempfile.TemporaryDirectory() as folder:
        own = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        launch = own if ranks > 1 else [sys.executable]
        options = [*sys.argv[1:], "--worker", folder]
        subprocess.run([*launch, str(HERE / "ranks.py"), *options], check=True, timeout=300)
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]
    rows = []
    for mode, blocks in found[0]["times"].items():
        walls = [max(f["times"][mode][i][0] for f in found) for i in range(len(blocks))]
        hosts = [[f["times"][mode][i][1] for i in range(len(blocks))] for f in found]
        rows.append(
            {
                "ranks": ranks,
                "captured": mode == "True",
                "milliseconds": [1000 * wall for wall in walls],
                "host_milliseconds": [1000 * statistics.median(host) for host in hosts],
                "reasons": sorted({str(f["reasons"][-1]) for f in found}) if mode == "True" else [],
            }
        )
    return rows


def show(rows: list[dict]) -> str:
    lines = [
        [
            str(row["ranks"]),
            "captured" if row["captured"] else "eager",
            f"{statistics.median(row['milliseconds']):.2f}",
            f"{statistics.median(row['host_milliseconds']):.2f}",
            f"{max(row['host_milliseconds']):.2f}",
            ", ".join(reason for reason in row["reasons"] if reason != "None"),
        ]
        for row in rows
    ]
    return render(["ranks", "ticks", "ms per tick", "host ms", "busiest rank", "not captured because"], lines, left=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 10])
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--ticks", type=int, default=60, help="ticks of a block (default %(default)s)")
    parser.add_argument("--blocks", type=int, default=5, help="blocks (default %(default)s)")
    parser.add_argument("--warmup", type=int, default=60, help="ticks before them (default %(default)s)")
    parser.add_argument("--autocast", action="store_true", help="compute in bf16")
    parser.add_argument("--comm-dtype", action="store_true", help="send bf16")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "ranks.json")
    parser.add_argument("--smoke", action="store_true", help="tiny, on the CPU; nothing is stored")
    parser.add_argument("--profile", action="store_true", help="show what the middle rank does in captured ticks")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.smoke:
        given.device, given.width, given.batch_size = "cpu", 2, 2
        given.ticks, given.blocks, given.warmup, given.ranks = 2, 1, 2, [2]
    if given.worker is not None:
        measure(given)
        return
    rows = [row for ranks in given.ranks for row in run(given, ranks)]
    print(show(rows))
    if not given.smoke:
        settings = {name: value for name, value in vars(given).items() if name not in ("out", "worker", "smoke")}
        result = {**settings, "rows": rows, "environment": environment(torch.device(given.device))}
        given.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
