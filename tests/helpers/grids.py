"""Selections from grids of parameters."""

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any


def all_pairs(*values: Sequence[Any], also: Iterable[tuple[Any, ...]] = ()) -> list[tuple[Any, ...]]:
    """Rows of a grid that contain each pair of values of any two parameters, instead of the whole product.

    The rows are the same in every process, as pytest-xdist requires.

    Args:
        values: The values of each parameter.
        also: Rows that are included in any case, such as combinations of three values that interact.
    """

    def pairs(row: tuple[Any, ...]) -> set[tuple[int, int, int, int]]:
        numbers = [options.index(value) for options, value in zip(values, row, strict=True)]
        return {(i, numbers[i], j, numbers[j]) for i, j in combinations(range(len(row)), 2)}

    grid = list(product(*values))
    rows = list(also)
    missing = set().union(*map(pairs, grid)).difference(*map(pairs, rows))
    while missing:
        rows.append(max(grid, key=lambda row: len(pairs(row) & missing)))  # the first of the best
        missing -= pairs(rows[-1])
    return rows
