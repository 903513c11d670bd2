"""A synchronous pipeline in which every rank holds several stages that are not neighbours: interleaved 1F1B."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cached_property

from petra.schedule.action import Action, Kind
from petra.schedule.layout import lay_out
from petra.schedule.pipeline_schedule import Phase, PipelineSchedule, Tick


class InterleavedSchedule(PipelineSchedule):
    """1F1B with V stages per rank: rank r of R holds stages r, R + r, 2R + r, … (Narayanan et al., 2021).

    A rank works on R micro-batches with one of its stages before it turns to the next one. The bubble lasts as long as
    a forward and a backward of R - 1 stages. With one stage per rank, stages and bubble are V times as long. The
    bubble is that short if `accumulate` is a multiple of R. Gradients are exact: all stages make their update
    before the next group of `accumulate` micro-batches begins.

    A tick begins with the forward of its micro-batch on stage 0. It ends before the next one, or with the group.

    Args:
        stages: The number of stages, J = V·R.
        accumulate: The number of micro-batches per update, k.
        per_rank: The number of stages per rank, V.

    Raises:
        ValueError: `stages` is not a multiple of `per_rank`.
    """

    exact = True

    def __init__(self, stages: int, accumulate: int = 1, per_rank: int = 2) -> None:
        super().__init__(stages, accumulate)
        if per_rank < 1 or stages % per_rank:
            raise ValueError(
                f"the interleaved schedule has {per_rank} stages per rank, but there are {stages} stages: give a "
                f"number of stages that {per_rank} divides, or interleaved:V with V stages per rank"
            )
        self.per_rank = per_rank
        self.ranks = stages // per_rank
        self.name = f"interleaved:{per_rank}"

    @property
    def placement(self) -> list[int]:
        """The rank of each stage."""
        return [stage % self.ranks for stage in range(self.stages)]

    def tick(self, index: int, microbatches: int) -> Tick:
        if index >= microbatches:
            return ()
        start, local = index - index % self.accumulate, index % self.accumulate
        return _shifted(self._group[local], start)

    def ticks(self, microbatches: int) -> int:
        return microbatches

    def final_tick(self, microbatches: int) -> Tick:
        rest = microbatches % self.accumulate
        done = {action for tick in self._group[:rest] for phase in tick for action in phase}
        left = [[a for a in program if a not in done] for program in self._programs(rest)]
        return _shifted(lay_out(left, self.stages, done), microbatches - rest) if rest else ()

    def position(self, index: int) -> Hashable:
        return index % self.accumulate

    @cached_property
    def _group(self) -> list[Tick]:
        """The ticks of one group of micro-batches."""
        ticks: list[list[Phase]] = []
        for phase in _joined(lay_out(self._programs(self.accumulate), self.stages), self.stages - 1):
            if any(action.stage == 0 and action.kind is Kind.FORWARD for action in phase):
                ticks.append([])
            ticks[-1].append(phase)
        return [tuple(tick) for tick in ticks]

    def _programs(self, size: int) -> list[list[Action]]:
        """Return the actions of each rank for the first micro-batches of a group, with their updates."""
        programs = []
        for rank in range(self.ranks):
            program = []
            # An incomplete set of R micro-batches has the order of a complete one: otherwise ranks could deadlock.
            for action in self._program(rank, -(-self.accumulate // self.ranks) * self.ranks):
                if action.microbatch < size:
                    program.append(action)
                    if action.kind is Kind.BACKWARD and action.microbatch == size - 1:
                        program.append(Action(action.stage, Kind.UPDATE, size - 1))
            programs.append(program)
        return programs

    def _program(self, rank: int, size: int) -> list[Action]:
        """Return the forwards and backwards of a rank for a number of micro-batches that the ranks divide."""
        own = range(rank, self.stages, self.ranks)
        forwards, backwards = (
            [
                Action(stage, kind, start + m)
                for start in range(0, size, self.ranks)
                for stage in stages
                for m in range(self.ranks)
            ]
            for kind, stages in ((Kind.FORWARD, own), (Kind.BACKWARD, own[::-1]))
        )
        warmup = min(len(forwards), 2 * (self.ranks - 1 - rank) + (self.per_rank - 1) * self.ranks)
        program = forwards[:warmup]
        for i, backward in enumerate(backwards):
            program += [*forwards[warmup + i : warmup + i + 1], backward]
        return program


def _joined(phases: Sequence[Phase], last: int) -> list[Phase]:
    """Move each backward of the last stage to the phase of its forward, so that no graph waits between two ticks."""
    found: list[list[Action]] = []
    for phase in phases:
        found.append([])
        for action in phase:
            moves = action.stage == last and action.kind is not Kind.FORWARD
            found[-2 if moves and len(found) > 1 else -1].append(action)
    return [tuple(phase) for phase in found if phase]


def _shifted(tick: Tick, start: int) -> Tick:
    return tuple(tuple(Action(a.stage, a.kind, a.microbatch + start) for a in phase) for phase in tick)
