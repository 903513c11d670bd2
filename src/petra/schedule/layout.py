"""Lays stages' programs out in time, and finds the deadlock if there is one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from petra.schedule.action import Action, Kind


class Deadlock(ValueError):
    """Programs that wait for each other for ever."""


def waits_for(action: Action, stages: int, synthetic: bool = False) -> Action | None:
    """The action of another stage whose message this one needs, if any.

    With ``synthetic`` gradients it is not the backward that needs the gradient from above, but what learns from it.
    """
    if action.kind is Kind.FORWARD and action.stage > 0:
        return Action(action.stage - 1, Kind.FORWARD, action.microbatch)
    if action.kind is (Kind.LEARN if synthetic else Kind.BACKWARD) and action.stage < stages - 1:
        return Action(action.stage + 1, Kind.BACKWARD, action.microbatch)
    return None


def is_synthetic(actions: Iterable[Action]) -> bool:
    """Whether stages predict their gradients."""
    return any(action.kind is Kind.LEARN for action in actions)


def lay_out(programs: Sequence[Sequence[Action]]) -> tuple[tuple[Action, ...], ...]:
    """Run the programs on paper: in each phase every stage does its next action if it can.

    A forward or backward takes a phase, and its message can be used in the next one; an update goes
    into the phase of the action before it. Raises `Deadlock`, naming who waits for what.
    """
    stages, synthetic = len(programs), is_synthetic(action for program in programs for action in program)
    done: set[Action] = set()
    position = [0] * stages
    phases: list[tuple[Action, ...]] = []
    while any(position[s] < len(programs[s]) for s in range(stages)):
        phase: list[Action] = []
        for stage, program in enumerate(programs):
            if position[stage] < len(program):
                need = waits_for(program[position[stage]], stages, synthetic)
                if need is None or need in done:
                    phase.append(program[position[stage]])
                    position[stage] += 1
                    while position[stage] < len(program) and program[position[stage]].kind is Kind.UPDATE:
                        phase.append(program[position[stage]])
                        position[stage] += 1
        if not phase:
            stuck = [
                f"stage {stage} waits with {(action := program[position[stage]])} "
                f"for {waits_for(action, stages, synthetic)}"
                for stage, program in enumerate(programs)
                if position[stage] < len(program)
            ]
            raise Deadlock("deadlock: " + "; ".join(stuck))
        done.update(phase)
        phases.append(tuple(phase))
    return tuple(phases)
