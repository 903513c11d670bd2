"""Stall of a checkpoint: asynchronous, compared with writing it while training waits.

    python benchmarks/checkpoints/run.py

Prints a table and the stall in one process and in two ranks, and writes result.json next to this file. Takes one to two
minutes on a free machine.
"""

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from petra import Trainer
from petra.distributed import ProcessTransport, RecentMaximum, SingleProcess
from petra.formatting import render
from petra.measure import environment
from petra.trainer import checkpoint
from petra.trainer.checkpoint_folder import Checkpoints, check_finite

STAGES = 4
TARGET = 0.1
"""The largest stall, as a share of the time to write the checkpoint while training waits."""


def make_trainer(transport, width, layers):
    torch.manual_seed(0)
    network = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)))
    return Trainer(
        network,
        method="backprop",
        loss=cross_entropy,
        optimizer=lambda p: torch.optim.SGD(p, 1e-3, momentum=0.9),
        stages=STAGES,
        transport=transport,
    )


def write_synchronously(trainer, folder):
    """Check and write the state while training waits, without a copy."""
    for index, state in trainer.state_dict()["stages"].items():
        check_finite(state["weights"]["network"].items(), 0)
        checkpoint.save(folder / f"stage{index}.pt", state)
    trainer.transport.gather(None)


def measure(transport, folder, width, layers, repeats):
    """Return the seconds of each repeat: those of the slowest rank."""
    trainer, recent = make_trainer(transport, width, layers), RecentMaximum(transport)
    x, y = torch.randn(8, width), torch.randint(width, (8,))
    checkpoints = Checkpoints(folder / "checkpoint", transport)
    found = {name: [] for name in ("synchronous", "asynchronous", "tick", "tick_while_writing")}

    def timed(name, work):
        began = time.perf_counter()
        work()
        found[name].append(time.perf_counter() - began)

    for _ in range(2 * STAGES):
        trainer.step(x, y)
    for _ in range(repeats + 1):  # the first is warm-up
        transport.gather(None)
        timed("synchronous", lambda: write_synchronously(trainer, folder / "synchronous"))
        for _ in range(3):
            timed("tick", lambda: trainer.step(x, y))
        transport.gather(None)
        timed("asynchronous", lambda: checkpoints.start({}, trainer.state_dict()["stages"]))
        while True:
            timed("tick_while_writing", lambda: trainer.step(x, y))
            values = recent.update(checkpoints.report())
            if values is not None and checkpoints.advance(values):
                break
    stalls = {name: found[name][1:] for name in ("synchronous", "asynchronous")}
    slowest = transport.gather(stalls)
    result = {name: [max(one) for one in zip(*(rank[name] for rank in slowest), strict=True)] for name in stalls}
    return result | {name: statistics.median(found[name]) for name in ("tick", "tick_while_writing")}


def rank_main(rank, ranks, folder, results, threads, *sizes):
    torch.set_num_threads(threads)
    if ranks > 1:
        dist.init_process_group("gloo", f"file://{folder / 'store'}", rank=rank, world_size=ranks)
    found = measure(ProcessTransport() if ranks > 1 else SingleProcess(), folder, *sizes)
    if rank == ranks - 1:
        results.put(found)
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def measure_ranks(ranks, width, layers, repeats):
    context = multiprocessing.get_context("spawn")
    results = context.SimpleQueue()
    threads = max(1, torch.get_num_threads() // ranks)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:  # on a disk, not in memory
        if ranks == 1:
            return measure(SingleProcess(), Path(folder), width, layers, repeats)
        given = (ranks, Path(folder), results, threads, width, layers, repeats)
        processes = [context.Process(target=rank_main, args=(rank, *given)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            if process.exitcode != 0:
                raise SystemExit(f"a process ended with exit code {process.exitcode}")
        return results.get()


def main(arguments=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--smoke", action="store_true", help="tiny sizes in one process; store nothing")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("result.json"))
    options = parser.parse_args(arguments)
    if options.smoke:
        options.width, options.layers, options.repeats, options.ranks = 16, 4, 1, [1]
    measured, rows, stalls, began = {}, [], [], time.monotonic()
    for ranks in options.ranks:
        found = measured[ranks] = measure_ranks(ranks, options.width, options.layers, options.repeats)
        synchronous, asynchronous = (statistics.median(found[name]) for name in ("synchronous", "asynchronous"))
        found["ratio"] = asynchronous / synchronous
        times = (synchronous, asynchronous, found["tick"], found["tick_while_writing"])
        verdict = "reached" if found["ratio"] <= TARGET else "missed"
        where = "1 process" if ranks == 1 else f"{ranks} ranks"
        stalls.append(f"{where}: the stall is {found['ratio']:.1%} (target: at most {TARGET:.0%}, {verdict})")
        rows.append([str(ranks), *(f"{t * 1e3:.0f} ms" for t in times), f"{found['ratio']:.1%}"])
    print(render(["ranks", "synchronous", "asynchronous", "tick", "tick while writing", "stall"], rows))
    print("\n".join([*stalls, f"measured in {time.monotonic() - began:.0f} s"]))
    if not options.smoke:
        sizes = {"width": options.width, "layers": options.layers, "repeats": options.repeats}
        sizes["parameters"] = options.layers * (options.width + 1) * options.width
        result = {**sizes, "ranks": measured, "environment": environment()}
        options.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
