"""Peak memory of a process on the CPU, as its allocator sees it."""

from __future__ import annotations

import ctypes
import threading
from contextlib import AbstractContextManager
from types import TracebackType


class _Mallinfo2(ctypes.Structure):
    """`struct mallinfo2` of malloc.h."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def bytes_in_use() -> int:
    """Return the bytes that malloc has given out to all threads of this process and that are not freed yet.

    Raises:
        RuntimeError: The C library has no `mallinfo2`.
    """
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        raise RuntimeError("memory is measured with mallinfo2: use a Linux system with glibc 2.33 or newer")
    mallinfo2.restype = _Mallinfo2
    found = mallinfo2()
    return int(found.uordblks + found.hblkhd)


class PeakMemory(AbstractContextManager["PeakMemory"]):
    """Samples `bytes_in_use` in a thread while it is entered.

    The thread runs while an operation of PyTorch computes, because operations release Python's lock.

    Args:
        interval: Seconds between two samples.
    """

    def __init__(self, interval: float = 5e-4) -> None:
        self.bytes = 0
        """The largest sample."""
        self._interval = interval
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> PeakMemory:
        self.bytes = bytes_in_use()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._done.wait(self._interval):
            self.bytes = max(self.bytes, bytes_in_use())
