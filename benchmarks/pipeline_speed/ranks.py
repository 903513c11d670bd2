"""The work of a rank, and the parent process that starts the ranks and enforces the time limit."""

from __future__ import annotations

import json
import multiprocessing
import resource
import tempfile
import time
import traceback
from argparse import Namespace
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cut import Cut, cut_by_cost, cut_for_replay
from pipelines import PetraPipeline, Pipeline, Torch1F1B, check_gradients, check_losses
from torch import nn
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

import petra
from petra.distributed import ProcessTransport
from petra.measure import environment

FLUSHING = ("torch 1f1b", "1f1b")
"""Pipelines that flush for an update; their gradients are exact and therefore equal."""

SEQUENTIAL = ("reversible", "backprop")
"""Pipelines without overlap."""

Measure = Callable[[Namespace, int, Callable[[str], None]], dict[str, Any]]
"""The work of a rank: takes the options, the rank, and a function that is given what the rank does now."""

COUNTED = ("user", "system", "page_faults", "switches")
"""Operating system counters of a process, all threads together; switches are the involuntary ones."""


def used() -> tuple[float, ...]:
    """Return the current values of `COUNTED`."""
    found = resource.getrusage(resource.RUSAGE_SELF)
    return found.ru_utime, found.ru_stime, found.ru_minflt, found.ru_nivcsw


def create(options: Namespace) -> nn.Sequential:
    """Return the network of a case, with the same weights each time."""
    torch.manual_seed(0)
    if options.model == "blocks":
        return petra.models.create("revnet18", depths=(options.blocks * options.ranks,), width=options.width)
    return petra.models.create(options.model, width=options.width)


def measure(options: Namespace, rank: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Return the seconds per micro-batch of each pipeline on this rank, and of its own work, round by round."""
    timeout = timedelta(seconds=options.timeout)
    torch.manual_seed(1)
    shape = (options.batch_size, 3, 32, 32)
    data = [(torch.randn(shape), torch.randint(10, shape[:1])) for _ in range(options.accumulate)]
    transport = ProcessTransport(timeout=timeout)
    costs = None
    cut: Cut = ([1] * options.ranks, list(range(options.ranks)))
    if options.cut == "cost":
        say("costs of layers")
        contiguous = any(method == "torch 1f1b" for method, _ in options.methods)
        cut, costs = cut_by_cost(create(options), *data[0], options.profile_ticks, transport, contiguous)
    elif options.cut == "replay":
        say("costs of layers")
        cut, costs = cut_for_replay(create(options), *data[0], options.profile_ticks, transport)
    elif options.cut == "blocks":
        layers = [options.blocks] * options.ranks
        layers[0] += 1  # the stem
        layers[-1] += 1  # the head
        cut = layers, cut[1]
    names = [f"{method} {schedule or ''}".strip() for method, schedule in options.methods]
    pipelines: list[Pipeline] = []
    losses = []
    for name, (method, schedule) in zip(names, options.methods, strict=True):
        say(f"filling {name}")
        pipeline: Pipeline = (
            Torch1F1B(create(options), cut[0], data, timeout)
            if method == "torch 1f1b"
            else PetraPipeline(create(options), cut, data, transport, method, schedule)
        )
        pipelines.append(pipeline)
        losses.append(pipeline.run(pipeline.fill))
        pipeline.settle()
        dist.barrier()
    if rank == options.ranks - 1:
        check_losses(losses, names, options.accumulate)
    check_gradients([p.gradients() for p, name in zip(pipelines, names, strict=True) if name in FLUSHING])
    windows: list[dict[str, list[float]]] = [{name: [] for name in ("seconds", "own", *COUNTED)} for _ in pipelines]
    for turn in range(options.rounds):
        for name, pipeline, window in zip(names, pipelines, windows, strict=True):
            say(f"round {turn} of {name}")
            ticks = options.ticks
            if name in SEQUENTIAL:  # a micro-batch takes longer by a factor of the number of ranks
                ticks = options.accumulate * max(2, ticks // options.accumulate // options.ranks)
            dist.barrier()
            pipeline.run(pipeline.lead)
            before, own, began = used(), pipeline.busy.seconds, time.perf_counter()
            pipeline.run(ticks)
            window["seconds"].append((time.perf_counter() - began) / ticks)
            window["own"].append((pipeline.busy.seconds - own) / ticks)
            for name, now, then in zip(COUNTED, used(), before, strict=True):
                window[name].append((now - then) / ticks)
            pipeline.settle()
            dist.barrier()
    say("done")
    return {
        "cut": cut[0],
        "placement": cut[1],
        "layer_seconds": costs,
        "environment": environment(),
        "windows": windows,
    }


def work(rank: int, options: Namespace, measure: Measure, folder: str) -> None:
    """Run one rank, which writes its result, or its activity and its error, into `folder`."""
    torch.set_num_threads(options.threads)
    if options.no_onednn:
        torch.backends.mkldnn.set_flags(False)

    def say(what: str) -> None:
        Path(folder, f"{rank}.activity").write_text(what)

    try:
        say("initializing the process group")
        limit = timedelta(seconds=options.timeout)
        dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=options.ranks, timeout=limit)
        result = measure(options, rank, say)
        Path(folder, f"{rank}.json").write_text(json.dumps(result))
        dist.barrier()
        dist.destroy_process_group()
    except Exception:
        Path(folder, f"{rank}.error").write_text(traceback.format_exc())
        raise


def launch(options: Namespace, measure: Measure = measure) -> list[dict[str, Any]]:
    """Return the results of all ranks, or exit with the rank that failed first; takes at most `options.limit`."""
    multiprocessing.set_forkserver_preload(["torch", "petra"])  # imported once, not once per rank
    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.start_processes(
            work, (options, measure, folder), options.ranks, join=False, start_method="forkserver"
        )
        deadline = time.monotonic() + options.limit
        try:
            while not context.join(timeout=1, grace_period=2):
                if time.monotonic() > deadline:
                    raise SystemExit(f"not done after {options.limit:.0f} s\n{_activities(folder, options.ranks)}")
        except ProcessRaisedException:
            raise SystemExit(f"{_first_error(folder)}\n{_activities(folder, options.ranks)}") from None
        except ProcessExitedException as error:
            what = f"rank {error.error_index} exited: {error}"
            raise SystemExit(f"{what}\n{_activities(folder, options.ranks)}") from None
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(options.ranks)]


def _activities(folder: str, ranks: int) -> str:
    files = [Path(folder, f"{rank}.activity") for rank in range(ranks)]
    return "\n".join(f"rank {i}: {f.read_text() if f.exists() else 'not started'}" for i, f in enumerate(files))


def _first_error(folder: str) -> str:
    error = min(Path(folder).glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
    return f"rank {error.stem} failed first:\n{error.read_text()}"
