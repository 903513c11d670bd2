"""Sends states, which are tensors in dictionaries and lists, from one process to another."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only


@dataclass(frozen=True)
class Ring:
    """The channels of a process to its neighbours, for threads of their own."""

    to: StateChannel
    """The channel to the one neighbour."""
    source: StateChannel
    """The channel from the other neighbour."""
    close: Callable[[], None]
    """Ends both channels, also for threads that wait for a neighbour."""


class StateChannel:
    """One direction between two processes.

    Args:
        transfer: Sends or receives a flat tensor.
    """

    def __init__(self, transfer: Callable[[Tensor], None]) -> None:
        self._transfer = transfer

    def send(self, state: Any) -> None:
        """Send a state whose tensors are in host memory; nobody may write into them meanwhile."""
        structure = io.BytesIO()
        tensors = [t for t in tree_leaves(state) if isinstance(t, Tensor)]
        outline = {"state": tree_map_only(Tensor, _outline, state), "strides": [t.stride() for t in tensors]}
        torch.save(outline, structure)
        content = torch.frombuffer(bytearray(structure.getvalue()), dtype=torch.uint8)
        self._transfer(torch.tensor([content.numel()]))
        self._transfer(content)
        for tensor in tensors:
            if tensor.numel():
                self._transfer(_flat(tensor))

    def receive(self) -> Any:
        """Receive a state.

        Returns:
            The state, in host memory.
        """
        size = torch.zeros(1, dtype=torch.int64)
        self._transfer(size)
        content = torch.empty(int(size), dtype=torch.uint8)
        self._transfer(content)
        outline = torch.load(io.BytesIO(content.numpy().tobytes()), weights_only=True)
        strides = iter(outline["strides"])
        state = tree_map_only(
            Tensor, lambda t: torch.empty_strided(t.shape, next(strides), dtype=t.dtype), outline["state"]
        )
        for tensor in tree_leaves(state):
            if isinstance(tensor, Tensor) and tensor.numel():
                self._transfer(_flat(tensor))
        return state


def _outline(tensor: Tensor) -> Tensor:
    """Return a tensor of one number with the shape and dtype of another."""
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


def _flat(tensor: Tensor) -> Tensor:
    """Return the memory of a dense tensor as bytes."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
