"""The names of networks, and the functions that build them."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import torch

from petra.formatting import unknown
from petra.models.imported import import_function, is_import_path
from petra.models.timm_models import PREFIX, timm_entry, timm_has
from petra.reversible import Network

LISTING = Path(__file__).with_name("listing.json")
"""The rows that `petra models` prints. A test compares it with `listing()`."""
_STORED_COUNTS: dict[str, int] = {row["name"]: row["parameters"] for row in json.loads(LISTING.read_text())}
_IMAGENET = {"num_classes": 1000, "stem": "imagenet"}


@dataclass(frozen=True)
class Entry:
    """A named network: the function that builds it, and the arguments that its name stands for."""

    name: str
    """Name of the network."""
    summary: str
    """One line about the network."""
    build: Callable[..., Network]
    """Function that builds the network."""
    arguments: dict[str, Any]
    """Arguments of `build` that the name stands for."""

    @property
    def parameters(self) -> int:
        """Number of parameters; for a network of images with 1000 classes and a stem for ImageNet, if it has a choice.

        Stored for the networks of Petra. Others are built on the meta device to count them.
        """
        stored = _STORED_COUNTS.get(self.name)
        return self.count_parameters() if stored is None else stored

    def count_parameters(self) -> int:
        """Build the network on the meta device, and count its parameters.

        Returns:
            Number of parameters, as `parameters` defines it.
        """
        taken = signature(self.build).parameters
        imagenet = _IMAGENET if "in_channels" in taken else {}
        chosen = {name: value for name, value in imagenet.items() if name in taken} | self.arguments
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in self.build(**chosen).parameters())


_ENTRIES: dict[str, Entry] = {}


def register(name: str, summary: str, build: Callable[..., Network], **arguments: Any) -> None:
    """Register a network under a name.

    Args:
        name: Name of the network, for `create` and `petra train --model`.
        summary: One line about the network, for `petra models`.
        build: Function that builds the network.
        **arguments: Arguments of `build` that the name stands for. Callers of `create` may override them.

    Raises:
        ValueError: If the name is taken.
    """
    if name in _ENTRIES:
        raise ValueError(f"there is already a network named {name!r}: choose another name")
    _ENTRIES[name] = Entry(name, summary, build, arguments)


def create(name: str, **arguments: Any) -> Network:
    """Build a network by name.

    Args:
        name: Name of the network; `petra models` lists them. Or `timm:` and a name of timm, or
            `package.module:function`.
        **arguments: Arguments of the function that builds it, such as `num_classes` and `width`.

    Returns:
        The network, with newly initialised weights.

    Raises:
        ValueError: If there is no such network or argument, or if an argument is invalid.

    Example:
        >>> network = create("revnet18", num_classes=10, width=16)
    """
    entry = find(name)
    known = signature(entry.build).parameters
    for argument in arguments:
        if argument not in known:
            raise ValueError(f"{name} has no argument {argument!r}: it takes {', '.join(known)}")
    return entry.build(**{**entry.arguments, **arguments})


def find(name: str) -> Entry:
    """Find a registered network.

    Args:
        name: Name of the network, or `package.module:function` for a function that returns one.

    Returns:
        Its entry.

    Raises:
        ValueError: If there is no such network. The message suggests a similar name.
    """
    if name.startswith(PREFIX):
        return timm_entry(name)
    if name not in _ENTRIES and is_import_path(name):
        function = import_function(name)
        return Entry(name, (function.__doc__ or "a network").strip().partition("\n")[0], function, {})
    if name not in _ENTRIES:
        if timm_has(name):
            raise ValueError(f"there is no model named {name!r}: networks of timm are named {PREFIX}{name}")
        raise unknown("model", name, _ENTRIES, "petra models")
    return _ENTRIES[name]


def entries() -> list[Entry]:
    """List the registered networks.

    Returns:
        All entries, in the order in which they were registered.
    """
    return list(_ENTRIES.values())


def task(arguments: Collection[str]) -> str:
    """Return the task of a network in words.

    Args:
        arguments: Names of the arguments that the network takes.

    Returns:
        The task, such as "classes of images".
    """
    what = "images" if "in_channels" in arguments else "text" if "vocab_size" in arguments else "other inputs"
    return f"classes of {what}" if "num_classes" in arguments else f"the next token of {what}"


def listing() -> list[dict[str, Any]]:
    """Return what `petra models` prints of each network.

    Returns:
        Name, summary, task, family and number of parameters of each network, in order.
    """
    return [
        {
            "name": entry.name,
            "summary": entry.summary,
            "task": task(signature(entry.build).parameters),
            "family": entry.build.__name__,
            "parameters": entry.parameters,
        }
        for entry in entries()
    ]
