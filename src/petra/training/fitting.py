"""Brings network and data together: what the builder of a network asks for, and what the data can tell."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from inspect import signature
from typing import Any

from petra import models

_TELLING = {"in_channels", "vocab_size", "num_classes"}
"""The arguments that tell what a network reads and what it gives."""
_EXACT = ("in_channels", "image_size")
_AT_LEAST = ("num_classes", "vocab_size", "length")


def network_arguments(model: str, told: Mapping[str, Any], options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Arguments of the network: what it takes of ``told``, the data's own, then ``options``, which say more.

    Raises ValueError if the network is for other data; ``where`` is what the data is called.
    """
    takes = accepted(model)
    if takes & _TELLING != told.keys() & _TELLING:
        fitting = [e.name for e in models.entries() if accepted(e.name) & _TELLING == told.keys() & _TELLING]
        choice = f"choose one that does, such as {', '.join(fitting[:3])}" if fitting else "there is none that does yet"
        raise ValueError(f"{model} is for {task(takes)}, but {where} asks for {task(told)}: {choice}")
    if "image_size" in takes and not isinstance(size := told["image_size"], int):
        raise ValueError(f"{model} takes square images, but those of {where} are {size[0]}×{size[1]}: cut them")
    for name in told.keys() & options.keys():
        if name in _EXACT and options[name] != told[name]:
            raise ValueError(f"{name} is {options[name]}, but {where} has {told[name]}: leave it out")
        if name in _AT_LEAST and options[name] < told[name]:
            raise ValueError(f"{name} is {options[name]}, but {where} has {told[name]}: give no less")
    return {**{name: value for name, value in told.items() if name in takes}, **options}


def check_fits(model: str, arguments: Mapping[str, Any], told: Mapping[str, Any], where: str) -> None:
    """Raise ValueError if a network that was built with ``arguments`` is not for data that tells this of itself.

    That is but for its vocabulary, which data can be read with.
    """
    takes = accepted(model)
    if takes & _TELLING != told.keys() & _TELLING:
        raise ValueError(f"{model} is for {task(takes)}, but {where} asks for {task(told)}: give data of the same kind")
    for name in ("in_channels", "image_size", "num_classes"):
        if name not in told or name not in arguments:
            continue
        own, other = arguments[name], told[name]
        if not (other <= own if name in _AT_LEAST else other == own):
            raise ValueError(f"the network has {name} {own}, but {where} has {other}: give data of the same kind")


def accepted(model: str) -> set[str]:
    """The names of the arguments that a network takes."""
    return set(signature(models.find(model).build).parameters)


def task(arguments: Collection[str]) -> str:
    """What a network with these arguments is for."""
    what = "images" if "in_channels" in arguments else "text" if "vocab_size" in arguments else "other inputs"
    return f"classes of {what}" if "num_classes" in arguments else f"the next token of {what}"


def usual_arguments(model: str) -> dict[str, Any]:
    """What a network is built with if nothing else is said; arguments that have to be given are left out."""
    entry = models.find(model)
    taken = signature(entry.build).parameters.values()
    return {p.name: p.default for p in taken if p.default is not p.empty} | entry.arguments


def check_options(model: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError for an option of another kind than the network usually has there."""
    usual, taken = usual_arguments(model), signature(models.find(model).build).parameters
    for name, value in options.items():
        example = usual.get(name)
        for kind, wanted in _KINDS:
            if not isinstance(example, kind) or (kind is int and "float" in str(taken[name].annotation)):
                continue
            if not isinstance(value, kind) or isinstance(value, bool) != isinstance(example, bool):
                shown = ",".join(map(str, example)) if isinstance(example, list | tuple) else example
                raise ValueError(f"{name} is {value!r}, but {model} takes {wanted}: give one like {shown}")
            break


_KINDS: tuple[tuple[Any, str], ...] = (
    (bool, "true or false"),
    (int, "a whole number"),
    ((int, float), "a number"),
    (str, "a word"),
    ((list, tuple), "a number for each group"),
)
