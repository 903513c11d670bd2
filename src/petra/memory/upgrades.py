"""An order in which layers get storages that are faster and need more memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Gain:
    """What another storage of one layer changes in a step, compared with the storage that needs the least memory."""

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
        gains: What each storage changes.

    Returns:
        Those on the upper concave envelope of seconds saved against bytes, by growing bytes. Whatever is not on it is
        beaten by a mixture of two that are.
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
        layers: For each layer, what its storages change.

    Returns:
        The upgrades. Any number of the first ones is a good choice for the memory that they need together.
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
