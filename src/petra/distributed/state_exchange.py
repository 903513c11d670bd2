"""Sends packed states from one process to another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from petra.distributed.packed_state import HostMemory, PackedState

LARGEST = 2
"""The most states that are sent together."""
NONE = -1
"""Stands for the size of a state that is not sent."""


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

    def send(self, states: Sequence[PackedState]) -> None:
        """Send states; nobody may pack others into their memory meanwhile.

        Args:
            states: At most `LARGEST` states.
        """
        sizes = [size for state in states for size in (state.outline.numel(), state.data.numel())]
        self._transfer(torch.tensor(sizes + [NONE] * (2 * LARGEST - len(sizes))))
        self._transfer(torch.cat([state.outline for state in states]))
        for state in states:
            state.wait()
            if state.data.numel():
                self._transfer(state.data)

    def receive(self, memory: Sequence[HostMemory]) -> tuple[PackedState, ...]:
        """Receive states.

        Args:
            memory: Where to write their data, one for each.

        Returns:
            The states.
        """
        header = torch.full((2 * LARGEST,), NONE)
        self._transfer(header)
        sizes = [size for size in header.tolist() if size != NONE]
        outlines = torch.empty(sum(sizes[::2]), dtype=torch.uint8)
        self._transfer(outlines)
        states = []
        for outline, size, block in zip(torch.split(outlines, sizes[::2]), sizes[1::2], memory, strict=False):
            data = block.get(size)
            if size:
                self._transfer(data)
            states.append(PackedState(outline, data))
        return tuple(states)
