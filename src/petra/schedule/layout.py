"""Arranges the programs of all stages in time, and detects deadlocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from petra.schedule.action import Action, Kind


class Deadlock(ValueError):
    """Stages whose programs wait for each other forever."""


def waits_for(action: Action, stages: int, synthetic: bool = False) -> Action | None:
    """Return the action of another stage whose message this action needs, if any.

    With `synthetic` gradients, the synthesizer needs the gradient from above and the backward does not.
    """
    if action.kind is Kind.FORWARD and action.stage > 0:
        return Action(action.stage - 1, Kind.FORWARD, action.microbatch)
    if action.kind is (Kind.LEARN if synthetic else Kind.BACKWARD) and action.stage < stages - 1:
        return Action(action.stage + 1, Kind.BACKWARD, action.microbatch)
    return None


def is_synthetic(actions: Iterable[Action]) -> bool:
    """Return True if stages predict their gradients with a synthesizer."""
    return any(action.kind is Kind.LEARN for action in actions)


def lay_out(programs: Sequence[Sequence[Action]]) -> tuple[tuple[Action, ...], ...]:
    """Assign the actions of all stages to phases, as early as their messages allow.

    In each phase, every stage performs its next action if the message for it was sent in an earlier phase. Updates
    share the phase of the action before them.

    Args:
        programs: The actions of each stage, in the order in which the stage performs them.

    Returns:
        The phases, each with the actions of all stages.

    Raises:
        Deadlock: Stages wait for each other. The message names the action each of them waits for.
    """
    stages, synthetic = len(programs), is_synthetic(action for program in programs for action in program)
    done: set[Action] = set()
    position = [0] * stages
    phases: list[tuple[Action, ...]] = []
    while any(position[s] < len(programs[s]) for s in range(stages)):
        phase: list[Action] = []
        for stage, program in enumerate(programs):
            if position[stage] < len(program):
                needed = waits_for(program[position[stage]], stages, synthetic)
                if needed is None or needed in done:
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
