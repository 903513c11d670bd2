"""Detects layers that change their buffers more than once per micro-batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from petra.methods.segment import LayerError, version_of


class BufferGuard:
    """Raises if a layer updates a buffer in two evaluations of the same micro-batch.

    Methods that recompute evaluate a layer twice per micro-batch. Norms of torch.nn are evaluated with frozen
    statistics in one of the two. A module that counts its calls, or averages over them, would count every micro-batch
    twice.
    """

    def __init__(self, layers: Sequence[nn.Module], first: int, modules: Sequence[nn.Module]) -> None:
        self._layers = layers
        self._first = first  # index of the first layer in the network
        self._modules = modules  # modules with buffers, except norms
        self._changed: set[nn.Module] = set()  # modules that changed a buffer in a first evaluation

    @contextmanager
    def watch(self, first: bool = False, update_statistics: bool = True) -> Iterator[None]:
        """Raise `LayerError` if a layer changes its buffers inside, and did so in the first evaluation too.

        A layer that initializes its buffers from the first data and does not change them afterwards is accepted.

        Args:
            first: True for the first of two evaluations of a micro-batch. Changes are then remembered.
            update_statistics: False for an evaluation in addition to those of training; then no layer may change a
                buffer.
        """
        if not self._modules:
            yield
            return
        buffers = [(m, name, b) for m in self._modules for name, b in m._buffers.items() if b is not None]
        versions = [version_of(buffer) for _, _, buffer in buffers]
        yield
        changed = {
            module
            for (module, name, buffer), version in zip(buffers, versions, strict=True)
            if module._buffers.get(name) is not buffer or version_of(buffer) != version
        }
        for module in changed & self._changed if update_statistics else changed:
            raise self._error(module, update_statistics)
        self._changed |= changed if first else set()

    def _error(self, module: nn.Module, update_statistics: bool) -> LayerError:
        index, layer = next((i, x) for i, x in enumerate(self._layers, self._first) if module in x.modules())
        why, remedy = "this method runs it twice for each micro-batch", "train with backprop"
        if not update_statistics:
            why = "it has to run again, to measure gradients or to rebuild a graph that was in flight in a checkpoint"
            remedy = "do not measure gradients, and save checkpoints after drain()"
        return LayerError(
            f"layer {index} ({type(layer).__name__}) changes a buffer of its {type(module).__name__} whenever it "
            f"runs, and {why}: remove that module, derive norms from those of torch.nn, or {remedy}"
        )
