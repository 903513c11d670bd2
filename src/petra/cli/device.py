"""The device and the threads that a command computes with."""

from __future__ import annotations

import argparse
import os

import torch

from petra.distributed.job import world_size


def set_up_device(options: argparse.Namespace) -> torch.device:
    """Set threads and cuDNN as the options say, and return the device.

    Args:
        options: The parsed command line, with `device` and `threads`.

    Returns:
        The device; on several processes each has its own GPU if there are enough.

    Raises:
        ValueError: If there is no such device.
    """
    if options.threads is None and world_size() > 1:
        local = int(os.environ.get("LOCAL_WORLD_SIZE") or world_size())
        torch.set_num_threads(max(1, cores() // local))  # ranks share the cores
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    name = device_name(options)
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device is {name!r}: give cpu, cuda or cuda:0")
    if device.type == "cuda":
        if device.index is None and world_size() > 1 and torch.cuda.device_count():
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        if (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"--device is {name!r}, but there is no such GPU here: give cpu or another")
        if device.index is not None:
            torch.cuda.set_device(device)  # so that nothing is allocated on another GPU
        benchmark = getattr(options, "cudnn_benchmark", False)  # an option of training only
        torch.backends.cudnn.deterministic = not benchmark  # the same options give the same weights
        torch.backends.cudnn.benchmark = benchmark
    return device


def device_name(options: argparse.Namespace) -> str:
    """Return the name of the device: as given, or a GPU if there is one."""
    return str(options.device) if options.device is not None else "cuda" if torch.cuda.is_available() else "cpu"


def reject_cuda_graph(options: argparse.Namespace) -> None:
    """Raise ValueError if `--cuda-graph` is given where no graph can be captured: on a CPU."""
    if options.cuda_graph and not device_name(options).startswith("cuda"):
        raise ValueError(
            f"--cuda-graph captures CUDA graphs, and --device is {device_name(options)}: leave --cuda-graph out, or "
            "use a GPU"
        )


def reject_processes(what: str) -> None:
    """Raise ValueError if torchrun has started several processes, each of which would do all the work."""
    if world_size() > 1:
        raise ValueError(f"{world_size()} processes were started: {what}, so start it without torchrun")


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
