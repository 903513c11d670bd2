"""How much faster a pipeline on real processes is than the same stages without overlap.

    python benchmarks/pipeline_speed/run.py --ranks 2

Trains a RevNet of equal blocks, a stage a rank and a thread a rank, with each method in turn, in one run. Prints a
table and writes a file into results/ beside this file.

- basic: the method "reversible" on the same stages and ranks; one micro-batch at a time
- limit: the busiest rank's own time for forward, backward and update, without any waiting
"""

import argparse
import json
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import petra
from petra.execution import Stage, Transport
from petra.measure import environment
from petra.tables import render

RUNS = (("reversible", None), ("petra", "lock-step"), ("petra", "low-staleness"), ("checkpointed", "low-staleness"))


class Busy:
    """Adds up the seconds that a stage is at work."""

    def __init__(self, stage: Stage) -> None:
        self.seconds = 0.0
        for name in ("forward", "finish", "backward", "update"):
            setattr(stage, name, self._timed(getattr(stage, name)))

    def _timed(self, work):
        def timed(*arguments):
            began = time.perf_counter()
            result = work(*arguments)
            self.seconds += time.perf_counter() - began
            return result

        return timed


def measure(options, method, order, transport) -> dict:
    """Seconds per micro-batch of the pipeline, and of this rank's own work, window by window."""
    torch.manual_seed(0)
    ranks = transport.world
    network = petra.models.create("revnet18", depths=(options.blocks * ranks,), width=options.width)
    cut = [options.blocks + 1, *[options.blocks] * (ranks - 2), options.blocks + 1]
    trainer = petra.Trainer(
        network,
        loss=cross_entropy,
        optimizer=lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9),
        method=method,
        stages=cut,
        order=order,
        transport=transport,
    )
    busy = [Busy(stage) for stage in trainer.stages]
    x, y = torch.randn(options.batch_size, 3, 32, 32), torch.randint(10, (options.batch_size,))
    for _ in range(2 * trainer.order.staleness(0) + 2):
        trainer.step(x, y)
    ticks, own = [], []
    for _ in range(options.windows):
        before = sum(b.seconds for b in busy)
        dist.barrier()
        began = time.perf_counter()
        for _ in range(options.ticks):
            trainer.step(x, y)
        dist.barrier()
        ticks.append((time.perf_counter() - began) / options.ticks)
        own.append((sum(b.seconds for b in busy) - before) / options.ticks)
    trainer.drain()
    return {"ticks": ticks, "own": own}


def work(rank: int, options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    limit = timedelta(seconds=120)
    dist.init_process_group("gloo", store, rank=rank, world_size=options.ranks, timeout=limit)
    transport = Transport(timeout=limit)
    results = [measure(options, method, order, transport) for method, order in RUNS]
    Path(folder, f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=2, help="of each rank")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--ticks", type=int, default=8, help="in a window")
    parser.add_argument("--windows", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (options, folder), options.ranks)
        ranks = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(options.ranks)]
    rows, result = [], {**vars(options), "environment": environment(), "runs": []}
    basic = statistics.median(ranks[0][0]["ticks"])
    for number, (method, order) in enumerate(RUNS):
        tick = statistics.median(ranks[0][number]["ticks"])
        limit = max(statistics.median(rank[number]["own"]) for rank in ranks)
        rows.append(
            [method, order or "sequential", f"{tick * 1e3:.1f} ms", f"{basic / tick:.2f}", f"{limit / tick:.2f}"]
        )
        result["runs"].append(
            {
                "method": method,
                "order": order,
                "seconds": tick,
                "speedup_over_basic": basic / tick,
                "of_limit": limit / tick,
                "windows": [rank[number] for rank in ranks],
            }
        )
    print(render(["method", "order", "per micro-batch", "times basic", "of the limit"], rows, left=2))
    where = result["environment"]
    path = Path(__file__).with_name("results") / f"{where['machine']}-{where['cores']}-cores-{options.ranks}-ranks.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
