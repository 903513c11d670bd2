"""Cuts a list of layers into stages."""

from __future__ import annotations

from collections.abc import Sequence


def partition(layers: int, stages: int | Sequence[int]) -> list[range]:
    """The layers of each stage: ``stages`` of about equal length, or as many as each entry says.

    >>> partition(10, 4)
    [range(0, 3), range(3, 6), range(6, 8), range(8, 10)]
    >>> partition(10, [1, 4, 4, 1])
    [range(0, 1), range(1, 5), range(5, 9), range(9, 10)]
    """
    if isinstance(stages, str | float):
        raise ValueError(f"stages is {stages!r}: give a whole number, or a list with the layers of each stage")
    if not isinstance(stages, Sequence):
        stages = int(stages)
        if stages < 1:
            raise ValueError(f"stages is {stages}: a network needs at least one")
        if stages > layers:
            raise ValueError(f"stages is {stages}, but the network has only {layers} layers: give at most {layers}")
        small, larger = divmod(layers, stages)
        sizes = [small + 1] * larger + [small] * (stages - larger)
    else:
        sizes = list(stages)
        if not sizes or min(sizes) < 1 or sum(sizes) != layers:
            wrong = f", not {sum(sizes)}" if sum(sizes) != layers else ""
            raise ValueError(
                f"stages is {sizes}: the numbers of layers of the stages must be 1 or more "
                f"and add up to the network's {layers}{wrong}"
            )
    cuts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return [range(cuts[i], cuts[i + 1]) for i in range(len(sizes))]
