"""Runs a function in a job, again in every generation of it."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from petra.distributed.job import GenerationOver, JobFailed, ReportedElsewhere, connect_store, is_first_process, join
from petra.distributed.membership import JobEnded, Membership, Roster, member_number
from petra.distributed.snapshots import Snapshots
from petra.distributed.store_connection import StoreConnection
from petra.distributed.transport import Transport

Result = TypeVar("Result")


def run_in_job(
    body: Callable[[Transport, Snapshots | None], Result],
    device: torch.device,
    *,
    replicas: int = 1,
    timeout: float = 300.0,
    early_exit: tuple[type[BaseException], ...] = (),
    snapshot_every: int = 0,
    prepare: Callable[[], object] | None = None,
) -> Result:
    """Connect the processes of the job, and call a function in each.

    If the job replaces lost processes, the function is called again in every process when one was lost. It then gets
    the snapshots of the last call, and continues from them.

    Args:
        body: The function. It gets the transport of this process, and the snapshots if the job replaces processes.
        device: The device of this process.
        replicas: The number of replicas of the pipeline.
        timeout: The seconds after which a process that makes no progress counts as stuck.
        early_exit: Exceptions that all processes raise alike to leave early. They do not count as errors.
        snapshot_every: The most ticks to repeat when a process is lost.
        prepare: Does what takes time before the process is needed; called by processes that wait.

    Returns:
        The result of the function.
    """
    number = member_number()
    if number is None:
        with join(device, replicas=replicas, timeout=timeout, early_exit=early_exit) as transport:
            return body(transport, None)
    store = StoreConnection(lambda limit: connect_store(limit)[0], timedelta(seconds=60 + 4 * timeout))
    membership = Membership(store, number)
    snapshots, roster = Snapshots(snapshot_every, membership), None
    if prepare is not None:
        prepare()
    while True:
        try:
            roster = membership.wait(roster, timeout)
        except JobEnded:
            raise ReportedElsewhere from None
        except RuntimeError as error:  # of the store
            raise _launcher_is_gone() from error
        _become(roster, number)
        try:
            with join(
                device, replicas=replicas, timeout=timeout, early_exit=early_exit, generation=(membership, roster)
            ) as transport:
                try:
                    result = body(transport, snapshots)
                except early_exit:
                    snapshots.finish()
                    raise
                snapshots.finish()
                return result
        except GenerationOver:
            snapshots.disconnect()
        except (dist.DistNetworkError, dist.DistStoreError) as error:  # those of messages are `LostRank`
            raise _launcher_is_gone() from error
        gc.collect()  # the network and the optimizers of this generation


def _launcher_is_gone() -> Exception:
    """Return the error that tells the user so in the first process; the others are silent."""
    if is_first_process():
        return JobFailed("the process that started the job is gone")
    return ReportedElsewhere()


def _become(roster: Roster, number: int) -> None:
    """Set the environment variables of this process to those of its position in the roster."""
    position, size = str(roster.members.index(number)), str(len(roster.members))
    os.environ.update({"RANK": position, "LOCAL_RANK": position, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size})
