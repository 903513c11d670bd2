"""`petra doctor`: tests the processes, GPUs and connections that a pipeline would use, in a minute."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict
from typing import Any

import torch

from petra.cli.device import cores, set_up_device
from petra.cli.doctor_checks import LinkSpeed, PipelineCheck, compare_with_one_process, time_links
from petra.distributed.job import is_first_process, join, world_size
from petra.formatting import render


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "doctor",
        description="Tests what a pipeline on several processes needs: shows the machine, times messages between "
        "neighbours, and trains a small pipeline on all ranks that must have the weights of one process, bit for bit, "
        "with and without CUDA graphs. The exit code is 1 if something is wrong. Under torchrun, it tests the "
        "processes that torchrun has started, also on several machines.",
        epilog="Examples: petra doctor --ranks 4; torchrun --nnodes 2 --nproc-per-node 8 … -m petra doctor",
    )
    parser.add_argument("--ranks", type=int, metavar="N", help="processes (default: one for each GPU, at least 2)")
    parser.add_argument("--device", metavar="NAME", help="cpu or cuda (default: GPUs if there are some)")
    parser.add_argument("--mib", type=float, default=32.0, metavar="N", help="MiB of a large message (default: 32)")
    parser.add_argument("--seconds", type=float, default=2.0, metavar="N", help="to time each link (default: 2)")
    parser.add_argument("--ticks", type=int, default=60, metavar="N", help="ticks of the small pipeline (default: 60)")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="N", help="seconds to wait for a rank (60)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Start the ranks, or be one of them."""
    for name, least in (("ranks", 2), ("mib", 0.001), ("seconds", 0.01), ("ticks", 1), ("timeout", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(f"--{name} is {value}: give {least} or more")
    options.threads = None
    if world_size() > 1:
        return _check(options)
    set_up_device(options)  # an error is reported once, before ranks start
    ranks = options.ranks or max(2, 0 if options.device == "cpu" else torch.cuda.device_count())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores() // ranks)))}
    command += ["-m", options.module, *options.arguments]
    return subprocess.run(command, env=environment, check=False).returncode  # noqa: S603


def _check(options: argparse.Namespace) -> int:
    device = set_up_device(options)
    if options.ranks not in (None, world_size()):
        raise ValueError(f"--ranks is {options.ranks}, but there are {world_size()} processes: leave it out")
    _print(options, f"connecting {world_size()} processes")
    with join(device, timeout=options.timeout) as transport:
        machines = transport.gather(_machine(device))
        _print(options, "timing messages between neighbours")
        links = time_links(transport, device, int(options.mib * 2**20), options.seconds)
        checks = []
        for cuda_graph in (False, None) if device.type == "cuda" else (False,):
            _print(options, f"training a pipeline {'with' if cuda_graph is None else 'without'} CUDA graphs")
            checks.append(compare_with_one_process(transport, device, options.ticks, cuda_graph))
        problems = _problems(machines, checks)
        if is_first_process():  # before any process exits, after which torchrun would end the others
            show = _as_json if options.json else _as_text
            print(show(machines, links, checks, problems), flush=True)
    return 1 if problems else 0


def _print(options: argparse.Namespace, text: str) -> None:
    if is_first_process() and not options.json:
        print(f"petra doctor: {text} …", file=sys.stderr, flush=True)


def _machine(device: torch.device) -> dict[str, Any]:
    """Return what this process runs on."""
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    nccl = None
    if gpu is not None and torch.distributed.is_nccl_available():
        nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    own = device.type == "cuda" and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= torch.cuda.device_count()
    return {
        "host": platform.node(),
        "device": str(device) if gpu is None else f"{device}, {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB",
        "backend": f"NCCL {'.'.join(map(str, nccl))}" if own and nccl is not None else "gloo",
        "torch": torch.__version__,
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "cores": cores(),
    }


def _problems(machines: list[dict[str, Any]], checks: list[PipelineCheck]) -> list[str]:
    problems = []
    versions = sorted({machine["torch"] for machine in machines})
    if len(versions) > 1:
        problems.append(f"the ranks have different versions of PyTorch ({', '.join(versions)}): install the same")
    kinds = {(m["device"].split(", ", 1)[-1], m["processor"], m["threads"]) for m in machines}
    for check in checks:
        kind = "with CUDA graphs" if check.captured else "without CUDA graphs"
        if check.difference is not None:
            hint = "report it with this output"
            if len(kinds) > 1:
                hint = "the ranks have different processors, GPUs or numbers of threads, which compute other bits"
            problems.append(f"the pipeline {kind} differs from one process ({check.difference}): {hint}")
        if check.captured and check.captured_ticks == 0:
            why = check.reason or f"{check.ticks} ticks are too few: give more --ticks"
            problems.append(f"no tick was captured ({why})")
    return problems


def _as_text(
    machines: list[dict[str, Any]], links: list[LinkSpeed], checks: list[PipelineCheck], problems: list[str]
) -> str:
    names = ("host", "device", "backend", "torch", "threads", "cores")
    ranks = [[str(rank), *(str(machine[name]) for name in names)] for rank, machine in enumerate(machines)]
    speeds = [[f"{s.source} to {s.to}", f"{1e6 * s.latency:.0f} µs", f"{s.bandwidth / 1e9:.2f} GB/s"] for s in links]
    pipelines = [
        [
            "with CUDA graphs" if check.captured else "without CUDA graphs",
            f"{check.captured_ticks} of {check.ticks}" if check.captured else "",
            f"{check.milliseconds:.1f} ms",
            "no" if check.difference else "yes",
        ]
        for check in checks
    ]
    parts = [
        render(["rank", *names], ranks, left=7),
        render(["link", "latency", "bandwidth"], speeds, left=1),
        "to plan for the slowest of these links: petra plan "
        f"--latency {1e3 * max(s.latency for s in links):.3g} --bandwidth {8e-9 * min(s.bandwidth for s in links):.3g}",
        render(["small pipeline", "captured ticks", "per tick", "same bits as one process"], pipelines, left=1),
        "\n".join(f"PROBLEM: {problem}" for problem in problems) or "No problem was found.",
    ]
    return "\n\n".join(parts)


def _as_json(
    machines: list[dict[str, Any]], links: list[LinkSpeed], checks: list[PipelineCheck], problems: list[str]
) -> str:
    found = {"ranks": machines, "links": [asdict(s) for s in links], "pipelines": [asdict(c) for c in checks]}
    return json.dumps({**found, "problems": problems}, indent=2)
