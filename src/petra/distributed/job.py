"""The part of one process in a job: it joins the other processes, reports errors once, and leaves in order."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from petra.distributed.host_message import BadMessage
from petra.distributed.membership import Membership, Roster
from petra.distributed.parent_death import continue_when_parent_dies
from petra.distributed.process_groups import LostRank
from petra.distributed.process_transport import ProcessTransport
from petra.distributed.transport import SingleProcess, Transport
from petra.distributed.watchdog import CONNECT_PATIENCE, DIAGNOSIS_TIMEOUT, GENERATION_INTERVAL, Generation, Watchdog


class ReportedElsewhere(Exception):
    """This process has to exit, and another process prints the reason.

    Args:
        code: The exit code of this process.
    """

    def __init__(self, code: int = 1) -> None:
        super().__init__("another process reports the reason")
        self.code = code


class GenerationOver(Exception):
    """A process of the job was lost, and this one has to join the next generation."""


class JobFailed(RuntimeError):
    """Another process of the job has died or hangs."""


def process_number() -> int:
    """Return the number of this process in the job."""
    return _variable("RANK", 0)


def world_size() -> int:
    """Return the number of processes of the job, as torchrun sets it in the environment."""
    return _variable("WORLD_SIZE", 1)


def restart_count() -> int:
    """Return how many times torchrun has restarted this job."""
    return _variable("TORCHELASTIC_RESTART_COUNT", 0)


def job_name() -> str | None:
    """Return torchrun's name of this job, or None without torchrun."""
    return os.environ.get("TORCHELASTIC_RUN_ID")


def is_first_process() -> bool:
    """Return whether this is the first process of the job."""
    return process_number() == 0


