"""How malloc treats memory that tensors have freed."""

from __future__ import annotations

import ctypes
import os

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # as in malloc.h
_USER_SETTINGS = ("GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")


def keep_freed_memory() -> bool:
    """Make glibc's malloc keep freed memory for later tensors, and return whether it does.

    By default, malloc returns large blocks to the system, which has to clear every page before it hands them out
    again. A rank with stages of different sizes spent a quarter of its time on that. Nothing changes if the
    environment configures malloc.
    """
    if any(name in os.environ for name in _USER_SETTINGS):
        return False
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is None:
        return False
    return bool(set_option(_MMAP_THRESHOLD, 1 << 30) and set_option(_TRIM_THRESHOLD, -1))
