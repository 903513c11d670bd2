"""Counts the floating-point operations that PyTorch really does, so also those of recomputation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry


class FlopCount(TorchDispatchMode):
    """Adds up the operations of matrix products and convolutions while it is entered, backward included."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if (count := flop_registry.get(func._overloadpacket)) is not None:
            self.total += count(*args, **(kwargs or {}), out_val=result)
        return result


def count_flops(work: Callable[[], Any]) -> int:
    """Return the floating-point operations of a call."""
    with FlopCount() as count:
        work()
    return count.total
