"""Stages, and the executors that carry a schedule out on them."""

from petra.execution.local import LocalExecutor, Observer
from petra.execution.partition import partition
from petra.execution.stage import Diverged, Finished, NonFiniteLoss, Stage

__all__ = [
    "Diverged",
    "Finished",
    "LocalExecutor",
    "NonFiniteLoss",
    "Observer",
    "Stage",
    "partition",
]
