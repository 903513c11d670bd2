"""Text for people: error messages, counts and plain tables."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from shutil import get_terminal_size
from typing import Any

MANY = 20
"""From this many names on, an error lists only the closest."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none; many of PyTorch's have several."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def suggestion(name: str, known: Collection[str]) -> str:
    """Return `did you mean 'petra'?`, or all names if none is close; of many names, those that are closest."""
    close = get_close_matches(name.lower(), known, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    if len(known) < MANY:
        return f"choose from {', '.join(known)}"
    return f"the closest of {len(known)} are {', '.join(get_close_matches(name.lower(), known, n=3, cutoff=0.0))}"


def unknown(kind: str, name: str, known: Iterable[str], command: str = "") -> ValueError:
    """Return an error for a name that does not exist, with the closest one or all of them.

    Args:
        kind: What the name stands for, such as `model`.
        name: The name that was given.
        known: The names there are.
        command: The command that lists all of them, for names that are too many for an error.

    Returns:
        The error, to be raised by the caller.
    """
    names = list(known)
    more = f" (`{command}` lists all)" if command and len(names) >= MANY else ""
    return ValueError(f"there is no {kind} named {name!r}: {suggestion(name, names)}{more}")


def counted(number: float, what: str) -> str:
    """Return `1 stage` or `2 stages`."""
    return f"{number:g} {what}{'' if number == 1 else 's'}"


def render(
    header: Sequence[str],
    rows: Sequence[Sequence[object]],
    left: int = 1,
    width: int | None = None,
    spaced: bool = False,
) -> str:
    """Return a plain table with columns of equal width.

    Args:
        header: The title of each column.
        rows: The cells of each row.
        left: The number of columns that are aligned to the left; the others are aligned to the right.
        width: The width of the table, where the text of long cells is wrapped; None wraps nothing.
        spaced: If rows are wrapped, separate them by empty lines.

    Returns:
        The lines of the table.
    """
    lines = [[str(cell) for cell in line] for line in (header, *rows)]
    widths = _column_widths(lines, width)
    first = "\n".join(_row(lines[0], widths, left, above=True))
    others = ["\n".join(_row(line, widths, left)) for line in lines[1:]]
    gap = "\n\n" if spaced and any("\n" in row for row in others) else "\n"
    return "\n".join([first, "  ".join("-" * width for width in widths), gap.join(others)]).rstrip("\n")


def _row(cells: Sequence[str], widths: Sequence[int], left: int, above: bool = False) -> list[str]:
    """Return the lines of a row: one, or more if cells are wrapped. Space is below shorter cells, or `above` them."""
    wrapped = [[c] if len(c) <= w else textwrap.wrap(c, w, **_WRAP) for c, w in zip(cells, widths, strict=True)]
    height = max(map(len, wrapped))
    columns = []
    for i, (lines, w) in enumerate(zip(wrapped, widths, strict=True)):
        space = [""] * (height - len(lines))
        filled = [*space, *lines] if above else [*lines, *space]
        columns.append([text.ljust(w) if i < left else text.rjust(w) for text in filled])
    return ["  ".join(line).rstrip() for line in zip(*columns, strict=True)]


_WRAP: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}


def _column_widths(lines: Sequence[Sequence[str]], width: int | None) -> list[int]:
    """Return the widths of the columns; the widest are narrowed, down to their longest word, until the table fits."""
    columns = list(zip(*lines, strict=True))
    widths = [max(map(len, column)) for column in columns]
    if width is None:
        return widths
    words = [max((len(word) for cell in column for word in cell.split()), default=0) for column in columns]
    while sum(widths) + 2 * (len(widths) - 1) > width:
        slack, widest = max((w - least, i) for i, (w, least) in enumerate(zip(widths, words, strict=True)))
        if slack == 0:
            break
        widths[widest] -= 1
    return widths


def terminal_width() -> int:
    """Return the number of columns of the terminal, or 80 if the output is not one."""
    return get_terminal_size().columns


def mebibytes(count: int) -> str:
    """Return a number of bytes as `1.50 MiB`."""
    return f"{count / 2**20:.2f} MiB"


def memory_size(count: int) -> str:
    """Return a number of bytes as `1.50 GiB`, or as `1.50 MiB` or `1.5 KiB` if it is small."""
    if count < 2**20:
        return f"{count / 2**10:.1f} KiB"
    return mebibytes(count) if count < 2**30 else f"{count / 2**30:.2f} GiB"


_UNITS = {"b": 1, **{f"{prefix}ib": 2 ** (10 * i) for i, prefix in enumerate("kmgt", 1)}}
_UNITS |= {f"{prefix}b": 10 ** (3 * i) for i, prefix in enumerate("kmgt", 1)}


def parse_bytes(size: str | int) -> int:
    """Return a number of bytes.

    Args:
        size: A number of bytes, or a text like `8 GiB`, `800MB` or `1.5GiB`.

    Returns:
        The number.

    Raises:
        ValueError: If it is neither.
    """
    if isinstance(size, int):
        found = float(size)
    else:
        number = size.strip().lower().rstrip("bikmgt ")
        unit = size.strip().lower()[len(number) :].strip() or "b"
        try:
            found = float(number) * _UNITS[unit]
        except (KeyError, ValueError):
            raise ValueError(f"{size!r} is not an amount of memory: give one like 8GiB, 800MB or 8589934592") from None
    if not 0 < found < 2**60:
        raise ValueError(f"an amount of memory of {size!r} makes no sense: give one like 8GiB")
    return int(found)
