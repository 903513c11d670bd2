"""One way of training one network, timed and weighed."""

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
    """Seconds of a step (median, smallest, largest) and the most bytes that were in use during one.

    ``peak`` counts blocks of the allocator, ``asked`` what was asked of it, which is a little less.
    """

    seconds: float
    fastest: float
    slowest: float
    peak: int
    asked: int
    parameters: int


def build(model: str, way: str, **options: Any) -> petra.Network:
    """The network of a way: the plain twin or the reversible one, compiled and captured as asked."""
    kind, *extras = way.split("+")
    if kind not in CONTEXTS or set(extras) - {"compile", "capture"}:
        raise SystemExit(f"there is no way {way!r}: join one of {', '.join(CONTEXTS)} with +compile and +capture")
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):  # a CPU takes long for the random weights of large networks
        network = petra.models.create(model.removeprefix("rev-") if kind == "twin" else model, **options)
    if "compile" in extras:
        network.compile_functions()
    if "capture" in extras:
        network.capture()
    return network


class Training:
    """A network that is trained on one batch, a step after the other."""

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
        """Seconds of one step."""
        self.wait()
        began = time.perf_counter()
        self.step(way)
        self.wait()
        return time.perf_counter() - began

    def wait(self) -> None:
        """For the GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def measure(training: Training, way: str, steps: int, warm_up: int = 4) -> Measured:
    """Take ``steps`` steps after some to warm up."""
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
    """A batch of random images and labels."""
    return torch.randn(batch, 3, size, size, device=device), torch.randint(1000, (batch,), device=device)


def tokens(batch: int, length: int, device: str) -> tuple[Tensor, Tensor]:
    """A batch of random tokens and labels."""
    return torch.randint(4, 50000, (batch, length), device=device), torch.randint(2, (batch,), device=device)


T = TypeVar("T")


def fits(attempt: Callable[[], T]) -> T | None:
    """What was measured, or None if memory was too small for it."""
    try:
        return attempt()
    except torch.OutOfMemoryError:
        return None
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
