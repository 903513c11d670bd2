"""The one place where names of networks become networks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import Any

from petra.names import unknown
from petra.reversible import Network


@dataclass(frozen=True)
class Entry:
    """A named network: a function that builds it and the arguments that its name stands for."""

    name: str
    summary: str
    build: Callable[..., Network]
    arguments: dict[str, Any]


_ENTRIES: dict[str, Entry] = {}


def register(name: str, summary: str, build: Callable[..., Network], **arguments: Any) -> None:
    """Give ``build(**arguments)`` a name; callers of `create` may override every argument."""
    if name in _ENTRIES:
        raise ValueError(f"there is a network named {name!r} already: choose another name")
    _ENTRIES[name] = Entry(name, summary, build, arguments)


def create(name: str, **arguments: Any) -> Network:
    """Build a network by name, for example ``create("revnet18", num_classes=10, width=16)``."""
    entry = find(name)
    known = signature(entry.build).parameters
    for argument in arguments:
        if argument not in known:
            raise ValueError(f"{name} has no argument {argument!r}: it takes {', '.join(known)}")
    return entry.build(**{**entry.arguments, **arguments})


def find(name: str) -> Entry:
    """The entry of a name, or an error that helps."""
    if name not in _ENTRIES:
        raise unknown("model", name, _ENTRIES)
    return _ENTRIES[name]


def entries() -> list[Entry]:
    """All networks there are."""
    return list(_ENTRIES.values())
