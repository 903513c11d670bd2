"""Random state of the devices in use: saved, restored, and set for repeatable evaluations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import torch
from torch import Tensor


def generators(device: torch.device) -> list[torch.Generator]:
    """Return the default generators that modules on `device` may draw from: the CPU's and the device's."""
    found = [torch.default_generator]
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]
        index = torch.cuda.current_device() if device.index is None else device.index
        found.append(torch.cuda.default_generators[index])
    return found


def random_state(device: torch.device) -> list[Tensor]:
    """Return the state of all `generators` of the device, for `restore_random_state`."""
    return [generator.get_state() for generator in generators(device)]


def restore_random_state(device: torch.device, state: list[Tensor]) -> None:
    """Set all generators of the device to a state that `random_state` returned."""
    for generator, saved in zip(generators(device), state, strict=True):
        generator.set_state(saved)


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