def _variable(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    if text and not text.isdecimal():
        raise ValueError(f"the environment variable {name} is {text!r}: give a whole number, as torchrun does")
    return int(text) if text else default


_joined = threading.Event()
_excepthooks: list[tuple[Callable[..., object], Callable[..., object]]] = []
"""For each connection: the `sys.excepthook` that PyTorch set, and the one before it."""


def has_joined() -> bool:
    """Return whether this process has joined the others, so that one of them reports errors for all."""
    return _joined.is_set()


@contextmanager
def join(
    device: torch.device,
    *,
    replicas: int = 1,
    timeout: float = 300.0,
    early_exit: tuple[type[BaseException], ...] = (),
    generation: tuple[Membership, Roster] | None = None,
) -> Iterator[Transport]:
    """Connect the processes that torchrun or `petra train --ranks` has started.

    Inside this context, an error in one process ends all of them, and one of them reports it.

    Args:
        device: The device of this process.
        replicas: The number of replicas of the pipeline.
        timeout: The seconds after which a process that makes no progress counts as stuck.
        early_exit: Exceptions that all processes raise alike to leave the context early. They do not count as errors.
        generation: This process in a job whose lost processes are replaced, and the current processes of the job.

    Yields:
        The transport of this process.

    Raises:
        ValueError: If there is one process and several replicas.
        JobFailed: If another process has died or hangs, and this process reports it.
        ReportedElsewhere: If another process reports the error.
        GenerationOver: If a process was lost and the job goes on; only with `generation`.
    """
    if world_size() == 1:
        if replicas > 1:
            raise ValueError(f"{replicas} replicas need {replicas} processes: start them with --ranks or torchrun")
        yield SingleProcess(device)
        return
    # The watchdog detects processes that are stuck. This limit is a fallback. It is much longer, because a message
    # that passes many stages may take many times as long as each of them.
    limit = timedelta(seconds=60 + 4 * timeout)
    # A job that torchrun restarts has the same store, with the entries of its previous attempt.
    prefix = f"petra/{restart_count()}" + (f".{generation[1].generation}" if generation is not None else "")
    with _guarded(generation):
        transport = _connect(device, replicas, limit, prefix)
    _joined.set()
    names = [str(position) for position in transport.positions()]
    # The watchdog needs its own connection, because the process group blocks its connection while it waits.
    watchdog_store = PrefixStore(prefix, connect_store(limit)[0])
    watched = (
        None
        if generation is None
        else Generation(*generation, transport.interrupt, lambda: transport.groups.connecting)
    )
    watchdog = Watchdog(watchdog_store, process_number(), names, transport.activity, timeout, generation=watched)
    leaving: BaseException | None = None
    try:
        # No process may continue, and perhaps fail and exit, while another one still connects.
        transport.gather(None)
        try:
            yield transport
        except early_exit as error:
            leaving = error
        transport.flush()
        transport.gather(None)  # no process may exit while another one still needs it
        if generation is not None:
            generation[0].report_done()
    except BaseException as error:
        if isinstance(error, LostRank | BadMessage) and generation is not None:
            transport.interrupt()  # the ranks that wait for this one get an error, too
            if _another_generation(*generation, lost=isinstance(error, LostRank)):
                watchdog.close()
                transport.close_threads()
                transport.groups.leave_behind()
                _leave()
                raise GenerationOver from None
        with suppress(ValueError):  # outside the main thread
            # torchrun sends it when the first process exits, which must not interrupt the report.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        transport.groups.leave_behind()  # this process must not wait for others when it ends
        message = watchdog.diagnose(error) if isinstance(error, LostRank) else f"{transport.position}: {error}"
        if message is None or not watchdog.report_failure(message):
            raise ReportedElsewhere(2 if isinstance(error, ValueError | OSError) else 1) from error
        if isinstance(error, LostRank):
            raise JobFailed(message) from error
        if isinstance(error, OSError) and error.errno is not None:  # of the system, which does not know the rank
            raise OSError(message) from error
        raise
    watchdog.close()
    _disconnect()  # without `_leave`: a process that leaves early reports why, as one that has joined
    if leaving is not None:
        raise leaving


def _connect(device: torch.device, replicas: int, limit: timedelta, prefix: str) -> ProcessTransport:
    """Connect this process to the others."""
    job_store, process, world = connect_store(limit)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" and _gpu_per_process() else "gloo"
    store = PrefixStore(prefix, job_store)
    excepthook = sys.excepthook
    dist.init_process_group(backend, store=store, rank=process, world_size=world, timeout=limit)
    _excepthooks.append((sys.excepthook, excepthook))
    return ProcessTransport(device, replicas, limit)


def _leave() -> None:
    """Disconnect, and forget that this process has joined the others."""
    if dist.is_initialized():
        _disconnect()
    _joined.clear()


def _disconnect() -> None:
    """Close the connections to the other processes."""
    dist.destroy_process_group()
    while _excepthooks:  # PyTorch does not restore it, so the hooks of successive jobs would pile up
        installed, before = _excepthooks.pop()
        if sys.excepthook is installed:
            sys.excepthook = before


def _another_generation(membership: Membership, roster: Roster, lost: bool) -> bool:
    """Wait for the next generation, and return whether there is one.

    If no process is lost, a message or a connection was, and this process asks for a generation of the same processes.
    """
    try:
        if lost and membership.wait_for_change(roster.generation, DIAGNOSIS_TIMEOUT):
            return True
        membership.ask_for_another(roster)
        return membership.wait_for_change(roster.generation, DIAGNOSIS_TIMEOUT)
    except RuntimeError:  # the launcher is gone, and its store
        return False


@contextmanager
def _guarded(generation: tuple[Membership, Roster] | None) -> Iterator[None]:
    """A context in which a process connects to others that may be lost meanwhile.

    Nothing interrupts a connection to a lost process. So a process that does not notice that the generation is over
    ends itself, and is replaced.
    """
    if generation is None:
        yield
        return
    membership, roster = generation
    connected = threading.Event()

    def guard() -> None:
        with suppress(RuntimeError):  # the launcher is gone, which ends this process anyway
            while not connected.wait(GENERATION_INTERVAL):
                if membership.generation != roster.generation and not connected.wait(CONNECT_PATIENCE):
                    membership.replace_this_process(
                        f"process {membership.number} is replaced: it was still connecting {CONNECT_PATIENCE:.0f} s "
                        "after a process was lost"
                    )

    thread = threading.Thread(target=guard, name="petra-connecting", daemon=True)
    thread.start()
    try:
        yield
    except RuntimeError:
        if not membership.wait_for_change(roster.generation, DIAGNOSIS_TIMEOUT):
            raise
        _leave()
        raise GenerationOver from None
    finally:
        connected.set()
        thread.join()


def connect_store(limit: timedelta) -> tuple[Store, int, int]:
    """Return a new connection to the store of the job, the number of this process, and the number of processes."""
    continue_when_parent_dies()
    store, process, world = next(iter(rendezvous("env://", timeout=limit)))
    return store, process, world


def _gpu_per_process() -> bool:
    """Return whether every process of this machine has its own GPU, which NCCL requires."""
    return _variable("LOCAL_WORLD_SIZE", 1) <= torch.cuda.device_count()
