"""Notices what a recorded evaluation depends on other than through its arguments and its own parameters.

Gradients are asked for by name, so those of anything else would be lost without a word.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

_SEEN: WeakSet[nn.Module] = WeakSet()
"""Functions that were looked at: once is enough, for they are evaluated at every step."""


class Reach:
    """Walks through the graphs of outputs, down to the tensors that they depend on."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        self._known = {id(tensor) for tensor in known}
        self._seen: set[Any] = set()

    def foreign(self, outputs: Iterable[Tensor]) -> Tensor | None:
        """A leaf that is not known and lies below what was not walked through before, if there is one."""
        nodes: list[Any] = [y.grad_fn for y in outputs if y.grad_fn is not None]
        while nodes:
            node = nodes.pop()
            if node in self._seen:
                continue
            self._seen.add(node)
            if _is_leaf(node) and id(node.variable) not in self._known and _references(node) > _NONE:
                leaf: Tensor = node.variable
                return leaf
            nodes += [below for below, _ in node.next_functions if below is not None]
        return None


def check_reach(function: nn.Module, outputs: Iterable[Tensor], known: Iterable[Tensor]) -> None:
    """Raise if the outputs of a function depend on more than what is known, the first time that it is seen."""
    if function in _SEEN:
        return
    found = Reach(known).foreign(outputs)
    if found is not None:
        raise ValueError(unreached(type(function).__name__, found))
    _SEEN.add(function)


def unreached(function: str, found: Tensor, name: str | None = None) -> str:
    """What to say of a tensor whose gradient would be lost."""
    kind = "parameter" if isinstance(found, nn.Parameter) else "tensor"
    which = f"{kind} of shape {tuple(found.shape)}" if name is None else f"{kind} {name} of shape {tuple(found.shape)}"
    return (
        f"{function} depends on a {which} that is neither its own nor comes from its arguments, so that its gradient "
        "would be lost: hand it over as an argument or a further stream, register its module where it is used, "
        "or detach it"
    )


def _is_leaf(node: Any) -> bool:
    return bool(node.name() == "torch::autograd::AccumulateGrad")


def _references(node: Any) -> int:
    """How many there are to the leaf of a node: nobody misses the gradient of one that only the graph holds."""
    return sys.getrefcount(node.variable)


def _held_by_its_graph_alone() -> int:
    return _references(torch.zeros(0, requires_grad=True).view_as(torch.zeros(0)).grad_fn.next_functions[0][0])  # type: ignore[union-attr]


_NONE = _held_by_its_graph_alone()
