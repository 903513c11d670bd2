"""A finite schedule: an order carried out on paper for a number of micro-batches, as plain data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from petra.schedule.action import Action, Kind
from petra.schedule.order import Order, Tick


@dataclass(frozen=True)
class Schedule:
    """All actions of a run, tick by tick; prints as text that `parse` reads back."""

    stages: int
    ticks: tuple[Tick, ...]

    @classmethod
    def of(cls, order: Order, microbatches: int) -> Schedule:
        """What ``order`` does with ``microbatches`` micro-batches, from filling to draining."""
        ticks = [order.tick(index, min(index + 1, microbatches)) for index in range(order.ticks(microbatches))]
        closing = order.closing(microbatches)
        return cls(order.stages, (*ticks, closing) if closing else tuple(ticks))

    @property
    def actions(self) -> list[Action]:
        """All actions in the order in which one process does them."""
        return [action for _, _, action in self]

    @property
    def programs(self) -> list[list[Action]]:
        """Each stage's own actions in its own order: what one worker follows."""
        programs: list[list[Action]] = [[] for _ in range(self.stages)]
        for action in self.actions:
            programs[action.stage].append(action)
        return programs

    @property
    def microbatches(self) -> int:
        """The number of micro-batches, counted from what is there."""
        return 1 + max((action.microbatch for action in self.actions), default=-1)

    def staleness(self) -> list[list[int]]:
        """For each stage, the ticks between forward and backward of each micro-batch."""
        forward = {(a.stage, a.microbatch): t for t, _, a in self if a.kind is Kind.FORWARD}
        backward = {(a.stage, a.microbatch): t for t, _, a in self if a.kind is Kind.BACKWARD}
        return [
            [backward[stage, m] - forward[stage, m] for m in range(self.microbatches)] for stage in range(self.stages)
        ]

    def __iter__(self) -> Iterator[tuple[int, int, Action]]:
        """Tick, phase and action."""
        for t, tick in enumerate(self.ticks):
            for p, phase in enumerate(tick):
                for action in phase:
                    yield t, p, action

    def __str__(self) -> str:
        lines = [
            f"{t}: " + " | ".join(" ".join(map(str, phase)) for phase in tick) for t, tick in enumerate(self.ticks)
        ]
        return "\n".join([f"stages {self.stages}", *(line.rstrip() for line in lines)])

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Read what ``str(schedule)`` wrote: a line a tick, phases apart by ``|``."""
        head, _, body = text.strip().partition("\n")
        word, _, count = head.partition(" ")
        if word != "stages" or not count.isdigit():
            raise ValueError(f"a schedule begins with a line like 'stages 4', not {head!r}")
        ticks: list[Tick] = []
        for line in filter(None, map(str.strip, body.splitlines())):
            number, colon, rest = line.partition(":")
            if not colon or number != str(len(ticks)):
                raise ValueError(f"expected a line like '{len(ticks)}: 0F0 | 1F0', not {line!r}")
            ticks.append(tuple(tuple(map(Action.parse, part.split())) for part in rest.split("|") if part.strip()))
        return cls(int(count), tuple(ticks))
