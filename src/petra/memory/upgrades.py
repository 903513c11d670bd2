"""The order in which layers get faster storages that need more memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Gain:
    """The gain of a step if one layer gets another storage than the one that needs the least memory."""

    bytes: float
    """The additional memory."""
    seconds: float
    """The time that is saved."""


@dataclass(frozen=True)
class Upgrade:
    """One layer gets another storage."""

    layer: int
    """The index of the layer."""
    storage: str
    """Its new storage."""
    rate: float
    """The seconds saved per byte."""


def frontier(gains: Mapping[str, Gain]) -> list[tuple[str, Gain]]:
    """Return the storages that are worth their memory.

    Args:
        gains: The gain of each storage.

    Returns:
        Those on the upper concave envelope of seconds saved against bytes, by increasing bytes. For any other storage,
        a combination of two on the envelope saves more time with the same memory.
    """
    found: list[tuple[str, Gain]] = []
    for name, gain in sorted(gains.items(), key=lambda item: (item[1].bytes, -item[1].seconds)):
        last = found[-1][1] if found else Gain(0.0, 0.0)
        if gain.seconds <= last.seconds:
            continue
        while found:
            before = found[-2][1] if len(found) > 1 else Gain(0.0, 0.0)
            if _rate(before, found[-1][1]) > _rate(found[-1][1], gain):
                break
            found.pop()
        found.append((name, gain))
    return found


def upgrades(layers: Sequence[Mapping[str, Gain]]) -> list[Upgrade]:
    """Return all upgrades, the one that saves the most time per byte first.

    Among equals, the last layers come first: what they store is freed before the gradients of the layers below them
    need memory.

    Args:
        layers: For each layer, the gains of its storages.

    Returns:
        The upgrades. For any n, the first n are a good choice for the memory that they need together.
    """
    found: list[Upgrade] = []
    for index, gains in enumerate(layers):
        before = Gain(0.0, 0.0)
        for name, gain in frontier(gains):
            found.append(Upgrade(index, name, _rate(before, gain)))
            before = gain
    return sorted(found, key=lambda upgrade: (-upgrade.rate, -upgrade.layer))


def _rate(before: Gain, after: Gain) -> float:
    more = after.bytes - before.bytes
    return (after.seconds - before.seconds) / more if more > 0 else float("inf")
