"""How one rank talks to the others. Processes and threads do it in their own ways (`processes`, `threads`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from petra.execution.envelope import Template
from petra.schedule import Action

Arrival = Callable[[], Template]
"""Waits for a message and returns it."""


@dataclass(frozen=True)
class Place:
    """Where a rank stands: which part of the pipeline it holds, and in which of its replicas."""

    rank: int = 0
    ranks: int = 1
    replica: int = 0
    replicas: int = 1

    @property
    def speaks(self) -> bool:
        """Whether this is the one that does what has to be done once: it sees the loss."""
        return self.rank == self.ranks - 1 and self.replica == 0

    def __str__(self) -> str:
        return f"rank {self.rank}" + (f" of replica {self.replica}" if self.replicas > 1 else "")


@dataclass
class Doing:
    """What a rank is at, for whoever wants to know why it does not go on."""

    tick: int = 0
    what: str = "setting up"
    waits: bool = False
    """Whether it waits for another rank."""
    waiting_for: int | None = None
    """For which, if it is a certain one."""
    times: int = 0
    """Grows whenever something new begins."""
    set_up: bool = False
    """Whether the first action has begun."""

    def now(self, what: str, tick: int | None = None) -> None:
        """Something new begins."""
        self.what, self.waits, self.waiting_for, self.times = what, False, None, self.times + 1
        self.tick = self.tick if tick is None else tick

    @contextmanager
    def waiting(self, rank: int | None) -> Iterator[None]:
        """Inside, another rank is waited for, or all of them."""
        self.waits, self.waiting_for = True, rank
        yield  # an error leaves it as it is
        self.waits, self.waiting_for, self.times = False, None, self.times + 1


class Transport(ABC):
    """Ordered channels between the ranks of a pipeline, and a few words among all of them."""

    def __init__(self, place: Place, device: torch.device | str) -> None:
        self.place = place
        self.device = torch.device(device)
        self.doing = Doing()
        self.sent = Counter[tuple[int, str]]()
        """Bytes of tensors sent, by receiving rank and kind of action ("F" or "B")."""

    def connect(self, pairs: Sequence[tuple[int, int]]) -> None:  # noqa: B027 - not every transport has to
        """Open the channels from one rank to another that are not open yet. All processes call it with the same."""

    @abstractmethod
    def send(self, to: int, label: Action, tensors: Template) -> None:
        """Hand over the message that comes from ``label``; nobody may write into the tensors afterwards."""

    @abstractmethod
    def receive(self, source: int, label: Action, template: Template) -> Arrival:
        """Make room for the next message from ``source``: that of ``label``, with the shapes of ``template``."""

    def turn(self) -> None:  # noqa: B027 - a transport that keeps nothing has nothing to do
        """A new tick begins: what was sent two ticks ago has arrived."""

    def flush(self) -> None:  # noqa: B027
        """Wait until everything that was handed over has left."""

    @abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """What every process gives, as plain JSON, on every process; ranks by replicas in order."""

    @abstractmethod
    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its mean over the replicas of this rank."""

    @abstractmethod
    def bring(self, source: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of what ``source`` gives, in the memory of the host, on the one that speaks; others get nothing.

        All processes call it; what those of other ranks give is not looked at.
        """

    def any_soon(self, flag: bool) -> bool:
        """Whether some process has said yes lately; all hear it in the same call. Called once a tick by all."""
        return any(self.gather(flag))

    def total(self, values: Sequence[float]) -> list[float]:
        """The sums over all processes."""
        return [sum(column) for column in zip(*self.gather(list(values)), strict=True)]

    def agree(self, identity: dict[str, Any]) -> None:
        """Raise ValueError on every rank unless all of them say the same."""
        said = self.gather(identity)
        for index, other in enumerate(said):
            for name, value in said[0].items():
                if other.get(name) != value:
                    raise ValueError(
                        f"{self.places()[index]} has {name} {other.get(name)}, rank 0 has {value}: "
                        "start every rank with the same network, weights and options"
                    )

    @contextmanager
    def refusing_together(self) -> Iterator[None]:
        """What one process raises inside, all of them raise in the same words, so that none goes on without it."""
        own: Exception | None = None
        try:
            yield
        except Exception as error:
            own = error
        said = self.gather(None if own is None else [isinstance(own, ValueError), str(own)])
        if own is not None:
            raise own
        for expected, text in filter(None, said):
            raise ValueError(text) if expected else RuntimeError(text)

    def places(self) -> list[Place]:
        """Those of all processes, in order."""
        ranks, replicas = self.place.ranks, self.place.replicas
        return [Place(rank, ranks, replica, replicas) for rank in range(ranks) for replica in range(replicas)]

    def _process(self, rank: int) -> int:
        """The number of the process that is a rank of this replica."""
        return rank * self.place.replicas + self.place.replica


class Alone(Transport):
    """The transport of a process that has no others to talk to."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        super().__init__(Place(), device)

    def send(self, to: int, label: Action, tensors: Template) -> None:
        raise AssertionError("there is no other rank")

    def receive(self, source: int, label: Action, template: Template) -> Arrival:
        raise AssertionError("there is no other rank")

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def average(self, tensors: Sequence[Tensor]) -> None:
        pass

    def bring(self, source: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return copies(tensors)


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in the memory of the host, in the order of their indices."""
    return {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}


def buckets(tensors: Sequence[Tensor], size: int = 2**23) -> list[list[Tensor]]:
    """The tensors in groups of one dtype and about ``size`` elements, in order."""
    groups: list[list[Tensor]] = []
    open_groups: dict[torch.dtype, tuple[list[Tensor], int]] = {}  # with their elements so far
    for tensor in tensors:
        group, elements = open_groups.get(tensor.dtype, ([], size))
        if elements >= size:
            group, elements = [], 0
            groups.append(group)
        group.append(tensor)
        open_groups[tensor.dtype] = group, elements + tensor.numel()
    return groups


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """One vector of all of them."""
    return torch.cat([t.reshape(-1) for t in tensors])


def spread(vector: Tensor, tensors: Sequence[Tensor]) -> None:
    """The reverse of `flat`, into the tensors."""
    for tensor, part in zip(tensors, torch.split(vector, [t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
