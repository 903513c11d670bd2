"""Errors for names that do not exist, and numbers of things in words."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def unknown(kind: str, name: str, known: Iterable[str]) -> ValueError:
    """An error that names what was asked for and what there is."""
    names = list(known)
    close = get_close_matches(name.lower(), names, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"choose from {', '.join(names)}"
    return ValueError(f"there is no {kind} named {name!r}: {hint}")


def counted(number: float, what: str) -> str:
    """``1 stage``, ``2 stages``."""
    return f"{number:g} {what}{'' if number == 1 else 's'}"
