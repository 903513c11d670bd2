"""How messages travel between ranks: torch.distributed, gloo on CPU and NCCL on GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from petra.execution.templates import Template

Arrival = Callable[[], Template]
"""Waits for a message and returns it."""


class Transport:
    """Ordered channels between neighbouring ranks: what is sent first arrives first.

    There is a group of two ranks for each direction between two neighbours. Order is all that matches a message
    with its receiver, because NCCL knows no tags; a group of its own keeps the two directions from blocking
    each other.
    """

    def __init__(self, device: torch.device | str = "cpu", timeout: timedelta = timedelta(minutes=5)) -> None:
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._device = torch.device(device)
        self._groups: dict[tuple[int, int], dist.ProcessGroup] = {}
        for lower in range(self.world - 1):  # every rank has to make every group, in the same order
            for source, to in ((lower, lower + 1), (lower + 1, lower)):
                self._groups[source, to] = dist.new_group([lower, lower + 1], timeout=timeout)
        self._leaving: deque[tuple[dist.Work, Tensor]] = deque()  # a tensor lives until it has left

    def send(self, to: int, tensors: Template) -> None:
        """Hand a message over; it must not be written into afterwards."""
        while self._leaving and self._leaving[0][0].is_completed():
            self._leaving.popleft()[0].wait()
        for tensor in tensors:
            if tensor is not None:
                work = dist.isend(tensor, to, group=self._groups[self.rank, to])
                assert work is not None
                self._leaving.append((work, tensor))

    def receive(self, source: int, template: Template) -> Arrival:
        """Make room for the next message from ``source``, which has the shapes of ``template``."""
        buffers = tuple(None if t is None else torch.empty_like(t, device=self._device) for t in template)
        group = self._groups[source, self.rank]
        works = [dist.irecv(buffer, source, group=group) for buffer in buffers if buffer is not None]

        def arrive() -> Template:
            for work in works:
                assert work is not None
                work.wait()
            return buffers

        return arrive

    def flush(self) -> None:
        """Wait until everything that was handed over has left."""
        while self._leaving:
            self._leaving.popleft()[0].wait()

    def share(self, values: list[float], source: int) -> list[float]:
        """The values of rank ``source``, on every rank."""
        box = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.broadcast(box, source)
        return [float(value) for value in box]

    def agree(self, identity: str) -> None:
        """Raise ValueError on every rank unless all of them say the same."""
        said: list[str] = [""] * self.world
        dist.all_gather_object(said, identity)
        if len(set(said)) > 1:
            others = [rank for rank in range(self.world) if said[rank] != said[0]]
            raise ValueError(
                f"ranks {others} are not set up like rank 0: give every rank the same network, weights and options"
            )
