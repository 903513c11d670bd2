"""State of modules: their tensors, their training modes, and the running statistics of their norms.

These functions are called for all modules at every step, while a GPU may be waiting for the host, so they are written
for speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def submodules(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules and all their descendants, each once, in the order of `nn.Module.modules`."""
    found: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        if module not in found:
            found[module] = None
            for child in module._modules.values():
                if child is not None:
                    visit(child)

    for module in modules:
        visit(module)
    return list(found)


def held_tensors(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return the parameters and buffers of the modules and all their descendants."""
    held = (t for m in submodules(modules) for t in (*m._parameters.values(), *m._buffers.values()))
    return [tensor for tensor in held if tensor is not None]


def modes(modules: Iterable[nn.Module]) -> dict[nn.Module, bool]:
    """Return, for the modules and all their descendants, whether they are in training mode."""
    return {m: m.training for m in submodules(modules)}


@contextmanager
def in_modes(modes: Mapping[nn.Module, bool]) -> Iterator[None]:
    """Put the modules into the training modes that `modes` returned earlier; switch them back on exit."""
    changed = [m for m, training in modes.items() if m.training != training]
    for module in changed:
        module.training = not module.training
    try:
        yield
    finally:
        for module in changed:
            module.training = not module.training


def normalisations(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the batch and instance norms inside the modules that keep running statistics, each once."""
    return [m for m in submodules(modules) if isinstance(m, _NormBase) and m.running_mean is not None]


@contextmanager
def frozen_statistics(norms: Iterable[nn.Module]) -> Iterator[None]:
    """Let training-mode norms normalise with batch statistics without updating their running statistics.

    A micro-batch passes a layer twice, in the forward pass and when it is recomputed, but must be counted once.
    """
    with _other_statistics(norms, lambda buffer: None):
        yield


@contextmanager
def discarded_statistics(norms: Iterable[nn.Module]) -> Iterator[None]:
    """Let training-mode norms update copies of their running statistics.

    Unlike with `frozen_statistics`, autograd saves the same number of tensors as in an ordinary evaluation.
    """
    with _other_statistics(norms, lambda buffer: None if buffer is None else buffer.clone()):
        yield


@contextmanager
def _other_statistics(norms: Iterable[nn.Module], other: Callable[[Tensor | None], Tensor | None]) -> Iterator[None]:
    removed = []
    for norm in norms:
        if norm.training:
            removed.append((norm, {name: norm._buffers[name] for name in _STATISTICS}))
            norm._buffers.update({name: other(norm._buffers[name]) for name in _STATISTICS})
    try:
        yield
    finally:
        for norm, buffers in removed:
            norm._buffers.update(buffers)
