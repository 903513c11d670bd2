"""Stages, the executors that carry a schedule out on them, and the transports that join ranks."""

from petra.execution.balance import DoesNotFit, assign, balance
from petra.execution.captured import CapturedExecutor
from petra.execution.local import LocalExecutor, Observer
from petra.execution.partition import partition
from petra.execution.processes import LostRank, ProcessTransport
from petra.execution.rank import RankExecutor
from petra.execution.recorder import GraphRecorder, Recorder
from petra.execution.stage import Diverged, Finished, NonFiniteLoss, Stage
from petra.execution.templates import Rehearsal
from petra.execution.threads import run_together
from petra.execution.transport import Alone, Place, Transport

__all__ = [
    "Alone",
    "CapturedExecutor",
    "Diverged",
    "DoesNotFit",
    "Finished",
    "GraphRecorder",
    "LocalExecutor",
    "LostRank",
    "NonFiniteLoss",
    "Observer",
    "Place",
    "ProcessTransport",
    "RankExecutor",
    "Recorder",
    "Rehearsal",
    "Stage",
    "Transport",
    "assign",
    "balance",
    "partition",
    "run_together",
]
