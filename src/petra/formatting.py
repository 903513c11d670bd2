"""Text for people: error messages, counts and plain tables."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none; many of PyTorch's have several."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def suggestion(name: str, known: Collection[str]) -> str:
    """Return `did you mean 'petra'?`, or all names if none is close."""
    close = get_close_matches(name.lower(), known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(known)}"


def unknown(kind: str, name: str, known: Iterable[str]) -> ValueError:
    """Return an error for a name that does not exist, with the closest one or all of them.

    Args:
        kind: What the name stands for, such as `model`.
        name: The name that was given.
        known: The names there are.

    Returns:
        The error, to be raised by the caller.
    """
    return ValueError(f"there is no {kind} named {name!r}: {suggestion(name, list(known))}")


def counted(number: float, what: str) -> str:
    """Return `1 stage` or `2 stages`."""
    return f"{number:g} {what}{'' if number == 1 else 's'}"


def render(header: Sequence[str], rows: Sequence[Sequence[object]], left: int = 1) -> str:
    """Return a plain table with columns of equal width.

    Args:
        header: The title of each column.
        rows: The cells of each row.
        left: The number of columns that are aligned to the left; the others are aligned to the right.

    Returns:
        The lines of the table.
    """
    lines = [[str(cell) for cell in line] for line in (header, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def mebibytes(count: int) -> str:
    """Return a number of bytes as `1.50 MiB`."""
    return f"{count / 2**20:.2f} MiB"
