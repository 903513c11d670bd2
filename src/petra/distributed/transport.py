"""Communication between ranks: the interface, and a transport for a single process.

`process_transport.py` connects processes, `thread_transport.py` threads of one process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from petra.pipeline.activity import Activity
from petra.pipeline.message_layout import MessageLayout, PackedMessage, Template
from petra.schedule import Action

Request = tuple[int, Action, MessageLayout]
"""A receive: the sending rank, the action and the layout of the message."""


class PendingReceive(Protocol):
    """A message that was sent to this rank, or will be."""

    def __call__(self) -> Template:
        """Wait for the message; return its tensors."""

    def copy_into(self, memory: Tensor) -> None:
        """Wait for the message, and copy its bytes into memory on the device.

        Args:
            memory: A vector of bytes in the layout of the message.
        """


@dataclass(frozen=True)
class RankPosition:
    """The position of a process: its rank in the pipeline, and the replica of the pipeline."""

    rank: int = 0
    """Which part of the pipeline it holds."""
    ranks: int = 1
    """The number of ranks of a pipeline."""
    replica: int = 0
    """Which replica of the pipeline it belongs to."""
    replicas: int = 1
    """The number of replicas."""

    @property
    def is_main(self) -> bool:
        """True if this is the main process, which holds the loss and does what is done once per job."""
        return self.rank == self.ranks - 1 and self.replica == 0

    def __str__(self) -> str:
        return f"rank {self.rank}" + (f" of replica {self.replica}" if self.replicas > 1 else "")


class Transport(ABC):
    """Ordered channels between the ranks of a pipeline, and collective operations among all processes.

    Args:
        position: The position of this process.
        device: The device of the tensors that are received.
    """

    def __init__(self, position: RankPosition, device: torch.device | str) -> None:
        self.position = position
        self.device = torch.device(device)
        self.activity = Activity()
        """The current activity of this process, for the watchdog and for error messages."""
        self.sent = Counter[tuple[int, str]]()
        """Bytes of tensors sent, by receiving rank and kind of action ("F" or "B")."""
        self.latency = 0
        """The ticks after which all processes have taken part in an asynchronous operation."""
        self.max_unsent_ticks = 2
        """The number of ticks, with the current one, whose messages may not have left yet; more over slow links."""

    def connect(self, pairs: Sequence[tuple[int, int]]) -> None:  # noqa: B027 - optional
        """Open the channels that are not open yet. All processes call it with the same pairs.

        Args:
            pairs: The sending and the receiving rank of each channel.
        """

    @abstractmethod
    def send(self, to: int, action: Action, tensors: Template) -> None:
        """Send a message without waiting for its receiver. Nobody may write into its tensors afterwards.

        Args:
            to: The receiving rank.
            action: The action that the message results from.
            tensors: The content.
        """

    @abstractmethod
    def send_packed(self, to: int, action: Action, message: PackedMessage) -> None:
        """Send a message whose memory may be overwritten after the call.

        Args:
            to: The receiving rank.
            action: The action that the message results from.
            message: The content.
        """

    @abstractmethod
    def receive(self, source: int, action: Action, layout: MessageLayout) -> PendingReceive:
        """Post the receive of the next message from a rank.

        Args:
            source: The sending rank.
            action: The action that the message results from.
            layout: The shapes and dtypes of the content.

        Returns:
            The message, to wait for.
        """

    def receive_all(self, requests: Sequence[Request]) -> list[PendingReceive]:
        """Post several receives.

        Args:
            requests: The arguments of `receive` for each of them.

        Returns:
            The messages, to wait for.
        """
        return [self.receive(*request) for request in requests]

    def begin_tick(self) -> None:  # noqa: B027 - optional
        """Start a new tick: wait until the messages that were sent `max_unsent_ticks` ticks ago have left."""

    def flush(self) -> None:  # noqa: B027 - optional
        """Wait until all messages that were sent have left."""

    @abstractmethod
    def gather(self, value: Any) -> list[Any]:
        """Collect a value from every process on every process. All processes call it.

        Args:
            value: The value of this process, which JSON can represent.

        Returns:
            The values of all processes, in the order of `positions`.
        """

    @abstractmethod
    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its mean over the replicas of this rank.

        Args:
            tensors: The tensors, of the same shapes on all replicas.
        """

    @abstractmethod
    def gather_to_main(self, source: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy the tensors of one rank to the main process. All processes call it.

        Args:
            source: The rank whose tensors are copied.
            tensors: The tensors of this process; those of other ranks than `source` are ignored.

        Returns:
            Copies in host memory on the main process, nothing on the others.
        """

    def move_state(self, state: Any, source: int, to: int) -> Any:
        """Copy a state from one process to another. All processes call it.

        Args:
            state: The state, in host memory; used in the process that sends it.
            source: The number of the process that sends.
            to: The number of the process that receives.

        Returns:
            The state in the process that receives, None in the others.
        """
        raise AssertionError("there is no other process")

    def maximum_async(self, values: Sequence[float]) -> Callable[[], list[float]]:
        """Start to find the largest of the values of all processes. All processes call it in the same tick.

        Args:
            values: The values of this process.

        Returns:
            A function that waits, and returns the maximum of each of the values.
        """
        result = [max(column) for column in zip(*self.gather(list(values)), strict=True)]
        return lambda: result

    def gather_norms(self, norms: dict[int, Any]) -> dict[int, Any]:
        """Return the squared gradient norms of all stages; for `petra.pipeline.GlobalClipping`.

        Args:
            norms: Those of the stages of this process.

        Returns:
            Those of all stages of this replica.
        """
        gathered = self.gather({str(stage): float(norm) for stage, norm in norms.items()})
        own = gathered[self.position.replica :: self.position.replicas]
        return {int(stage): norm for found in own for stage, norm in found.items()}

    def send_norms(self, norms: Sequence[Any]) -> Callable[[], list[float]]:
        """Start to combine squared gradient norms; for `petra.pipeline.GlobalClipping`.

        Args:
            norms: One for every stage, 0 for those of other ranks.

        Returns:
            A function that waits for those of all stages.
        """
        return self.maximum_async([float(norm) for norm in norms])

    def total(self, values: Sequence[float]) -> list[float]:
        """Sum values over all processes.

        Args:
            values: The values of this process.

        Returns:
            The sum for each of the values.
        """
        return [sum(column) for column in zip(*self.gather(list(values)), strict=True)]

    def check_agreement(self, identity: dict[str, Any]) -> None:
        """Check that all processes were started with the same options.

        Args:
            identity: Values that must be equal on all processes, by name.

        Raises:
            ValueError: On every process, if a value differs.
        """
        gathered = self.gather(identity)
        for index, other in enumerate(gathered):
            for name, value in gathered[0].items():
                if other.get(name) != value:
                    raise ValueError(
                        f"{self.positions()[index]} has {name} {other.get(name)}, rank 0 has {value}: "
                        "start every rank with the same network, weights and options"
                    )

    @contextmanager
    def raise_on_all_ranks(self) -> Iterator[None]:
        """Raise an error of one process on all of them, so that none continues without it.

        All processes enter this context. Its exit is a collective operation.

        Raises:
            ValueError: If another process raised one in the context, with the same message.
            RuntimeError: If another process raised any other exception, with the same message.
        """
        own: Exception | None = None
        try:
            yield
        except Exception as error:
            own = error
        errors = self.gather(None if own is None else [isinstance(own, ValueError), str(own)])
        if own is not None:
            raise own
        for is_value_error, text in filter(None, errors):
            raise ValueError(text) if is_value_error else RuntimeError(text)

    def positions(self) -> list[RankPosition]:
        """Return the positions of all processes.

        Returns:
            The positions, rank by rank and the replicas of each rank in order.
        """
        ranks, replicas = self.position.ranks, self.position.replicas
        return [RankPosition(rank, ranks, replica, replicas) for rank in range(ranks) for replica in range(replicas)]

    def _process(self, rank: int) -> int:
        """Return the number of the process that is a rank of this replica."""
        return rank * self.position.replicas + self.position.replica


class SingleProcess(Transport):
    """The transport of a process that runs the whole pipeline.

    Args:
        device: The device of the network.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        super().__init__(RankPosition(), device)

    def send(self, to: int, action: Action, tensors: Template) -> None:
        raise AssertionError("there is no other rank")

    def send_packed(self, to: int, action: Action, message: PackedMessage) -> None:
        raise AssertionError("there is no other rank")

    def receive(self, source: int, action: Action, layout: MessageLayout) -> PendingReceive:
        raise AssertionError("there is no other rank")

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def average(self, tensors: Sequence[Tensor]) -> None:
        pass

    def gather_to_main(self, source: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return host_copies(tensors)


def host_copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return contiguous copies in host memory."""
    return {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}


def make_buckets(tensors: Sequence[Tensor], size: int = 2**23) -> list[list[Tensor]]:
    """Group tensors, in order, into buckets of one dtype and about ``size`` elements."""
    buckets: list[list[Tensor]] = []
    open_buckets: dict[torch.dtype, tuple[list[Tensor], int]] = {}  # with their elements so far
    for tensor in tensors:
        bucket, elements = open_buckets.get(tensor.dtype, ([], size))
        if elements >= size:
            bucket, elements = [], 0
            buckets.append(bucket)
        bucket.append(tensor)
        open_buckets[tensor.dtype] = bucket, elements + tensor.numel()
    return buckets


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors into one vector."""
    return torch.cat([t.reshape(-1) for t in tensors])


def unflatten_into(vector: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy a vector from `flatten` back into the tensors."""
    for tensor, part in zip(tensors, torch.split(vector, [t.numel() for t in tensors]), strict=True):
        tensor.copy_(part.view_as(tensor))
