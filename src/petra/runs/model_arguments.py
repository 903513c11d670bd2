"""Connects networks and data: the arguments that a network takes, and those that follow from the data."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

import torch

from petra import models
from petra.conversion import as_network
from petra.models.imported import is_import_path
from petra.models.registry import task
from petra.reversible import Network

_DEFINING = {"in_channels", "vocab_size", "num_classes"}
"""The arguments that tell what a network reads and what it predicts."""
_EXACT = ("in_channels", "image_size")
_AT_LEAST = ("num_classes", "vocab_size", "seq_len")


def network_arguments(
    model: str, data_arguments: Mapping[str, Any], options: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """Merge the arguments that follow from the data with the given ones.

    Args:
        model: The name of the network.
        data_arguments: The arguments that the data implies; those that the network does not take are left out.
        options: The given arguments; they take precedence.
        where: The name of the data in messages.

    Returns:
        The arguments to build the network with.

    Raises:
        ValueError: If the network is for another kind of data.
    """
    takes = accepted(model)
    if not is_import_path(model) and takes & _DEFINING != data_arguments.keys() & _DEFINING:
        fitting = [
            e.name for e in models.entries() if accepted(e.name) & _DEFINING == data_arguments.keys() & _DEFINING
        ]
        remedy = f"choose one that does, such as {', '.join(fitting[:3])}" if fitting else "there is none that does yet"
        raise ValueError(f"{model} is for {task(takes)}, but {where} asks for {task(data_arguments)}: {remedy}")
    if "image_size" in takes & data_arguments.keys() and not isinstance(size := data_arguments["image_size"], int):
        raise ValueError(f"{model} takes square images, but those of {where} are {size[0]}×{size[1]}: crop them")
    for name in data_arguments.keys() & options.keys():
        if name in _EXACT and options[name] != data_arguments[name]:
            raise ValueError(f"{name} is {options[name]}, but {where} has {data_arguments[name]}: leave it out")
        if name in _AT_LEAST and options[name] < data_arguments[name]:
            raise ValueError(f"{name} is {options[name]}, but {where} has {data_arguments[name]}: give no less")
    return {**{name: value for name, value in data_arguments.items() if name in takes}, **options}


def check_fits(model: str, arguments: Mapping[str, Any], data_arguments: Mapping[str, Any], where: str) -> None:
    """Raise ValueError if a network that was built with `arguments` is not for this data.

    The vocabulary is not compared: the data can be encoded with that of the network.
    """
    takes = accepted(model)
    if not is_import_path(model) and takes & _DEFINING != data_arguments.keys() & _DEFINING:
        raise ValueError(
            f"{model} is for {task(takes)}, but {where} asks for {task(data_arguments)}: give data of the same kind"
        )
    for name in ("in_channels", "image_size", "num_classes"):
        if name not in data_arguments or name not in arguments:
            continue
        own, other = arguments[name], data_arguments[name]
        if not (other <= own if name in _AT_LEAST else other == own):
            raise ValueError(f"the network has {name} {own}, but {where} has {other}: give data of the same kind")


def accepted(model: str) -> set[str]:
    """Return the names of the arguments that a network takes."""
    taken = signature(models.find(model).build).parameters.values()
    return {p.name for p in taken if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def default_arguments(model: str) -> dict[str, Any]:
    """Return the arguments that a network is built with by default; required arguments are left out."""
    entry = models.find(model)
    taken = signature(entry.build).parameters.values()
    found = {p.name: p.default for p in taken if p.default is not p.empty} | entry.arguments
    return {name: value for name, value in found.items() if _stored(value)} if is_import_path(model) else found


def _stored(value: Any) -> bool:
    """Return whether a value can be stored in `network.json`."""
    if isinstance(value, list | tuple):
        return all(map(_stored, value))
    return value is None or isinstance(value, bool | int | float | str)


def check_options(model: str, options: Mapping[str, Any]) -> None:
    """Raise ValueError for an argument whose type differs from that of the network's default."""
    defaults, taken = default_arguments(model), signature(models.find(model).build).parameters
    for name, value in options.items():
        example = defaults.get(name)
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
    (str, "a string"),
    ((list, tuple), "a number for each group"),
)


def options_for_both(model: str, other: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options for one network that also apply to another.

    If the same function builds both networks, these are the options that both names preset to the same value, or that
    neither presets: the depths of a RevNet-18 do not apply to a RevNet-34. Otherwise there are none.
    """
    first, second = models.find(model), models.find(other)
    if first.build is not second.build:
        return {}
    return {name: value for name, value in options.items() if first.arguments.get(name) == second.arguments.get(name)}


_EXAMPLES = {"in_channels": 3, "num_classes": 10, "image_size": 32, "vocab_size": 256, "seq_len": 64}
"""Arguments that follow from the data, while it is unknown."""


def build_network(model: str, arguments: Mapping[str, Any]) -> Network:
    """Build a network with random weights. The functions of users may return any module that can be cut into layers."""
    network: Any = models.create(model, **arguments)
    if not isinstance(network, torch.nn.Module):
        raise ValueError(f"{model} returns a {type(network).__name__}: return the network, as an nn.Module")
    return as_network(network)


def outline(model: str, options: dict[str, Any]) -> Network:
    """Build the network on the meta device; its layers do not depend on the data."""
    check_options(model, options)
    known = default_arguments(model)
    missing = {name: value for name, value in _EXAMPLES.items() if name in accepted(model) and name not in known}
    options = {**missing, **options}
    if is_import_path(model):
        return build_network(model, {**known, **options})
    defaults = {**default_arguments(model), **options}
    if "image_size" in defaults and "patch" in options:
        # Until the data is known: a size that patches and windows divide, however often they are merged.
        options = {"image_size": 8 * options["patch"] * defaults.get("window", 1), **options}
    with torch.device("meta"):
        return models.create(model, **options)
