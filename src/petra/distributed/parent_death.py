"""Lets a stopped rank continue when its parent process is killed, so that it ends."""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG = 1  # as in sys/prctl.h


def continue_when_parent_dies() -> None:
    """Have Linux send SIGCONT to this process when its parent dies.

    A stopped process then continues, detects that the job is gone, and exits. Otherwise it would remain stopped. The
    signal has no effect on a process that is running. On other systems, this function does nothing.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGCONT))
