"""Optimizers by the name of their class: of `torch.optim`, or of any module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from inspect import Parameter, isclass, signature
from typing import Any

import torch
from torch import nn

from petra.formatting import first_line, suggestion
from petra.trainer.optimizers import OPTIMIZERS, parameter_groups

_UNUSABLE = ("Optimizer", "LBFGS", "SparseAdam")


def find_optimizer(name: str) -> Any:
    """Return the class with this name.

    Args:
        name: A class of `torch.optim`, with or without the package and in any case; or `package.module:Class`.

    Returns:
        A class, or a function that creates an optimizer.

    Raises:
        ValueError: If there is none.
    """
    module_name, colon, attribute = name.partition(":")
    if colon:
        try:
            found = getattr(import_module(module_name), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(
                f"--optimizer is {name}: {first_line(error)}: give a name of torch.optim, or package.module:Class"
            ) from error
        if not callable(found):
            raise ValueError(f"--optimizer is {name}, which is a {type(found).__name__}: give a class or a function")
        return found
    known = {
        n.lower(): c
        for n, c in vars(torch.optim).items()
        if isclass(c) and issubclass(c, torch.optim.Optimizer) and n not in _UNUSABLE
    }
    short = name.removeprefix("torch.optim.").lower()
    if short not in known:
        names = [*OPTIMIZERS, *(n for n in known if n not in OPTIMIZERS)]
        raise ValueError(f"--optimizer is {name!r}: give a name or package.module:Class; {suggestion(short, names)}")
    return known[short]


def default_lr(name: str) -> float:
    """Return the default learning rate of an optimizer.

    Args:
        name: The name, as for `find_optimizer`.

    Returns:
        The learning rate.

    Raises:
        ValueError: If it has none.
    """
    default = _arguments(find_optimizer(name)).get("lr")
    if default is None or not isinstance(default.default, int | float):
        raise ValueError(f"--lr is missing, because {name} has no default: give it")
    return float(default.default)


def optimizer_by_name(
    name: str,
    parameters: Sequence[nn.Parameter],
    *,
    lr: float,
    weight_decay: float = 0.0,
    momentum: float | None = None,
    beta2: float | None = None,
    options: Mapping[str, Any] | None = None,
) -> torch.optim.Optimizer:
    """Create an optimizer. Norms, biases and other vectors have no weight decay.

    Args:
        name: The name, as for `find_optimizer`.
        parameters: The parameters.
        lr: The learning rate.
        weight_decay: The weight decay of matrices.
        momentum: The momentum or the first beta; None leaves it to the optimizer.
        beta2: The second beta; None leaves it to the optimizer.
        options: Further arguments.

    Returns:
        The optimizer.

    Raises:
        ValueError: If the optimizer does not take one of these.
    """
    create = find_optimizer(name)
    taken, given = _arguments(create), dict(options or {})
    if "betas" in taken and (momentum is not None or beta2 is not None):
        first, second = taken["betas"].default
        given.setdefault("betas", (first if momentum is None else momentum, second if beta2 is None else beta2))
    else:
        given |= {} if momentum is None else {"momentum": momentum}
        given |= {} if beta2 is None else {"beta2": beta2}
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    takes_any = any(p.kind is Parameter.VAR_KEYWORD for p in taken.values())
    for option in given:
        if option not in taken and not takes_any:
            names = [key for key in taken if key not in ("params", "lr", "weight_decay", "self")]
            raise ValueError(f"{name} takes no {option}: {suggestion(option, names)}")
    groups: Any = parameter_groups(parameters, weight_decay) if weight_decay else list(parameters)
    try:
        return create(groups, lr=lr, **given)  # type: ignore[no-any-return]
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"{name} cannot be created: {first_line(error)}") from error


def _arguments(create: Any) -> Mapping[str, Parameter]:
    try:
        return signature(create).parameters
    except (TypeError, ValueError):
        return {}
