"""Lets normalisation layers use batch statistics without touching their running statistics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from petra.reversible.modules import submodules

_NAMES = ("running_mean", "running_var", "num_batches_tracked")


def normalisations(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The batch and instance norms inside the modules that keep running statistics, each once."""
    return [m for m in submodules(modules) if isinstance(m, _NormBase) and m.running_mean is not None]


def modes(modules: Iterable[nn.Module]) -> dict[nn.Module, bool]:
    """Which of the modules and their parts are in training mode."""
    return {m: m.training for m in submodules(modules)}


@contextmanager
def in_modes(modes: Mapping[nn.Module, bool]) -> Iterator[None]:
    """Inside, modules are in the modes that `modes` has found, whatever they were switched to since."""
    changed = [m for m, training in modes.items() if m.training != training]
    for module in changed:
        module.training = not module.training
    try:
        yield
    finally:
        for module in changed:
            module.training = not module.training


@contextmanager
def frozen_statistics(norms: Iterable[nn.Module]) -> Iterator[None]:
    """Training-mode norms normalise with the batch as always, and leave their running statistics alone.

    A micro-batch passes a layer twice, forward and when it is recomputed; its statistics count once.
    """
    taken = []
    for norm in norms:
        if norm.training:
            taken.append((norm, {name: norm._buffers[name] for name in _NAMES}))
            norm._buffers.update(dict.fromkeys(_NAMES))
    try:
        yield
    finally:
        for norm, buffers in taken:
            norm._buffers.update(buffers)
