"""An exponential moving average of the weights of a stage."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverage:
    """The exponential moving average (EMA) of the weights and running statistics of a stage.

    After every update of the stage, a ← d·a + (1 - d)·θ. It begins with the weights at its creation.

    Args:
        decay: d, from 0 to below 1.
        network: The module that has the weights.
        names: The names of the weights and buffers of the stage in its `state_dict()`.
    """

    def __init__(self, decay: float, network: nn.Module, names: Container[str]) -> None:
        self.decay = decay
        self._owners: list[tuple[dict[str, Tensor | None], str]] = []  # where each tensor is registered
        self._names: dict[str, int] = {}  # names in the network; shared weights have several
        known: dict[int, int] = {}
        for prefix, module in network.named_modules(remove_duplicate=False):
            for register in (module._parameters, module._buffers):
                for name, tensor in register.items():
                    full = f"{prefix}.{name}" if prefix else name
                    if full not in names or tensor is None or not tensor.is_floating_point():
                        continue
                    if id(tensor) not in known:
                        known[id(tensor)] = len(self._owners)
                        self._owners.append((register, name))
                    self._names[full] = known[id(tensor)]
        self.averages: list[Tensor] = []
        """The average of every tensor."""
        self.reset()

    def reset(self) -> None:
        """Begin again with the current weights."""
        self.averages = [tensor.detach().clone() for tensor in self._current()]

    @torch.no_grad()
    def update(self) -> None:
        """Take the current weights into account."""
        if self.averages:
            torch._foreach_lerp_(self.averages, [t.detach() for t in self._current()], 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the modules the averaged weights inside a `with` block."""
        tensors = self._current()
        own = [tensor.data for tensor in tensors]
        for tensor, average in zip(tensors, self.averages, strict=True):
            tensor.data = average
        try:
            yield
        finally:
            for tensor, value in zip(tensors, own, strict=True):
                tensor.data = value

    def state_dict(self) -> dict[str, Tensor]:
        """Return the averages by name.

        Returns:
            A dictionary for `load_state_dict`.
        """
        return {name: self.averages[index] for name, index in self._names.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from averages; tensors without one begin with their current value.

        Args:
            state: Averages by name.
        """
        self.reset()
        for name, index in self._names.items():
            if name in state:
                self.averages[index].copy_(state[name])

    def _current(self) -> list[Tensor]:
        found = [register[name] for register, name in self._owners]
        return [tensor for tensor in found if tensor is not None]
