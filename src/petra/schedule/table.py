"""A finite schedule as plain data: every action of every stage for a given number of micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from petra.schedule.action import Action, Kind
from petra.schedule.pipeline_schedule import PipelineSchedule, Tick


@dataclass(frozen=True)
class ScheduleTable:
    """All actions of a finite schedule, tick by tick.

    `str(table)` gives text that `parse` reads back. Iterating over a table yields `(tick, phase, action)`.
    """

    stages: int
    """The number of stages."""
    ticks: tuple[Tick, ...]
    """The phases of each tick."""

    @classmethod
    def of(cls, schedule: PipelineSchedule, microbatches: int) -> ScheduleTable:
        """Write out a schedule for a number of micro-batches, from filling the pipeline to draining it.

        Args:
            schedule: The schedule.
            microbatches: The number of micro-batches.

        Returns:
            The table.
        """
        ticks = [schedule.tick(index, min(index + 1, microbatches)) for index in range(schedule.ticks(microbatches))]
        final_tick = schedule.final_tick(microbatches)
        return cls(schedule.stages, (*ticks, final_tick) if final_tick else tuple(ticks))

    @property
    def actions(self) -> list[Action]:
        """All actions, in the order in which a single process performs them."""
        return [action for _, _, action in self]

    @property
    def programs(self) -> list[list[Action]]:
        """The actions of each stage, in the order in which the stage performs them."""
        programs: list[list[Action]] = [[] for _ in range(self.stages)]
        for action in self.actions:
            programs[action.stage].append(action)
        return programs

    @property
    def microbatches(self) -> int:
        """The number of micro-batches, derived from the actions."""
        return 1 + max((action.microbatch for action in self.actions), default=-1)

    def staleness(self) -> list[list[int]]:
        """Return the ticks between the forward and the backward of every micro-batch.

        Returns:
            One list per stage with one number per micro-batch.
        """
        forward = {(a.stage, a.microbatch): t for t, _, a in self if a.kind is Kind.FORWARD}
        backward = {(a.stage, a.microbatch): t for t, _, a in self if a.kind is Kind.BACKWARD}
        return [
            [backward[stage, m] - forward[stage, m] for m in range(self.microbatches)] for stage in range(self.stages)
        ]

    def __iter__(self) -> Iterator[tuple[int, int, Action]]:
        """Yield the tick, the phase and the action of each action."""
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
    def parse(cls, text: str) -> ScheduleTable:
        """Parse a table that `str(table)` printed.

        Args:
            text: A line `stages J`, then one line per tick, with phases separated by `|`.

        Returns:
            The table.

        Raises:
            ValueError: A line has another form. The message shows the expected one.
        """
        head, _, body = text.strip().partition("\n")
        word, _, count = head.partition(" ")
        if word != "stages" or not count.isdigit():
            raise ValueError(f"the first line is {head!r}: begin a schedule with a line like 'stages 4'")
        ticks: list[Tick] = []
        for line in filter(None, map(str.strip, body.splitlines())):
            number, colon, rest = line.partition(":")
            if not colon or number != str(len(ticks)):
                raise ValueError(f"the line of tick {len(ticks)} is {line!r}: write it like '{len(ticks)}: 0F0 | 1F0'")
            ticks.append(tuple(tuple(map(Action.parse, part.split())) for part in rest.split("|") if part.strip()))
        return cls(int(count), tuple(ticks))
