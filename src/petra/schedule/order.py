"""Orders: the rules that say which actions happen in which tick.

An order is a pure function of the tick, so it serves a stream of micro-batches of unknown length as
well as a finite schedule. A tick is a list of phases; the actions of one phase are independent of each
other across stages, and read only what earlier phases have sent. Within a phase the actions of one
stage come in the order in which it does them: forward, backward, update.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from math import ceil, inf
from numbers import Integral

from petra.schedule.action import Action, Kind
from petra.schedule.layout import lay_out

Phase = tuple[Action, ...]
Tick = tuple[Phase, ...]


class Order(ABC):
    """The rule of a schedule for ``stages`` stages and an update every ``accumulate`` micro-batches."""

    name: str

    def __init__(self, stages: int, accumulate: int = 1) -> None:
        if stages < 1:
            raise ValueError(f"stages is {stages}: a network needs at least one")
        if accumulate < 1:
            raise ValueError(f"accumulate is {accumulate}: give the number of micro-batches per update, 1 or more")
        self.stages = stages
        self.accumulate = accumulate

    @abstractmethod
    def tick(self, index: int, fed: int) -> Tick:
        """What happens in tick ``index`` when micro-batches 0 … fed-1 have been read so far.

        Micro-batch ``index`` is read in tick ``index``; when ``fed <= index`` the pipeline is draining.
        """

    @abstractmethod
    def ticks(self, fed: int) -> int:
        """How many ticks it takes until micro-batches 0 … fed-1 have left the pipeline."""

    def closing(self, fed: int) -> Tick:
        """One more tick at the end: what is left when ``fed`` is not a multiple of ``accumulate``."""
        if fed % self.accumulate == 0:
            return ()
        return (tuple(Action(stage, Kind.UPDATE, fed - 1) for stage in range(self.stages)),)

    def staleness(self, stage: int) -> int:
        """τ of the stage in steady state: the ticks between a forward and its backward."""
        return 0

    def blank_updates(self, stage: int) -> int:
        """How many updates of the stage come before the first backward of all, with gradients of zero."""
        return 0

    def _backward(self, stage: int, microbatch: int) -> list[Action]:
        """A backward, and the update that every k-th backward of a stage brings (Alg. 1, line 20)."""
        actions = [Action(stage, Kind.BACKWARD, microbatch)]
        if (microbatch + 1) % self.accumulate == 0:
            actions.append(Action(stage, Kind.UPDATE, microbatch))
        return actions


class Pipelined(Order):
    """Every stage does one forward and one backward per tick, on different micro-batches.

    Stage s has ``in_flight[s]`` = n_s micro-batches between its forwards and its backwards: n_s forwards
    fill it, and from there one forward, one backward and update take turns. A tick is two slots; a
    message sent in one slot can be used in the next. With the delay split evenly between the two
    directions,

        forward  of micro-batch m at stage s in slot 2m + n_0 - n_s
        backward of micro-batch m at stage s in slot 2m + n_0 + n_s

    and the staleness is n_s ticks. The paper's lock-step order is n_s = 2(J-1-s): all stages use the first
    slot of a tick. The order of least staleness is n_s = J-1-s: even and odd stages alternate.
    """

    def __init__(self, in_flight: Sequence[int], accumulate: int = 1, name: str = "pipelined") -> None:
        super().__init__(len(in_flight), accumulate)
        falls = in_flight[-1] == 0 and all(below > above for below, above in pairwise(in_flight))
        if not falls or not all(isinstance(n, Integral) for n in in_flight):
            raise ValueError(
                f"in_flight is {list(in_flight)}: it must fall from stage to stage and end with 0, in whole numbers, "
                f"for example {list(range(len(in_flight) - 1, -1, -1))}"
            )
        self.in_flight = tuple(in_flight)
        self.name = name

    def tick(self, index: int, fed: int) -> Tick:
        slots = (self._slot(slot, fed) for slot in (2 * index, 2 * index + 1))
        return tuple(slot for slot in slots if slot)

    def _slot(self, slot: int, fed: int) -> Phase:
        actions: list[Action] = []
        first = self.in_flight[0]
        for stage, n in enumerate(self.in_flight):
            forward, odd = divmod(slot - (first - n), 2)
            if odd:
                continue
            if 0 <= forward < fed:
                actions.append(Action(stage, Kind.FORWARD, forward))
            backward = forward - n
            if 0 <= backward < fed:
                actions.extend(self._backward(stage, backward))
        return tuple(actions)

    def ticks(self, fed: int) -> int:
        return fed + self.in_flight[0] if fed else 0

    def staleness(self, stage: int) -> int:
        return self.in_flight[stage]


def lock_step(stages: int, accumulate: int = 1) -> Pipelined:
    """The paper's order: a message is used one tick after it was sent, τ_s = 2(J-1-s)."""
    return Pipelined([2 * (stages - 1 - stage) for stage in range(stages)], accumulate, "lock-step")


