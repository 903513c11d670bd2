"""Arranges the programs of all stages in time, and detects deadlocks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

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


def lay_out(
    programs: Sequence[Sequence[Action]], stages: int | None = None, done: Collection[Action] = ()
) -> tuple[tuple[Action, ...], ...]:
    """Assign the actions of all workers to phases, as early as their messages allow.

    In each phase, every worker performs its next action if the message for it was sent in an earlier phase. Updates
    share the phase of the action before them.

    Args:
        programs: The actions of each worker, in the order in which it performs them. A worker is one stage, or a rank
            with several stages.
        stages: The number of stages; by default, each worker is one stage.
        done: Actions that were performed before, and that are not in the programs.

    Returns:
        The phases, each with the actions of all workers.

    Raises:
        Deadlock: Workers wait for each other. The message names the action that each of them waits for.
    """
    stages = len(programs) if stages is None else stages
    synthetic = is_synthetic(action for program in programs for action in program)
    performed = set(done)
    position = [0] * len(programs)
    phases: list[tuple[Action, ...]] = []
    while any(at < len(program) for at, program in zip(position, programs, strict=True)):
        phase: list[Action] = []
        for worker, program in enumerate(programs):
            if position[worker] < len(program):
                needed = waits_for(program[position[worker]], stages, synthetic)
                if needed is None or needed in performed:
                    phase.append(program[position[worker]])
                    position[worker] += 1
                    while position[worker] < len(program) and program[position[worker]].kind is Kind.UPDATE:
                        phase.append(program[position[worker]])
                        position[worker] += 1
        if not phase:
            stuck = [
                f"stage {(action := program[at]).stage} waits with {action} for {waits_for(action, stages, synthetic)}"
                for at, program in zip(position, programs, strict=True)
                if at < len(program)
            ]
            raise Deadlock("deadlock: " + "; ".join(stuck))
        performed.update(phase)
        phases.append(tuple(phase))
    return tuple(phases)
