"""Measures time and peak memory of a training step."""

from __future__ import annotations

import gc
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.autograd.profiler import profile

from petra.cudagraph.graph_capture import CudaGraphCapture
from petra.formatting import first_line

Step = Callable[[], object]
_SECONDS, _REPEATS = 0.6, 8


@dataclass(frozen=True)
class StepCost:
    """The time and peak memory of a training step."""

    seconds: float
    """The time of the fastest of a few steps."""
    peak: int
    """The most bytes allocated at the same time, with weights, gradients and optimizer state."""


def measure_step(
    step: Step, device: torch.device, allocated: Callable[[], int], capture: bool = False
) -> StepCost | None:
    """Measure a training step.

    Args:
        step: One training step.
        device: The device that it runs on.
        allocated: Returns the bytes that are allocated between steps. Used on a CPU only: a GPU's allocator counts.
        capture: Measure the time of the step as a CUDA graph, if it can be captured as one.

    Returns:
        Its cost; None if there was not enough memory on the device.
    """
    try:
        for _ in range(2):  # compilers, libraries that choose kernels, and optimizer state
            step()
        return _on_gpu(step, device, capture) if device.type == "cuda" else _on_cpu(step, allocated())
    except torch.OutOfMemoryError:
        return None
    finally:
        if device.type == "cuda":
            gc.collect()
            torch._C._cuda_clearCublasWorkspaces()  # one for each CUDA stream, also for those of captures
            torch.cuda.empty_cache()


def _on_gpu(step: Step, device: torch.device, capture: bool) -> StepCost:
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    launch = _captured(step, device) if capture else step

    def timed() -> float:
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        launch()
        torch.cuda.synchronize(device)
        return time.perf_counter() - began

    # The time of a graph does not depend on the host.
    return StepCost(_repeated(timed, _REPEATS if launch is step else _REPEATS // 2), peak)


def _captured(step: Step, device: torch.device) -> Step:
    """Return the launch of a step as a CUDA graph, or the step itself if it cannot be captured."""
    torch.cuda.empty_cache()  # a graph has memory of its own
    try:
        return CudaGraphCapture(device).capture(step)
    except Exception as error:  # a capture can fail in any operation; the step has not been changed
        warnings.warn(f"the step is timed as it is, because it cannot be captured ({first_line(error)})", stacklevel=2)
        return step


def _on_cpu(step: Step, allocated: int) -> StepCost:
    def timed() -> float:
        began = time.perf_counter()
        step()
        return time.perf_counter() - began

    return StepCost(_repeated(timed), allocated + cpu_peak(step))


def _repeated(timed: Callable[[], float], repeats: int = _REPEATS) -> float:
    """Return the shortest of several times, because other programs can only make a step slower."""
    seconds = [timed()]
    while len(seconds) < repeats and sum(seconds) < _SECONDS:
        seconds.append(timed())
    return min(seconds)


def cpu_peak(step: Step) -> int:
    """Return the largest growth of the memory of PyTorch's CPU allocator during a step.

    Args:
        step: A function.

    Returns:
        The bytes, from the events that the allocator reports to the profiler.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would print when it starts and stops
    with profile(profile_memory=True) as profiled:
        step()
    results: Any = profiled.kineto_results
    events = [e for e in results.events() if e.name() == "[memory]" and e.device_type() == DeviceType.CPU]
    total = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        total += event.nbytes()
        peak = max(peak, total)
    return peak
