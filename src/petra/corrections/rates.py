"""Learning rates as updates use them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def rate_of(group: dict[str, Any], factor: float = 1.0) -> float | Tensor:
    """The learning rate of a group times ``factor``; of a fused optimizer on a GPU, as a number in float32.

    A replayed update reads it from memory in float32, and others have to do the same to the last bit.
    """
    rate: float | Tensor = group["lr"] if factor == 1 else group["lr"] * factor
    if isinstance(rate, Tensor) or not (group.get("fused") and any(p.is_cuda for p in group["params"][:1])):
        return rate
    return float(torch.tensor(rate, dtype=torch.float32))


@contextmanager
def rates(optimizer: torch.optim.Optimizer, factor: float = 1.0) -> Iterator[None]:
    """Inside, the optimizer has the learning rates of `rate_of`."""
    kept = [(group, group["lr"]) for group in optimizer.param_groups if "lr" in group]
    try:
        for group, _ in kept:
            group["lr"] = rate_of(group, factor)
        yield
    finally:
        for group, lr in kept:
            group["lr"] = lr  # the very one: schedulers go on from it
