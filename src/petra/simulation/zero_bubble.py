"""ZBV, a synchronous schedule that fills the bubble with postponed gradients of parameters, for comparison."""

from __future__ import annotations

from petra.simulation.cycle import WEIGHT, Cycle, Operation


def zbv(workers: int, accumulate: int) -> Cycle:
    """Return the cycle of ZBV (Qi et al., 2023, "Zero Bubble Pipeline Parallelism", Section 6).

    Worker r of W holds stages r and 2W - 1 - r. The order is that of `ScheduleZBVZeroBubble` of
    torch.distributed.pipelining. There is no bubble if forwards, gradients of inputs and gradients of parameters take
    the same time, and `accumulate` is at least 2W - 1. Gradients are exact.

    Args:
        workers: The number of workers, W.
        accumulate: The number of micro-batches per update.

    Returns:
        The cycle of 2W stages.

    Raises:
        ValueError: A number is less than 1.
    """
    if workers < 1 or accumulate < 1:
        raise ValueError(f"zbv has {workers} workers and {accumulate} micro-batches per update: give 1 or more of both")
    placement = [*range(workers), *reversed(range(workers))]
    programs = [_program(worker, workers, accumulate) for worker in range(workers)]
    return Cycle.of_programs("zbv", programs, placement, accumulate)


class _Counter:
    """Adds operations of a stage, each on the next micro-batch of its kind."""

    def __init__(self, program: list[Operation], stage: int) -> None:
        self._program, self.stage = program, stage
        self.done = {"F": 0, "B": 0, WEIGHT: 0}

    def add(self, *kinds: str) -> None:
        for kind in kinds:
            self._program.append(Operation(self.stage, kind, self.done[kind]))
            self.done[kind] += 1


def _program(worker: int, workers: int, accumulate: int) -> list[Operation]:
    """Return the operations of a worker for one update."""
    count = max(2 * workers - 1, accumulate)  # with fewer, operations on the others are left out
    program: list[Operation] = []
    down, up = _Counter(program, worker), _Counter(program, 2 * workers - 1 - worker)
    for _ in range(2 * (workers - worker) - 1):
        down.add("F")
    for _ in range(worker):
        up.add("F")
        down.add("F")
    for _ in range(workers - worker):
        up.add("F", "B", WEIGHT)
    while up.done["F"] < down.done["F"] or down.done["F"] < count:
        if down.done["F"] < count:
            down.add("F")
        down.add("B", WEIGHT)
        up.add("F", "B", WEIGHT)
    for _ in range(worker):
        down.add("B")
        up.add("B")
    for _ in range(workers - worker):
        down.add("B", WEIGHT)
    for half in (up, down):
        while half.done[WEIGHT] < half.done["B"]:
            half.add(WEIGHT)
    program = [operation for operation in program if operation.microbatch < accumulate]
    return [*program, Operation(up.stage, "U", accumulate - 1), Operation(down.stage, "U", accumulate - 1)]
