"""Random state of the devices in use: saved, restored, and set for repeatable evaluations.

A CUDA graph cannot read or write the random state. So while one is captured, there is nothing to save and restore, and
only layers that draw no random numbers can be evaluated again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from weakref import WeakSet

import torch
from torch import Tensor, nn

_repeatable: WeakSet[nn.Module] = WeakSet()
"""Modules that drew no random numbers in their last evaluation."""


def capturing(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def generators(device: torch.device) -> list[torch.Generator]:
    """Return the default generators that modules on `device` may draw from: the CPU's and the device's."""
    found = [torch.default_generator]
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        index = torch.cuda.current_device() if device.index is None else device.index
        found.append(torch.cuda.default_generators[index])
    return found


def random_state(device: torch.device) -> list[Tensor]:
    """Return the state of all `generators` of the device, for `restore_random_state`; empty during a capture."""
    if capturing(device):
        return []
    return [generator.get_state() for generator in generators(device)]


def restore_random_state(device: torch.device, state: list[Tensor]) -> None:
    """Set all generators of the device to a state that `random_state` returned."""
    for generator, saved in zip(generators(device), state, strict=True) if state else ():
        generator.set_state(saved)


def note_draws(modules: Iterable[nn.Module], device: torch.device, before: list[Tensor]) -> bool:
    """Remember whether an evaluation has drawn random numbers; in a capture, check that earlier ones have not.

    Args:
        modules: What was evaluated.
        device: The device.
        before: The `random_state` before the evaluation; empty in a capture.

    Returns:
        True if it has.

    Raises:
        RuntimeError: If a graph is being captured, and the modules drew random numbers before or were not evaluated.
    """
    if not before:
        if not _repeatable.issuperset(modules):
            raise RuntimeError(
                "layers that are evaluated again in the backward pass cannot be captured in a CUDA graph if they draw "
                "random numbers (dropout, stochastic depth): set their rates to 0, or store their activations. "
                "Make a few steps before the capture, so that this is known"
            )
        return False
    draws = any(not a.equal(b) for a, b in zip(before, random_state(device), strict=True))
    if draws:
        _repeatable.difference_update(modules)
    else:
        _repeatable.update(modules)
    return draws


@contextmanager
def forked(device: torch.device) -> Iterator[None]:
    """Restore the caller's random state on exit, whatever is drawn or seeded inside."""
    state = random_state(device)
    try:
        yield
    finally:
        restore_random_state(device, state)


def derived_seed(*key: int) -> int:
    """Return a seed that is a fixed function of `key`, the same in every process and on every machine."""
    text = "/".join(map(str, key))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed all generators that modules on `device` may draw from."""
    for generator in generators(device):
        generator.manual_seed(seed)
