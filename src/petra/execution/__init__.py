"""Stages, and the executors that carry a schedule out on them."""

from petra.execution.local import LocalExecutor, Observer
from petra.execution.partition import partition
from petra.execution.rank import RankExecutor
from petra.execution.stage import Diverged, Finished, NonFiniteLoss, Stage
from petra.execution.templates import Rehearsal
from petra.execution.transport import Transport

__all__ = [
    "Diverged",
    "Finished",
    "LocalExecutor",
    "NonFiniteLoss",
    "Observer",
    "RankExecutor",
    "Rehearsal",
    "Stage",
    "Transport",
    "partition",
]
