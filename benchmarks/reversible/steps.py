"""Time and memory of one way to train one network."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import petra

CONTEXTS: dict[str, Callable[[], Any]] = {
    "twin": nullcontext,
    "backprop": petra.plain_autograd,
    "reversible": nullcontext,
    "pareprop": petra.pareprop,
}


@dataclass
class Measured:
    """Seconds of a step (median, smallest, largest) and its peak memory in bytes.

    `peak` counts the allocator's blocks, `asked` the requested bytes, which are slightly fewer.
    """

    seconds: float
    fastest: float
    slowest: float
    peak: int
    asked: int
    parameters: int


def build(model: str, way: str, **options: Any) -> petra.Network:
    """Return the network of a way: the plain twin or the reversible network, compiled and captured if requested."""
    kind, *extras = way.split("+")
    if kind not in CONTEXTS or set(extras) - {"compile", "cuda-graph"}:
        raise SystemExit(f"{way!r} is not a way: combine one of {', '.join(CONTEXTS)} with +compile and +cuda-graph")
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):  # a CPU is slow at the random weights of large networks
        network = petra.models.create(model.removeprefix("rev-") if kind == "twin" else model, **options)
    if "compile" in extras:
        network.compile_functions()
    if "cuda-graph" in extras:
        network.use_cuda_graphs()
    return network


class Training:
    """Trains a network on one batch, step by step."""

    def __init__(self, network: petra.Network, x: Tensor, y: Tensor, precision: str) -> None:
        self.network, self.x, self.y = network.to(x.device), x, y
        self.device, self.amp = x.device, precision == "amp"
        self.optimizer = torch.optim.AdamW(network.parameters(), 1e-4, fused=x.is_cuda)

    def step(self, way: str) -> None:
        with CONTEXTS[way.split("+")[0]](), torch.autocast(self.device.type, torch.bfloat16, enabled=self.amp):
            loss = nn.functional.cross_entropy(self.network(self.x).flatten(0, -2), self.y.flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def timed(self, way: str) -> float:
        """Return the seconds of one step."""
        self.wait()
        began = time.perf_counter()
        self.step(way)
        self.wait()
        return time.perf_counter() - began

    def wait(self) -> None:
        """Wait for the GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def measure(training: Training, way: str, steps: int, warm_up: int = 4) -> Measured:
    """Measure `steps` steps after some to warm up."""
    for _ in range(warm_up):
        training.step(way)
    training.wait()
    on_gpu = training.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = [training.timed(way) for _ in range(steps)]
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    asked = torch.cuda.memory_stats()["requested_bytes.all.peak"] if on_gpu else 0
    parameters = sum(p.numel() for p in training.network.parameters())
    return Measured(statistics.median(seconds), min(seconds), max(seconds), peak, asked, parameters)


def images(batch: int, size: int, device: str) -> tuple[Tensor, Tensor]:
    """Return a batch of random images and labels."""
    return torch.randn(batch, 3, size, size, device=device), torch.randint(1000, (batch,), device=device)


def tokens(batch: int, seq_len: int, device: str) -> tuple[Tensor, Tensor]:
    """Return a batch of random tokens and labels."""
    return torch.randint(4, 50000, (batch, seq_len), device=device), torch.randint(2, (batch,), device=device)


T = TypeVar("T")


def fits(attempt: Callable[[], T]) -> T | None:
    """Return the measurement, or None if it does not fit into memory."""
    try:
        return attempt()
    except torch.OutOfMemoryError:
        return None
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
