"""Gradients of evaluations that have a graph, and of parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from petra.reversible.module_state import submodules
from petra.reversible.streams import Gradients, Streams

ParameterGradients = dict[nn.Parameter, Tensor]
"""A gradient for each parameter that was used."""


class Reversal(NamedTuple):
    """The result of a reverse pass through layers."""

    inputs: Streams
    """The reconstructed inputs."""
    gradients: Gradients
    """The gradients of the inputs."""
    parameters: ParameterGradients
    """The gradients of the parameters."""


def trainable(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters of the modules that require a gradient, each once."""
    held = (p for module in submodules(modules) for p in module._parameters.values())
    return list(dict.fromkeys(p for p in held if p is not None and p.requires_grad))


def add_gradients(total: ParameterGradients, more: ParameterGradients) -> None:
    """Add `more` to `total`, leaving the tensors of both unchanged."""
    for parameter, gradient in more.items():
        total[parameter] = total[parameter] + gradient if parameter in total else gradient


@contextmanager
def without_hooks(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Disable the hooks on the gradients of the parameters.

    Gradients that are computed in parts and then returned to autograd must pass the hooks once, as a whole.
    """
    dicts = [p._backward_hooks for p in parameters if p._backward_hooks]
    saved = [dict(hooks) for hooks in dicts]
    for hooks in dicts:
        hooks.clear()  # in place, because autograd refers to the same dict
    try:
        yield
    finally:
        for hooks, own in zip(dicts, saved, strict=True):
            hooks.update(own)


@contextmanager
def uncached_parametrizations() -> Iterator[None]:
    """Compute parametrized weights whenever they are read.

    Weights that `torch.nn.utils.parametrize.cached` keeps from an evaluation without a graph would have no gradient.
    """
    enabled = parametrize._cache_enabled
    parametrize._cache_enabled = 0
    try:
        yield
    finally:
        parametrize._cache_enabled = enabled


def saved_tensors(outputs: Streams) -> list[Tensor]:
    """Return the tensors that the graph of the outputs holds for its backward pass, some more than once."""
    found: list[Tensor] = []
    nodes = [y.grad_fn for y in outputs if y.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        saved = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        saved += getattr(node, "saved_tensors", ())  # of functions written in Python
        for value in saved:
            found += [v for v in (value if isinstance(value, list | tuple) else (value,)) if isinstance(v, Tensor)]
        below = [n for n, _ in node.next_functions if n is not None and n not in seen]
        seen.update(below)
        nodes += dict.fromkeys(below)
    return found


def vjp(outputs: Streams, inputs: Streams, parameters: list[nn.Parameter], gradients: Gradients) -> Reversal:
    """Return the gradients of the inputs and parameters of an evaluation from those of its outputs."""
    pairs = [
        (out, grad.to(out.dtype))  # under autocast a residual has a lower precision than its stream
        for out, grad in zip(outputs, gradients, strict=True)
        if grad is not None and out.requires_grad
    ]
    wanted = [*(x for x in inputs if x.requires_grad), *parameters]
    if not pairs or not wanted:
        return Reversal(inputs, tuple(None for _ in inputs), {})
    found = iter(torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], allow_unused=True))
    into_inputs = tuple(next(found) if x.requires_grad else None for x in inputs)
    into_parameters = {p: g for p, g in zip(parameters, found, strict=True) if g is not None}
    return Reversal(inputs, into_inputs, into_parameters)
