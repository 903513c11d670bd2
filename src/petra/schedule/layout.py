"""Lays stages' programs out in time, and finds the deadlock if there is one."""

from __future__ import annotations

from collections.abc import Sequence

from petra.schedule.action import Action, Kind


class Deadlock(ValueError):
    """Programs that wait for each other for ever."""


def waits_for(action: Action, stages: int) -> Action | None:
    """The action of another stage whose message this one needs, if any."""
    if action.kind is Kind.FORWARD and action.stage > 0:
        return Action(action.stage - 1, Kind.FORWARD, action.microbatch)
    if action.kind is Kind.BACKWARD and action.stage < stages - 1:
        return Action(action.stage + 1, Kind.BACKWARD, action.microbatch)
    return None


def lay_out(programs: Sequence[Sequence[Action]]) -> tuple[tuple[Action, ...], ...]:
    """Run the programs on paper: in each phase every stage does its next action if it can.

    A forward or backward takes a phase, and its message can be used in the next one; an update goes
    into the phase of the action before it. Raises `Deadlock`, naming who waits for what.
    """
    stages = len(programs)
    done: set[Action] = set()
    position = [0] * stages
    phases: list[tuple[Action, ...]] = []
    while any(position[s] < len(programs[s]) for s in range(stages)):
        phase: list[Action] = []
        for stage, program in enumerate(programs):
            if position[stage] < len(program):
                need = waits_for(program[position[stage]], stages)
                if need is None or need in done:
                    phase.append(program[position[stage]])
                    position[stage] += 1
                    while position[stage] < len(program) and program[position[stage]].kind is Kind.UPDATE:
                        phase.append(program[position[stage]])
                        position[stage] += 1
        if not phase:
            stuck = [
                f"stage {stage} waits with {program[position[stage]]} for {waits_for(program[position[stage]], stages)}"
                for stage, program in enumerate(programs)
                if position[stage] < len(program)
            ]
            raise Deadlock("deadlock: " + "; ".join(stuck))
        done.update(phase)
        phases.append(tuple(phase))
    return tuple(phases)
