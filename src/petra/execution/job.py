"""One process's part in a job of many, from meeting the others to leaving them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from petra.execution.processes import LostRank, ProcessTransport
from petra.execution.transport import Alone, Transport
from petra.execution.watchdog import Watchdog


class Spoken(Exception):
    """Why this process ends is said by another; ``code`` is the exit code to leave with."""

    def __init__(self, code: int = 1) -> None:
        super().__init__("another process says why")
        self.code = code


class JobFailed(RuntimeError):
    """Another process of the job is gone or stuck."""


def processes() -> int:
    """How many processes torchrun, or whoever sets its variables, has started."""
    return _variable("WORLD_SIZE", 1)


def restarts() -> int:
    """How often torchrun has started this job anew."""
    return _variable("TORCHELASTIC_RESTART_COUNT", 0)


def job_name() -> str | None:
    """What torchrun calls this job."""
    return os.environ.get("TORCHELASTIC_RUN_ID")


def first() -> bool:
    """Whether this is the first of the processes."""
    return _variable("RANK", 0) == 0


def _variable(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if text and not text.isdecimal():
        raise ValueError(f"the variable {name} is {text!r}: it has to be a whole number, as torchrun sets it")
    return int(text) if text else default


_met: list[bool] = []


def met() -> bool:
    """Whether this process has met the others, so that what goes wrong is said by one of them."""
    return bool(_met)


@contextmanager
def join(
    device: torch.device,
    *,
    replicas: int = 1,
    timeout: float = 300.0,
    orderly: tuple[type[BaseException], ...] = (),
) -> Iterator[Transport]:
    """Meet the other processes; inside, an error on any of them ends them all, with one message.

    ``timeout`` is how many seconds a process may be stuck. Exceptions of the types ``orderly`` are raised by all
    processes alike, as the way to leave early.
    """
    if processes() == 1:
        if replicas > 1:
            raise ValueError(f"{replicas} replicas need {replicas} processes: start them with --ranks or torchrun")
        yield Alone(device)
        return
    # The watchdog notices who is stuck. This is for what it cannot see, and much longer, because waiting for a
    # message that passes many stages may take many times what each of them takes.
    limit = timedelta(seconds=60 + 4 * timeout)
    meeting_point, process, world = _meeting_point(limit)
    # A job that torchrun starts anew finds the same store, with what the ranks before it have left there.
    store = PrefixStore(f"petra/{restarts()}", meeting_point)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" and _own_gpu() else "gloo"
    dist.init_process_group(backend, store=store, rank=process, world_size=world, timeout=limit)
    transport = ProcessTransport(device, replicas, limit)
    _met.append(True)
    names = [str(place) for place in transport.places()]
    # It has a connection of its own: that of the process group is taken as long as the group waits for its store.
    own_store = PrefixStore(f"petra/{restarts()}", _meeting_point(limit)[0])
    watchdog = Watchdog(own_store, process, names, transport.doing, timeout)
    early: BaseException | None = None
    try:
        # Nobody goes on, and perhaps fails and leaves, while another still opens its connections.
        transport.gather(None)
        try:
            yield transport
        except orderly as error:
            early = error
        transport.flush()
        transport.gather(None)  # nobody leaves while another still needs it
    except BaseException as error:
        with suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, which would cut the word off
        message = watchdog.explain(error) if isinstance(error, LostRank) else f"{transport.place}: {error}"
        if message is None or not watchdog.claim(message):
            raise Spoken(2 if isinstance(error, ValueError | OSError) else 1) from error
        if isinstance(error, LostRank):
            raise JobFailed(message) from error
        raise
    watchdog.close()
    dist.destroy_process_group()
    if early is not None:
        raise early


def _meeting_point(limit: timedelta) -> tuple[Store, int, int]:
    """A connection to the store at which all processes meet, the number of this one, and how many there are."""
    store, process, world = next(iter(rendezvous("env://", timeout=limit)))
    return store, process, world


def _own_gpu() -> bool:
    """Whether every process of this machine has a GPU to itself, without which NCCL cannot work."""
    return _variable("LOCAL_WORLD_SIZE", 1) <= torch.cuda.device_count()
