"""Ranks as threads of one process: for tests, and for reading checkpoints of several ranks.

Exactly one thread runs at any time, until it has to wait for another one. So each rank draws its own random numbers
from the generator that all of them share, and a deadlock is detected at once. Messages arrive as they do between
processes. Means over replicas may differ in the last bit, because they are summed in another order.
"""

from __future__ import annotations

import json
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from petra.distributed.host_message import BadMessage, HostMessage, ReceivedMessage
from petra.distributed.transport import (
    PendingReceive,
    RankPosition,
    Transport,
    flatten,
    host_copies,
    unflatten_into,
)
from petra.pipeline.message_layout import MessageLayout, PackedMessage, Template, layout_of
from petra.schedule import Action, Deadlock

T = TypeVar("T")


class CooperativeScheduler:
    """Lets one thread run at a time. A thread enters it for as long as it lives."""

    def __init__(self, threads: int) -> None:
        self._condition = threading.Condition()
        self._alive = threads
        self._waiting = 0
        self._deadlock = False

    def __enter__(self) -> None:
        self._condition.acquire()

    def __exit__(self, *_: object) -> None:
        self._alive -= 1
        self.notify()
        self._condition.release()

    def notify(self) -> None:
        """Make the waiting threads check again whether they can continue."""
        self._waiting = 0
        self._condition.notify_all()

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Let other threads run until ``ready()``; raise `Deadlock` if all threads wait."""
        while not ready():
            self._waiting += 1
            if self._waiting >= self._alive:
                self._deadlock = True
                self._condition.notify_all()
            if self._deadlock:
                raise Deadlock("every rank waits for a message that no rank has sent")
            self._condition.wait()


class ThreadTransport(Transport):
    """The transport of one of the ranks that `run_together` starts."""

    def __init__(self, position: RankPosition, shared: _SharedState) -> None:
        super().__init__(position, "cpu")
        self._shared = shared

    def send(self, to: int, action: Action, tensors: Template) -> None:
        self.send_packed(to, action, layout_of(tensors).pack(tensors))

    def send_packed(self, to: int, action: Action, message: PackedMessage) -> None:
        layout, memory = message
        copied = HostMessage(layout, memory.clone())
        copied.seal(action)
        self.sent[to, action.kind.value] += layout.payload
        self._shared.channels[self.position.replica, self.position.rank, to].append(copied)
        self._shared.scheduler.notify()

    def receive(self, source: int, action: Action, layout: MessageLayout) -> PendingReceive:
        key = self.position.replica, source, self.position.rank
        channel = self._shared.channels[key]
        number = self._shared.posted[key]
        self._shared.posted[key] += 1

        def fetch() -> HostMessage:
            with self.activity.waiting(source):
                self._shared.scheduler.wait_until(lambda: len(channel) > number)
            message, channel[number] = channel[number], None
            assert message is not None
            message.check(action)
            if message.layout.specs != layout.specs:  # between processes, the receive buffer would not match
                raise BadMessage(f"{self.position}: received {message.layout} instead of {layout}")
            return message

        return ReceivedMessage(fetch, self.device)

    def gather(self, value: Any) -> list[Any]:
        everyone = range(self.position.ranks * self.position.replicas)
        return [json.loads(text) for text in self._shared.exchange(self._index, everyone, json.dumps(value))]

    def average(self, tensors: Sequence[Tensor]) -> None:
        first = self.position.rank * self.position.replicas
        replicas = range(first, first + self.position.replicas)
        vectors = self._shared.exchange(self._index, replicas, flatten([t.double() for t in tensors]))
        unflatten_into(torch.stack(vectors).mean(0), tensors)

    def gather_to_main(self, source: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        everyone = range(self.position.ranks * self.position.replicas)
        gathered: list[dict[str, Tensor]] = self._shared.exchange(self._index, everyone, host_copies(tensors))
        return gathered[self._process(source)] if self.position.is_main else {}

    @property
    def _index(self) -> int:
        return self._process(self.position.rank)


class _SharedState:
    """Channels and collective operations of all ranks."""

    def __init__(self, processes: int) -> None:
        self.scheduler = CooperativeScheduler(processes)
        # By replica, sending rank and receiving rank. A message is replaced by None when it is received.
        self.channels: dict[tuple[int, int, int], list[HostMessage | None]] = defaultdict(list)
        self.posted: dict[tuple[int, int, int], int] = defaultdict(int)  # receives posted so far
        self._rounds: dict[tuple[range, int], dict[int, Any]] = defaultdict(dict)
        self._calls: dict[tuple[range, int], int] = defaultdict(int)

    def exchange(self, index: int, members: range, value: Any) -> list[Any]:
        """Return the values that all members passed in their calls with the same number."""
        number = self._calls[members, index] = self._calls[members, index] + 1
        values = self._rounds[members, number]
        values[index] = value
        self.scheduler.notify()
        self.scheduler.wait_until(lambda: len(values) == len(members))
        self._rounds.pop((members, number), None)  # the other members hold a reference, too
        return [values[i] for i in members]


def run_together(work: Callable[[Transport], T], ranks: int = 1, replicas: int = 1) -> list[T]:
    """Run a function on several ranks, which are threads of this process.

    Args:
        work: The function of each rank. It is called with the rank's transport.
        ranks: The number of ranks of a pipeline.
        replicas: The number of replicas of the pipeline.

    Returns:
        The results, rank by rank and the replicas of each rank in order.

    Raises:
        Exception: The first error that a rank raised.
    """
    shared = _SharedState(ranks * replicas)
    results: dict[int, T] = {}
    errors: deque[Exception] = deque()

    def run(index: int, position: RankPosition) -> None:
        with shared.scheduler:
            try:
                results[index] = work(ThreadTransport(position, shared))
            except Exception as error:
                # Later errors of other ranks may be consequences of this one.
                errors.append(error)

    positions = [RankPosition(rank, ranks, replica, replicas) for rank in range(ranks) for replica in range(replicas)]
    threads = [threading.Thread(target=run, args=(i, position), daemon=True) for i, position in enumerate(positions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[i] for i in range(len(positions))]
