"""What errors say, in one line."""

from __future__ import annotations


def first_line(error: BaseException) -> str:
    """The first line of its message, for many of PyTorch's go on; its type if it says nothing."""
    return next(iter(str(error).splitlines()), type(error).__name__)
