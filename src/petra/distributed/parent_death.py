"""Processes whose parent is killed: a stopped rank continues, and ends."""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG = 1  # as in sys/prctl.h


def continue_when_parent_dies() -> None:
    """Have Linux send SIGCONT to this process when its parent dies.

    A process that is stopped then runs on, finds that the job is gone, and ends. Otherwise it would stay for ever. The
    signal does nothing to a process that is not stopped. Other systems have no such signal.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGCONT))
