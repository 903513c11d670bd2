"""Checks that a schedule is complete, in order and free of deadlocks, without running it."""

from __future__ import annotations

from collections.abc import Sequence

from petra.schedule.action import Action, Kind
from petra.schedule.draw import draw
from petra.schedule.layout import Deadlock, is_synthetic, lay_out, waits_for
from petra.schedule.table import ScheduleTable


class ScheduleError(ValueError):
    """An invalid schedule. The message shows the schedule with the invalid action marked."""

    def __init__(self, problem: str, table: ScheduleTable, action: Action | None = None) -> None:
        self.problem = problem
        self.action = action
        super().__init__(f"{problem}\n{draw(table, action)}")


def check_schedule(table: ScheduleTable, staleness: Sequence[int] | None = None) -> None:
    """Check that a schedule can be executed and loses no micro-batch.

    Every stage performs the forward and the backward of each micro-batch exactly once and in order, and each gradient
    enters exactly one update. Where gradients are predicted, every synthesizer learns once from each micro-batch. Every
    message is sent in an earlier phase than the one that uses it. No stage waits forever.

    Args:
        table: The schedule.
        staleness: The expected number of ticks between forward and backward of each stage. None skips this check.

    Raises:
        ScheduleError: A check fails.
    """
    _check_messages(table)
    _check_programs(table)
    try:
        lay_out(table.programs)
    except Deadlock as stuck:
        raise ScheduleError(str(stuck), table) from None
    for stage, delays in enumerate(table.staleness() if staleness is not None else []):
        for microbatch, delay in enumerate(delays):
            if staleness is not None and delay != staleness[stage]:
                action = Action(stage, Kind.BACKWARD, microbatch)
                problem = f"{action} comes {delay} ticks after its forward instead of {staleness[stage]}"
                raise ScheduleError(problem, table, action)


def _check_messages(table: ScheduleTable) -> None:
    phase_of: dict[Action, tuple[int, int]] = {}
    synthetic = is_synthetic(table.actions)
    for tick, phase, action in table:
        if not 0 <= action.stage < table.stages:
            raise ScheduleError(
                f"{action} names stage {action.stage}, but the schedule has only {table.stages}", table, action
            )
        if action in phase_of:
            raise ScheduleError(f"{action} happens twice", table, action)
        needed = waits_for(action, table.stages, synthetic)
        if needed is not None and phase_of.get(needed, (tick, phase)) >= (tick, phase):
            raise ScheduleError(f"{action} uses the message of {needed} before it is sent", table, action)
        phase_of[action] = (tick, phase)


def _check_programs(table: ScheduleTable) -> None:
    every = range(table.microbatches)
    synthetic = is_synthetic(table.actions)
    for stage, program in enumerate(table.programs):
        forwards: set[int] = set()
        waiting: list[int] = []  # micro-batches whose gradient no update has used yet
        backwards = learned = 0
        for action in program:
            m = action.microbatch
            if action.kind is Kind.FORWARD:
                if m != len(forwards):
                    raise ScheduleError(f"{action} should be {stage}F{len(forwards)}", table, action)
                forwards.add(m)
            elif action.kind is Kind.BACKWARD:
                if m not in forwards:
                    raise ScheduleError(f"{action} comes before its forward", table, action)
                if m != backwards:
                    raise ScheduleError(f"{action} should be {stage}B{backwards}", table, action)
                backwards += 1
                waiting.append(m)
            elif action.kind is Kind.LEARN:
                if m not in forwards or m != learned:
                    raise ScheduleError(f"{action} should be {stage}L{learned}, after its forward", table, action)
                learned += 1
            elif m < 0:
                if backwards:
                    raise ScheduleError(f"{action} has zero gradients, but comes after a backward", table, action)
            else:
                if not waiting or waiting[-1] != m:
                    raise ScheduleError(f"{action} follows no new gradient of micro-batch {m}", table, action)
                waiting.clear()
        if len(forwards) != len(every) or backwards != len(every):
            raise ScheduleError(
                f"stage {stage} has {len(forwards)} forwards and {backwards} backwards for {len(every)} micro-batches",
                table,
            )
        if learned != (len(every) if synthetic and stage < table.stages - 1 else 0):
            raise ScheduleError(f"stage {stage} learns from {learned} of {len(every)} micro-batches", table)
        if waiting:
            raise ScheduleError(f"stage {stage} never updates with micro-batches {waiting}", table)
