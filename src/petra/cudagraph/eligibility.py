"""Reasons, known in advance, why a pipeline cannot be captured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from petra.optim import CapturableOptimizer, optimizers_of
from petra.pipeline.stage import Stage
from petra.schedule import FlushEverySchedule, PipelineSchedule


def ineligible_reason(stages: Sequence[Stage], schedule: PipelineSchedule) -> str | None:
    """Return the reason, or None if there is no known reason."""
    if any(stage.stash is not None for stage in stages):
        if schedule.accumulate > 1:
            return "with accumulation, the weight stash does not change in the same way in every tick"
        if isinstance(schedule, FlushEverySchedule):
            return "where the pipeline is flushed, the weight stash does not change in the same way in every tick"
    return next(filter(None, map(_of_stage, stages)), None)


def _of_stage(stage: Stage) -> str | None:
    if stage.corrections is not None and stage.corrections.predicts and stage.stash is not None:
        return "predicted weights are stashed"
    if stage.method.saves_graphs:
        return f"{stage.method.name} keeps autograd graphs from one tick to the next"
    if stage.average is not None and stage.synthesizer is not None:
        return "synthesizers average their gradients over replicas in the middle of an action"
    for optimizer in optimizers_of(stage.optimizer):
        if isinstance(optimizer, CapturableOptimizer):
            continue
        if not all(group.get("fused") for group in optimizer.param_groups):
            return (
                f"{type(optimizer).__name__} is neither fused nor a CapturableOptimizer of petra.optim, so its "
                "learning rate would be constant in the graph"
            )
    return None


def groups_of(stage: Stage) -> list[dict[str, Any]]:
    """Return the parameter groups of the stage's optimizer; none if it has no optimizer."""
    return stage.optimizer.param_groups if stage.optimizer is not None else []
