"""Checks a schedule on paper: order, completeness and deadlock, without running anything."""

from __future__ import annotations

from collections.abc import Sequence

from petra.schedule.action import Action, Kind
from petra.schedule.draw import draw
from petra.schedule.layout import Deadlock, is_synthetic, lay_out, waits_for
from petra.schedule.schedule import Schedule


class ScheduleError(ValueError):
    """A schedule that must not be run; the message carries the table with the bad cell marked."""

    def __init__(self, problem: str, schedule: Schedule, action: Action | None = None) -> None:
        self.problem = problem
        self.action = action
        super().__init__(f"{problem}\n{draw(schedule, action)}")


def check(schedule: Schedule, staleness: Sequence[int] | None = None) -> None:
    """Raise `ScheduleError` unless the schedule can be carried out and loses nothing.

    Each micro-batch goes forward and backward exactly once on every stage, in order, and enters exactly one
    update there; where gradients are predicted, every stage but the last learns from each once; every message is
    sent in an earlier phase than it is used in; no worker waits for ever; and, if given, the ticks between forward
    and backward on each stage are those of ``staleness``.
    """
    _check_messages(schedule)
    _check_programs(schedule)
    try:
        lay_out(schedule.programs)
    except Deadlock as stuck:
        raise ScheduleError(str(stuck), schedule) from None
    for stage, delays in enumerate(schedule.staleness() if staleness is not None else []):
        for microbatch, delay in enumerate(delays):
            if staleness is not None and delay != staleness[stage]:
                action = Action(stage, Kind.BACKWARD, microbatch)
                problem = f"{action} comes {delay} ticks after its forward, not {staleness[stage]}"
                raise ScheduleError(problem, schedule, action)


def _check_messages(schedule: Schedule) -> None:
    phase_of: dict[Action, tuple[int, int]] = {}
    synthetic = is_synthetic(schedule.actions)
    for tick, phase, action in schedule:
        if not 0 <= action.stage < schedule.stages:
            raise ScheduleError(f"{action} names a stage beyond the {schedule.stages}", schedule, action)
        if action in phase_of:
            raise ScheduleError(f"{action} is done twice", schedule, action)
        need = waits_for(action, schedule.stages, synthetic)
        if need is not None and phase_of.get(need, (tick, phase)) >= (tick, phase):
            raise ScheduleError(f"{action} uses the message of {need} before it is sent", schedule, action)
        phase_of[action] = (tick, phase)


def _check_programs(schedule: Schedule) -> None:
    every = range(schedule.microbatches)
    synthetic = is_synthetic(schedule.actions)
    for stage, program in enumerate(schedule.programs):
        forwards: set[int] = set()
        waiting: list[int] = []  # micro-batches whose gradient no update has used yet
        backwards = learned = 0
        for action in program:
            m = action.microbatch
            if action.kind is Kind.FORWARD:
                if m != len(forwards):
                    raise ScheduleError(f"{action} should be {stage}F{len(forwards)}", schedule, action)
                forwards.add(m)
            elif action.kind is Kind.BACKWARD:
                if m not in forwards:
                    raise ScheduleError(f"{action} comes before its forward", schedule, action)
                if m != backwards:
                    raise ScheduleError(f"{action} should be {stage}B{backwards}", schedule, action)
                backwards += 1
                waiting.append(m)
            elif action.kind is Kind.LEARN:
                if m not in forwards or m != learned:
                    raise ScheduleError(f"{action} should be {stage}L{learned}, after its forward", schedule, action)
                learned += 1
            elif m < 0:
                if backwards:
                    raise ScheduleError(f"{action} is of zero features, but comes after a backward", schedule, action)
            else:
                if not waiting or waiting[-1] != m:
                    raise ScheduleError(f"{action} has no gradient of micro-batch {m}", schedule, action)
                waiting.clear()
        if len(forwards) != len(every) or backwards != len(every):
            raise ScheduleError(
                f"stage {stage} does {len(forwards)} forwards and {backwards} backwards of {len(every)} micro-batches",
                schedule,
            )
        if learned != (len(every) if synthetic and stage < schedule.stages - 1 else 0):
            raise ScheduleError(f"stage {stage} learns from {learned} of {len(every)} micro-batches", schedule)
        if waiting:
            raise ScheduleError(f"stage {stage} never updates with micro-batches {waiting}", schedule)
