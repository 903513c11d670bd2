"""Which order a method's stages act in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Real

from petra.methods import Method
from petra.names import unknown
from petra.schedule import LockedForward, Order, Pipelined, lock_step, low_staleness

ORDERS: dict[str, Callable[[int, int], Order]] = {
    "low-staleness": low_staleness,
    "lock-step": lock_step,
    "locked-forward": LockedForward,
}
"""Orders of pipelined methods by name."""


def choose_order(method: Method, stages: int, accumulate: int, order: str | Sequence[int] | None) -> Order:
    """The order of a method: its own, or for pipelined ones the one that is asked for."""
    if order is None:
        return method.order(stages, accumulate)
    if not method.pipelined:
        raise ValueError(
            f"{method.name} has one order only: leave the order out, or choose a pipelined method such as petra"
        )
    if isinstance(order, str):
        if order not in ORDERS:
            raise unknown("order", order, ORDERS)
        return ORDERS[order](stages, accumulate)
    if isinstance(order, Real):
        raise ValueError(f"order is {order!r}: give a name, or the number in flight of each stage, like [3, 2, 1, 0]")
    if len(order) != stages:
        raise ValueError(f"order has {len(order)} numbers for {stages} stages: give one for each stage")
    return Pipelined(order, accumulate, "in-flight")
