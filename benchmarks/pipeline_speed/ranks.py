"""What every rank does, and the parent that starts the ranks and does not let them hang."""

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
from petra.execution import ProcessTransport
from petra.measure import environment

FLUSHING = ("torch 1f1b", "1f1b")
"""Pipelines that stop for an update; their gradients are exact, and so the same."""

SEQUENTIAL = ("reversible", "backprop")
"""Those without overlap."""

COUNTED = ("user", "system", "page_faults", "switches")
"""What the system counts of a process, all threads together; switches are those it was forced to."""


def used() -> tuple[float, ...]:
    """Seconds and numbers of `COUNTED` so far."""
    found = resource.getrusage(resource.RUSAGE_SELF)
    return found.ru_utime, found.ru_stime, found.ru_minflt, found.ru_nivcsw


def create(options: Namespace) -> nn.Sequential:
    """The network of a case, with the same weights each time."""
    torch.manual_seed(0)
    if options.model == "blocks":
        return petra.models.create("revnet18", depths=(options.blocks * options.ranks,), width=options.width)
    return petra.models.create(options.model, width=options.width)


def measure(options: Namespace, rank: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Seconds per micro-batch of each pipeline as this rank sees them, and of its own work, round by round."""
    timeout = timedelta(seconds=options.timeout)
    torch.manual_seed(1)
    shape = (options.batch_size, 3, 32, 32)
    data = [(torch.randn(shape), torch.randint(10, shape[:1])) for _ in range(options.accumulate)]
    transport = ProcessTransport(timeout=timeout)
    costs = None
    cut: Cut = ([1] * options.ranks, list(range(options.ranks)))
    if options.cut == "cost":
        say("costs of layers")
        in_a_row = any(method == "torch 1f1b" for method, _ in options.methods)
        cut, costs = cut_by_cost(create(options), *data[0], options.profile_ticks, transport, in_a_row)
    elif options.cut == "replay":
        say("costs of layers")
        cut, costs = cut_for_replay(create(options), *data[0], options.profile_ticks, transport)
    elif options.cut == "blocks":
        layers = [options.blocks] * options.ranks
        layers[0] += 1  # the stem
        layers[-1] += 1  # the head
        cut = layers, cut[1]
    names = [f"{method} {order or ''}".strip() for method, order in options.methods]
    pipelines: list[Pipeline] = []
    losses = []
    for name, (method, order) in zip(names, options.methods, strict=True):
        say(f"filling {name}")
        pipeline: Pipeline = (
            Torch1F1B(create(options), cut[0], data, timeout)
            if method == "torch 1f1b"
            else PetraPipeline(create(options), cut, data, transport, method, order)
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
            if name in (
                "reversible",
                "backprop",
            ):  # without overlap a micro-batch takes as many times longer as there are ranks
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


def work(rank: int, options: Namespace, folder: str) -> None:
    """One rank; leaves its result, or where it was and what went wrong, in ``folder``."""
    torch.set_num_threads(options.threads)
    if options.no_onednn:
        torch.backends.mkldnn.set_flags(False)

    def say(what: str) -> None:
        Path(folder, f"{rank}.at").write_text(what)

    try:
        say("meeting the others")
        limit = timedelta(seconds=options.timeout)
        dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=options.ranks, timeout=limit)
        result = measure(options, rank, say)
        Path(folder, f"{rank}.json").write_text(json.dumps(result))
        dist.barrier()
        dist.destroy_process_group()
    except Exception:
        Path(folder, f"{rank}.error").write_text(traceback.format_exc())
        raise


def launch(options: Namespace) -> list[dict[str, Any]]:
    """The results of all ranks, or an end with the rank that failed first; never longer than ``options.limit``."""
    multiprocessing.set_forkserver_preload(["torch", "petra"])  # imported once, not once a rank
    with tempfile.TemporaryDirectory() as folder:
        context = torch.multiprocessing.start_processes(
            work, (options, folder), options.ranks, join=False, start_method="forkserver"
        )
        deadline = time.monotonic() + options.limit
        try:
            while not context.join(timeout=1, grace_period=2):
                if time.monotonic() > deadline:
                    raise SystemExit(f"not done after {options.limit:.0f} s\n{_where(folder, options.ranks)}")
        except ProcessRaisedException:
            raise SystemExit(f"{_first_error(folder)}\n{_where(folder, options.ranks)}") from None
        except ProcessExitedException as error:
            what = f"rank {error.error_index} is gone: {error}"
            raise SystemExit(f"{what}\n{_where(folder, options.ranks)}") from None
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(options.ranks)]


def _where(folder: str, ranks: int) -> str:
    said = [Path(folder, f"{rank}.at") for rank in range(ranks)]
    return "\n".join(f"rank {i}: {at.read_text() if at.exists() else 'not started'}" for i, at in enumerate(said))


def _first_error(folder: str) -> str:
    error = min(Path(folder).glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
    return f"rank {error.stem} failed first:\n{error.read_text()}"