def low_staleness(stages: int, accumulate: int = 1, latency: float = 0.0) -> Pipelined:
    """The order of least staleness that keeps every stage busy: n_s = ceil((J-1-s)(1 + 2c/T)).

    ``latency`` is c/T, the time of a message over the time of a stage's forward and backward.
    """
    if not 0 <= latency < inf:
        raise ValueError(f"latency is {latency}: give the time of a message over that of a tick, 0 or more")
    in_flight = [ceil((stages - 1 - stage) * (1 + 2 * latency) - 1e-9) for stage in range(stages)]
    return Pipelined(in_flight, accumulate, "low-staleness")


class Sequential(Order):
    """One micro-batch at a time goes up through all stages and down again: no overlap, no staleness.

    This is backprop as everyone knows it, and basic model parallelism when stages lie on devices.
    """

    name = "sequential"

    def tick(self, index: int, fed: int) -> Tick:
        if index >= fed:
            return ()
        up = [(Action(stage, Kind.FORWARD, index),) for stage in range(self.stages)]
        down = [tuple(self._backward(stage, index)) for stage in reversed(range(self.stages))]
        return (*up, *down)

    def ticks(self, fed: int) -> int:
        return fed


class LockedForward(Order):
    """All stages go forward with a micro-batch, one after the other; then all go backward at once.

    Features Replay, Alg. 1: in iteration t stage s goes backward with micro-batch t - (J-1-s), with the gradient that
    the stage above has found in iteration t-1. Each stage does the same in the same order as in `low_staleness`,
    but for one thing: features before the first micro-batch are zero, and so are their gradients, so that in its
    first J-1-s iterations stage s updates with gradients of zero.
    """

    name = "locked-forward"

    def tick(self, index: int, fed: int) -> Tick:
        up = [(Action(stage, Kind.FORWARD, index),) for stage in range(self.stages)] if index < fed else []
        down: list[Action] = []
        for stage in range(self.stages):
            microbatch = index - self.staleness(stage)
            if microbatch < fed:
                actions = self._backward(stage, microbatch)
                down.extend(actions if microbatch >= 0 else actions[1:])
        return (*up, tuple(down)) if down else tuple(up)

    def ticks(self, fed: int) -> int:
        return fed + self.stages - 1 if fed else 0

    def staleness(self, stage: int) -> int:
        return self.stages - 1 - stage

    def blank_updates(self, stage: int) -> int:
        return ceil(self.staleness(stage) / self.accumulate)


class Decoupled(Order):
    """Each stage goes backward and updates at once after its forward, with a gradient that it predicts (DNI).

    The gradient that the stage above finds at its input comes back later in the same tick, to learn from.
    """

    name = "decoupled"

    def tick(self, index: int, fed: int) -> Tick:
        if index >= fed:
            return ()
        phases: list[list[Action]] = [[] for _ in range(self.stages + 1)]
        for stage in range(self.stages):
            phases[stage] += [Action(stage, Kind.FORWARD, index), *self._backward(stage, index)]
            if stage < self.stages - 1:
                phases[stage + 2].append(Action(stage, Kind.LEARN, index))
        return tuple(tuple(phase) for phase in phases if phase)

    def ticks(self, fed: int) -> int:
        return fed


class Flush(Order):
    """Synchronous pipelines: groups of ``accumulate`` micro-batches, then an update while all wait.

    The tick that reads the last micro-batch of a group carries the whole group out. Each stage's
    program for a group is a plain list, laid out in time by when its messages can arrive.
    """

    def tick(self, index: int, fed: int) -> Tick:
        if index >= fed or (index + 1) % self.accumulate:
            return ()
        return self._group(index + 1 - self.accumulate, self.accumulate)

    def closing(self, fed: int) -> Tick:
        rest = fed % self.accumulate
        return self._group(fed - rest, rest) if rest else ()

    def ticks(self, fed: int) -> int:
        return fed

    def _group(self, start: int, size: int) -> Tick:
        programs = [
            [*self.program(stage, start, size), Action(stage, Kind.UPDATE, start + size - 1)]
            for stage in range(self.stages)
        ]
        return lay_out(programs)

    @abstractmethod
    def program(self, stage: int, start: int, size: int) -> list[Action]:
        """The forwards and backwards of a stage for micro-batches start … start+size-1."""


class GPipe(Flush):
    """All forwards of a group, then all its backwards."""

    name = "gpipe"

    def program(self, stage: int, start: int, size: int) -> list[Action]:
        group = range(start, start + size)
        return [Action(stage, kind, m) for kind in (Kind.FORWARD, Kind.BACKWARD) for m in group]


class OneForwardOneBackward(Flush):
    """As many forwards as fill the pipeline above, then one forward and one backward in turn."""

    name = "1f1b"

    def program(self, stage: int, start: int, size: int) -> list[Action]:
        fill = min(size, self.stages - 1 - stage)
        group = range(start, start + size)
        actions = [Action(stage, Kind.FORWARD, m) for m in group[:fill]]
        for m in group:
            if m + fill < start + size:
                actions.append(Action(stage, Kind.FORWARD, m + fill))
            actions.append(Action(stage, Kind.BACKWARD, m))
        return actions
