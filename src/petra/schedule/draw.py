"""Draws a schedule as a text table: one row per stage, one column per phase."""

from __future__ import annotations

from petra.schedule.action import Action, Kind
from petra.schedule.table import ScheduleTable


def draw(table: ScheduleTable, mark: Action | None = None, width: int | None = None) -> str:
    """Draw a schedule as text.

    For example:

        tick     0   1        2
        stage 0  F0  F1       F2 B0 U
        stage 1  .   F0 B0 U  F1 B1 U

    Args:
        table: The schedule.
        mark: An action to highlight. It is printed between `>` and `<`.
        width: The number of characters of a line. Columns that do not fit follow below the others. None for no limit.

    Returns:
        The lines of the table, joined with newlines.
    """
    columns = [(t, phase) for t, tick in enumerate(table.ticks) for phase in tick]
    ticks = [f"{t}" if i == 0 or columns[i - 1][0] != t else "" for i, (t, _) in enumerate(columns)]
    rows = [["tick", *ticks]]
    for stage in range(table.stages):
        row = [f"stage {stage}"]
        for _, phase in columns:
            row.append(" ".join(_cell(a, a == mark) for a in phase if a.stage == stage) or ".")
        rows.append(row)
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns) + 1)]
    blocks: list[list[int]] = [[]]
    for i in range(1, len(columns) + 1):
        if width is not None and blocks[-1] and sum(widths[j] + 2 for j in (0, *blocks[-1], i)) - 2 > width:
            blocks.append([])
        blocks[-1].append(i)
    for block in blocks[1:]:  # the first column says which tick it belongs to
        rows[0][block[0]] = f"{columns[block[0] - 1][0]}"
    return "\n\n".join(
        "\n".join("  ".join(row[i].ljust(widths[i]) for i in (0, *block)).rstrip() for row in rows) for block in blocks
    )


def _cell(action: Action, marked: bool) -> str:
    text = "U" if action.kind is Kind.UPDATE else f"{action.kind.value}{action.microbatch}"
    return f">{text}<" if marked else text
