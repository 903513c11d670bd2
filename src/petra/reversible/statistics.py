"""Lets normalisation layers use batch statistics without touching their running statistics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

_NAMES = ("running_mean", "running_var", "num_batches_tracked")


def normalisations(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The batch and instance norms inside the modules that keep running statistics, each once."""
    found = dict.fromkeys(m for module in modules for m in module.modules())
    return [m for m in found if isinstance(m, _NormBase) and m.running_mean is not None]


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
