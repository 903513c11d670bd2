"""What malloc does with memory that tensors give back."""

from __future__ import annotations

import ctypes
import os

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # as in malloc.h
_OWN_SETTINGS = ("GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")


def keep_freed_memory() -> bool:
    """Have glibc's malloc keep what is freed for the next tensor; whether it does now.

    By itself it gives large pieces back to the system, which has to clear every page of them before it hands them out
    again. A rank that holds stages of different sizes spent a quarter of its time on that. Left as it is where the
    environment sets malloc up itself.
    """
    if any(name in os.environ for name in _OWN_SETTINGS):
        return False
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return False
    return bool(set_option(_MMAP_THRESHOLD, 1 << 30) and set_option(_TRIM_THRESHOLD, -1))
