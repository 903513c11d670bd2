"""Creates the optimizer of a stage with the factory that a user gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn

from petra.optim import CombinedOptimizer

OptimizerFactory = Callable[..., torch.optim.Optimizer | Sequence[torch.optim.Optimizer]]
"""Creates the optimizer of a stage from the parameters that are trained there, or several optimizers.

A function that has an argument `named_parameters` is given pairs of name and parameter in it. A function with two
required arguments is given the parameters and their names.
"""


def create_optimizer(
    factory: OptimizerFactory, parameters: Sequence[nn.Parameter], names: Mapping[Tensor, str]
) -> torch.optim.Optimizer:
    """Create the optimizer of a stage.

    Args:
        factory: The user's function.
        parameters: The parameters that are trained.
        names: The name of each parameter in the network.

    Returns:
        The optimizer; several are combined.

    Raises:
        ValueError: If the function returns something else.
    """
    own = list(parameters)
    found: Any = _call(factory, own, [names.get(p, str(i)) for i, p in enumerate(own)])
    if isinstance(found, list | tuple) and found and all(isinstance(one, torch.optim.Optimizer) for one in found):
        found = found[0] if len(found) == 1 else CombinedOptimizer(found)
    if not hasattr(found, "param_groups"):
        raise ValueError(
            f"the optimizer function returns a {type(found).__name__}: return the optimizer, or a list of optimizers"
        )
    return found  # type: ignore[no-any-return]


def _call(factory: OptimizerFactory, parameters: list[nn.Parameter], names: list[str]) -> Any:
    try:
        arguments = signature(factory).parameters
    except (TypeError, ValueError):  # a function without a signature, such as a built-in one
        return factory(parameters)
    positional = [
        a for a in arguments.values() if a.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    ]
    named = list(zip(names, parameters, strict=True))
    if "named_parameters" in arguments:
        first = positional and positional[0].name == "named_parameters"
        return factory(named) if first else factory(parameters, named_parameters=named)
    if len(positional) > 1 and positional[1].default is Parameter.empty:
        return factory(parameters, names)
    return factory(parameters)
