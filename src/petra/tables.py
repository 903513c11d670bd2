"""Plain tables for terminals."""

from __future__ import annotations

from collections.abc import Sequence


def render(header: Sequence[str], rows: Sequence[Sequence[object]], left: int = 1) -> str:
    """Columns of equal width, the first ``left`` of them flush left and the others flush right."""
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
    """A number of bytes as MiB."""
    return f"{count / 2**20:.2f} MiB"
