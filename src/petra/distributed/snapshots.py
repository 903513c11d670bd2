"""Snapshots of the state of every process, in its own memory and in that of a neighbour.

Every process copies its state at the same tick, and sends the copy to a neighbour while training goes on. Once all
copies have arrived, the snapshot is *complete*, and the one before it is dropped. When a process is lost, all processes
return to the last complete snapshot.

With replicas, the neighbour is the twin: the process with the same stages in the next replica. It has the same weights,
so it gets only what differs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from petra.distributed.io_thread import IOThread, Task, close_threads
from petra.distributed.membership import Membership
from petra.distributed.packed_state import HostMemory, PackedState, StatePacker
from petra.distributed.process_groups import INTERRUPTED_LIMIT
from petra.distributed.process_transport import ProcessTransport
from petra.distributed.state_exchange import Ring
from petra.distributed.transport import RankPosition, Transport

State = dict[str, Any]
"""The state of a process: `run`, `stages` (with `weights` and `flight`), and other values."""
Part = tuple[int, int]
"""A rank and a replica."""
PackedPart = tuple[PackedState, ...]
"""The state of a process in two: all but the weights, and the weights of its stages."""


class SnapshotMemory:
    """The memory of a snapshot in one process: for its own state, and for that of its neighbour."""

    def __init__(self) -> None:
        self._packers = StatePacker(), StatePacker()
        self.received = HostMemory(), HostMemory()
        """For the state of the neighbour."""

    def pack(self, state: State) -> PackedPart:
        """Copy the state of this process into this memory.

        Args:
            state: The state.

        Returns:
            The packed state.
        """
        return tuple(packer.pack(half) for packer, half in zip(self._packers, split(state), strict=True))


@dataclass
class Snapshot:
    """The part of a snapshot that one process holds."""

    tick: int
    ranks: int
    replicas: int
    parts: dict[Part, PackedPart] = field(default_factory=dict)
    """The states of processes: its own, and that of its neighbour."""
    memory: SnapshotMemory | None = None
    """The memory of the states."""

    def state(self, part: Part) -> State:
        """Return a copy of the state of a process.

        Args:
            part: Its position.

        Returns:
            The state.
        """
        rest, weights = self.parts[part]
        return join(rest.unpack(), weights.unpack())


class Snapshots:
    """The snapshots that this process holds.

    Args:
        every: The largest number of ticks to repeat when a process is lost. Processes wait if copies take longer.
        membership: This process in the job.
    """

    def __init__(self, every: int, membership: Membership) -> None:
        self.every, self._membership = every, membership
        self.complete: Snapshot | None = None
        """The last snapshot that all processes have completed."""
        self.pending: Snapshot | None = None
        """A snapshot that is being sent."""
        self.begun = False
        """True if the training may have written files: later generations continue it instead of starting it."""
        self._transport: ProcessTransport | None = None
        self._ring: Ring | None = None
        self._threads: tuple[IOThread, IOThread] | None = None
        self._tasks: list[Task[Any]] = []
        self._answers: deque[Callable[[], list[float]]] = deque()
        self._due = 0
        self._memory = SnapshotMemory(), SnapshotMemory()

    def connect(self, transport: Transport) -> None:
        """Connect to the neighbours of this generation; all processes call it.

        Args:
            transport: The transport of this process.
        """
        self._transport, self._due = None, 0
        if self.every and isinstance(transport, ProcessTransport):
            self._transport = transport
            self._ring = transport.open_ring(*neighbours(transport.position))
            self._threads = IOThread("petra-snapshot-to"), IOThread("petra-snapshot-from")

    def finish(self) -> None:
        """End taking snapshots. All processes call it after their last tick."""
        if self._transport is not None:
            self._transport.gather(None)
            self.disconnect()

    def disconnect(self) -> None:
        """Forget the generation; a snapshot that is not complete is kept, because others may have completed it."""
        if self._ring is not None:
            self._ring.close()
        close_threads(self._threads or (), INTERRUPTED_LIMIT)
        if self.pending is not None and not all(task.done() and not task.exception() for task in self._tasks):
            self.pending.parts = {part: state for part, state in self.pending.parts.items() if part == self._own}
        self._transport, self._ring, self._threads = None, None, None
        self._tasks.clear()
        self._answers.clear()

    @property
    def _own(self) -> Part:
        assert self._transport is not None
        return self._transport.position.rank, self._transport.position.replica

    def after_tick(self, tick: int, state: Callable[[], State]) -> None:
        """Take a snapshot if one is due. All processes call it at the same ticks.

        Args:
            tick: The number of ticks so far.
            state: Returns the state of this process.
        """
        if self._transport is None:
            return
        if self.pending is None:
            if tick >= self._due:
                self._take(tick, state())
            return
        overdue = tick - (0 if self.complete is None else self.complete.tick) >= self.every
        if overdue:  # all processes wait, so that no more ticks have to be repeated
            for task in self._tasks:
                self._transport.wait_for(task)
        self._answers.append(self._transport.maximum_async([0.0 if self._sent() else 1.0]))
        # Otherwise, the answers are read a few ticks later, so that nobody waits for them.
        while len(self._answers) > (0 if overdue else self._delay):
            if self._answers.popleft()()[0] == 0.0:
                self._completed()
                break

    def _completed(self) -> None:
        assert self._transport is not None
        assert self.pending is not None
        self.complete, self.pending = self.pending, None
        self._due = self.complete.tick + max(1, self.every - self._delay - 1)
        self._answers.clear()
        if self._transport.position.is_main:
            self._membership.report_progress(self.complete.tick)

    @property
    def _delay(self) -> int:
        assert self._transport is not None
        return max(2, self._transport.position.ranks)

    def _take(self, tick: int, state: State) -> None:
        assert self._transport is not None
        assert self._ring is not None
        assert self._threads is not None
        position = self._transport.position
        used = None if self.complete is None else self.complete.memory
        memory = next(one for one in self._memory if one is not used)
        own = memory.pack(state)
        self.pending = Snapshot(tick, position.ranks, position.replicas, {self._own: own}, memory)
        ring, parts = self._ring, self.pending.parts
        neighbour = neighbours(position)[1]
        twins = position.replicas > 1

        def receive() -> None:
            received = ring.source.receive(memory.received)
            parts[neighbour] = (*received, *own[len(received) :])  # a twin has the same weights

        def send() -> None:
            ring.to.send(own[:1] if twins else own)

        self._tasks = [self._threads[0].submit(send), self._threads[1].submit(receive)]

    def _sent(self) -> bool:
        if not all(task.done() for task in self._tasks):
            return False
        for task in self._tasks:
            task.result()  # raises the error of a lost connection
        return True

    def recover(self, transport: Transport) -> tuple[Snapshot | None, bool]:
        """Find the last snapshot that the processes hold together, and get the parts that this one needs.

        Afterwards, each part is in two processes again, so that another one may be lost before the next snapshot.

        All processes call it at the start of a generation.

        Args:
            transport: Connects the processes.

        Returns:
            The snapshot with the parts of this process, or None if there is none; and whether any process has begun.
        """
        held = [snapshot for snapshot in (self.pending, self.complete) if snapshot is not None]
        described = [[s.tick, s.ranks, s.replicas, sorted(map(list, s.parts))] for s in held]
        reports = transport.gather([self.begun, described])
        begun = any(report[0] for report in reports)
        found = _newest([report[1] for report in reports])
        self.pending = None
        if found is None:
            self.complete = None
            return None, begun
        tick, ranks, replicas = found
        own = next((s for s in held if s.tick == tick), Snapshot(tick, ranks, replicas))
        owners = _owners([report[1] for report in reports], found)
        restored = self.complete = own
        for part, owner in sorted(owners.items()):
            for process, position in enumerate(transport.positions()):
                if part in _held(position, ranks, replicas) and [*part] not in _parts(reports[process][1], found):
                    state = transport.move_state(own.parts.get(part), owner, process)
                    if state is not None:
                        restored.parts[part] = state
        return restored, begun


def neighbours(position: RankPosition) -> tuple[Part, Part]:
    """Return the positions that a process sends its state to, and gets one from."""
    rank, replica = position.rank, position.replica
    if position.replicas > 1:
        return (rank, (replica + 1) % position.replicas), (rank, (replica - 1) % position.replicas)
    return ((rank + 1) % position.ranks, replica), ((rank - 1) % position.ranks, replica)


def needed(position: RankPosition, ranks: int, replicas: int) -> list[Part]:
    """Return the parts of a snapshot of so many ranks that a process needs to continue from it."""
    if (position.ranks, position.replicas) == (ranks, replicas):
        return [(position.rank, position.replica)]
    return [(rank, position.replica) for rank in range(ranks)]  # it may get stages of any rank


def split(state: State) -> tuple[State, State]:
    """Return all of a state but its weights, which differs between twins, and the weights of its stages."""
    stages = state["stages"]
    rest = {index: {"flight": stage["flight"]} for index, stage in stages.items()}
    return {**state, "stages": rest}, {index: stage["weights"] for index, stage in stages.items()}


def join(rest: State, weights: State) -> State:
    """Return the state that `split` was given."""
    stages = {index: {**stage, "weights": weights[index]} for index, stage in rest["stages"].items()}
    return {**rest, "stages": stages}


def _held(position: RankPosition, ranks: int, replicas: int) -> list[Part]:
    """Return the parts of a snapshot of so many ranks that a process holds, also for its neighbour."""
    same = (position.ranks, position.replicas) == (ranks, replicas)
    return [*needed(position, ranks, replicas), *([neighbours(position)[1]] if same else [])]


Description = list[Any]
"""Tick, ranks, replicas and parts of a snapshot that a process holds."""


def _parts(held: list[Description], found: tuple[int, int, int]) -> list[list[int]]:
    return next((parts for *shape, parts in held if tuple(shape) == found), [])


def _owners(reports: list[list[Description]], found: tuple[int, int, int]) -> dict[Part, int]:
    """Return the first process that holds each part."""
    owners: dict[Part, int] = {}
    for process, held in enumerate(reports):
        for rank, replica in _parts(held, found):
            owners.setdefault((rank, replica), process)
    return owners


def _newest(reports: list[list[Description]]) -> tuple[int, int, int] | None:
    """Return tick, ranks and replicas of the last snapshot of which all parts are there."""
    shapes = sorted({(tick, ranks, replicas) for held in reports for tick, ranks, replicas, _ in held}, reverse=True)
    for tick, ranks, replicas in shapes:
        if len(_owners(reports, (tick, ranks, replicas))) == ranks * replicas:
            return tick, ranks, replicas
    return None
