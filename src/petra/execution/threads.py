"""Ranks as threads of one process that take turns: the twin of `processes`, for tests and for reading checkpoints.

Exactly one thread runs at any time, until it has to wait for another. Random numbers, which are global to a process,
so stay those of the rank that draws them, and a pipeline that waits for itself is noticed at once. Messages arrive as
they do between processes; means over replicas may differ in the last bit, for the order of sums is another.
"""

from __future__ import annotations

import json
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from petra.execution.envelope import BadMessage, Template, check_label, checksum, make_label, payload
from petra.execution.transport import Arrival, Place, Transport, copies, flat, spread
from petra.schedule import Action, Deadlock

T = TypeVar("T")


class Turns:
    """Lets one thread run at a time."""

    def __init__(self, threads: int) -> None:
        self._condition = threading.Condition()
        self._alive = threads
        self._asleep = 0
        self.stuck = False

    def __enter__(self) -> None:
        self._condition.acquire()

    def __exit__(self, *_: object) -> None:
        self._alive -= 1
        self.changed()
        self._condition.release()

    def changed(self) -> None:
        """Something has happened that another thread may wait for."""
        self._asleep = 0
        self._condition.notify_all()

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Let the others run until ``ready``."""
        while not ready():
            self._asleep += 1
            if self._asleep >= self._alive:
                self.stuck = True
                self._condition.notify_all()
            if self.stuck:
                raise Deadlock("every rank waits for a message that none has sent")
            self._condition.wait()


class ThreadTransport(Transport):
    """One of the ranks that `run_together` starts."""

    def __init__(self, place: Place, together: _Together) -> None:
        super().__init__(place, "cpu")
        self._together = together

    def send(self, to: int, label: Action, tensors: Template) -> None:
        message = [t.clone(memory_format=torch.contiguous_format) for t in tensors if t is not None]
        self.sent[to, label.kind.value] += payload(message)
        self._together.channels[self.place.replica, self.place.rank, to].append(
            (make_label(label, checksum(message)), message)
        )
        self._together.turns.changed()

    def receive(self, source: int, label: Action, template: Template) -> Arrival:
        channel = self._together.channels[self.place.replica, source, self.place.rank]
        number = self._together.expected[self.place.replica, source, self.place.rank] = (
            self._together.expected[self.place.replica, source, self.place.rank] + 1
        )

        def arrive() -> Template:
            with self.doing.waiting(source):
                self._together.turns.wait_until(lambda: len(channel) >= number)
            message, channel[number - 1] = channel[number - 1], None
            assert message is not None
            check_label(message[0], label, checksum(message[1]))
            if _kinds(message[1]) != _kinds(template):  # there would be no room for it
                raise BadMessage(f"{self.place}: {_kinds(message[1])} has come in place of {_kinds(template)}")
            arrived = iter(message[1])
            return tuple(None if t is None else next(arrived) for t in template)

        return arrive

    def gather(self, value: Any) -> list[Any]:
        everyone = range(self.place.ranks * self.place.replicas)
        return [json.loads(text) for text in self._together.exchange(self._index, everyone, json.dumps(value))]

    def average(self, tensors: Sequence[Tensor]) -> None:
        first = self.place.rank * self.place.replicas
        replicas = range(first, first + self.place.replicas)
        vectors = self._together.exchange(self._index, replicas, flat([t.double() for t in tensors]))
        spread(torch.stack(vectors).mean(0), tensors)

    def bring(self, source: int, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        everyone = range(self.place.ranks * self.place.replicas)
        found: dict[str, Tensor] = self._together.exchange(self._index, everyone, copies(tensors))[
            self._process(source)
        ]
        return found if self.place.speaks else {}

    @property
    def _index(self) -> int:
        return self._process(self.place.rank)


def _kinds(tensors: Iterable[Tensor | None]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes of what travels."""
    return [(tuple(t.shape), t.dtype) for t in tensors if t is not None]


class _Together:
    """What the ranks share."""

    def __init__(self, processes: int) -> None:
        self.turns = Turns(processes)
        self.channels: dict[tuple[int, int, int], list[tuple[Tensor, list[Tensor]] | None]] = defaultdict(list)
        self.expected: dict[tuple[int, int, int], int] = defaultdict(int)
        self._rounds: dict[tuple[range, int], dict[int, Any]] = defaultdict(dict)
        self._calls: dict[tuple[range, int], int] = defaultdict(int)

    def exchange(self, index: int, members: range, value: Any) -> list[Any]:
        """What every member gave in its call of the same number."""
        number = self._calls[members, index] = self._calls[members, index] + 1
        said = self._rounds[members, number]
        said[index] = value
        self.turns.changed()
        self.turns.wait_until(lambda: len(said) == len(members))
        self._rounds.pop((members, number), None)  # the others hold it too
        return [said[i] for i in members]


def run_together(work: Callable[[Transport], T], ranks: int = 1, replicas: int = 1) -> list[T]:
    """Run ``work`` on every rank and return what each returned, ranks by replicas in order."""
    together = _Together(ranks * replicas)
    results: dict[int, T] = {}
    errors: deque[Exception] = deque()

    def run(index: int, place: Place) -> None:
        with together.turns:
            try:
                results[index] = work(ThreadTransport(place, together))
            except Exception as error:
                # What a rank runs into because of another's error comes later, so the first one counts.
                errors.append(error)

    places = [Place(rank, ranks, replica, replicas) for rank in range(ranks) for replica in range(replicas)]
    threads = [threading.Thread(target=run, args=(i, place), daemon=True) for i, place in enumerate(places)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[i] for i in range(len(places))]
