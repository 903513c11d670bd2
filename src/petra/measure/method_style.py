"""The colour and the marker of every method, the same in all figures and reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LineStyle:
    """How the line of a method is drawn."""

    light: str
    """The colour on a light background."""
    dark: str
    """The colour on a dark background."""
    marker: str
    """The marker, by its name in matplotlib; lines can be told apart without their colours."""


METHOD_STYLES = {
    "backprop": LineStyle("#57606a", "#b1bac4", "o"),
    "reversible": LineStyle("#0072b2", "#58a6ff", "s"),
    "pareprop": LineStyle("#1b9fb5", "#4fd1e0", "v"),
    "petra": LineStyle("#d55e00", "#ff8c42", "^"),
    "petra-stashed": LineStyle("#b8860b", "#e3b341", "D"),
    "checkpointed": LineStyle("#c2508f", "#f7b6dc", "X"),
    "delayed": LineStyle("#8b1a4f", "#e5679a", "P"),
    "features-replay": LineStyle("#00855f", "#3fb98f", "d"),
    "ddg": LineStyle("#6a3fb5", "#b392f0", "*"),
    "dni": LineStyle("#7a7a1a", "#c5c84a", "h"),
}
"""The style of each method."""


def styles_of(methods: Sequence[str]) -> list[LineStyle]:
    """Return a style for each of several curves.

    The first curve of a method has the style of the method, the others have styles of methods that are not drawn.

    Args:
        methods: The method of each curve.

    Returns:
        The style of each curve; they differ as long as there are enough of them.
    """
    free = [style for name, style in METHOD_STYLES.items() if name not in methods]
    every = list(METHOD_STYLES.values())
    seen: set[str] = set()
    found = []
    for i, method in enumerate(methods):
        if method in METHOD_STYLES and method not in seen:
            found.append(METHOD_STYLES[method])
        else:
            found.append(free.pop(0) if free else every[i % len(every)])
        seen.add(method)
    return found
