"""One way of training one network, timed and weighed."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

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
    """Seconds of a step (median, smallest, largest) and the most bytes that were allocated during one."""

    seconds: float
    fastest: float
    slowest: float
    peak: int
    parameters: int


def build(model: str, way: str, **options: Any) -> petra.Network:
    """The network of a way: the plain twin or the reversible one, compiled and captured as asked."""
    kind, *extras = way.split("+")
    if kind not in CONTEXTS or set(extras) - {"compile", "capture"}:
        raise SystemExit(f"there is no way {way!r}: join one of {', '.join(CONTEXTS)} with +compile and +capture")
    torch.manual_seed(0)
    network = petra.models.create(model.removeprefix("rev-") if kind == "twin" else model, **options)
    if "compile" in extras:
        network.compile_functions()
    if "capture" in extras:
        network.capture()
    return network


def measure(
    network: petra.Network,
    way: str,
    x: Tensor,
    y: Tensor,
    *,
    precision: str,
    steps: int,
    warm_up: int = 4,
    keep_gradients: bool = False,
) -> Measured:
    """Train ``network`` on one batch, ``steps`` times; with ``keep_gradients`` their memory is never given back."""
    device = x.device
    network = network.to(device)
    optimizer = torch.optim.AdamW(network.parameters(), 1e-4, fused=device.type == "cuda")
    going = CONTEXTS[way.split("+")[0]]

    def step() -> None:
        with going(), torch.autocast(device.type, torch.bfloat16, enabled=precision == "amp"):
            loss = nn.functional.cross_entropy(network(x).flatten(0, -2), y.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=not keep_gradients)

    for _ in range(warm_up):
        step()
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        step()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    parameters = sum(p.numel() for p in network.parameters())
    return Measured(statistics.median(seconds), min(seconds), max(seconds), peak, parameters)


def images(batch: int, size: int, device: str) -> tuple[Tensor, Tensor]:
    """A batch of random images and labels."""
    return torch.randn(batch, 3, size, size, device=device), torch.randint(1000, (batch,), device=device)


def tokens(batch: int, length: int, device: str) -> tuple[Tensor, Tensor]:
    """A batch of random tokens and labels."""
    return torch.randint(4, 50000, (batch, length), device=device), torch.randint(2, (batch,), device=device)


def fits(attempt: Callable[[], Measured]) -> Measured | None:
    """What was measured, or None if memory was too small for it."""
    try:
        return attempt()
    except torch.OutOfMemoryError:
        return None
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
