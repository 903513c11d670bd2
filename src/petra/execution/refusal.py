"""Why the ticks of some pipelines cannot be recorded, as far as it is known before they begin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from petra.execution.stage import Stage
from petra.schedule import Flush, Order


def refusal(stages: Sequence[Stage], order: Order) -> str | None:
    """The reason, or None where none is known."""
    if isinstance(order, Flush):
        return f"{order.name} empties the pipeline for every update"
    if order.accumulate > 1 and any(stage.stash is not None for stage in stages):
        return "with accumulation, stashed weights are not one more with every tick"
    return next(filter(None, map(_of_stage, stages)), None)


def _of_stage(stage: Stage) -> str | None:
    if stage.corrected is not None and stage.corrected.predicts and stage.stash is not None:
        return "predicted weights are stashed"
    if stage.method.keeps_graphs:
        return f"{stage.method.name} keeps graphs from one tick to the next"
    if stage.average is not None:
        return "replicas average their gradients"
    for group in groups_of(stage):
        if not group.get("fused"):
            return f"{type(stage.optimizer).__name__} is not fused, so its learning rate would stay as recorded"
    return None


def groups_of(stage: Stage) -> list[dict[str, Any]]:
    """The groups of the stage's optimizer; none if it has no optimizer."""
    return stage.optimizer.param_groups if stage.optimizer is not None else []
