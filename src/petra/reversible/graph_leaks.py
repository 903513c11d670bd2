"""Detects tensors that an evaluation depends on without receiving them as arguments or parameters.

Gradients are requested for arguments and parameters only, so the gradient of any other tensor would be lost silently.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

_CHECKED: WeakSet[nn.Module] = WeakSet()
"""Functions that were checked. They are evaluated at every step, and one check is enough."""


class GraphLeaks:
    """Searches the graphs of outputs for leaves that are not `known`."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        self._known = {id(tensor) for tensor in known}
        self._seen: set[Any] = set()

    def find_leak(self, outputs: Iterable[Tensor]) -> Tensor | None:
        """Return an unknown leaf of the graph, if there is one; parts searched in earlier calls are skipped."""
        nodes: list[Any] = [y.grad_fn for y in outputs if y.grad_fn is not None]
        while nodes:
            node = nodes.pop()
            if node in self._seen:
                continue
            self._seen.add(node)
            if _is_leaf(node) and id(node.variable) not in self._known and _references(node) > _GRAPH_ONLY:
                leaf: Tensor = node.variable
                return leaf
            nodes += [below for below, _ in node.next_functions if below is not None]
        return None


def check_graph_leaks(function: nn.Module, outputs: Iterable[Tensor], known: Iterable[Tensor]) -> None:
    """Raise `ValueError` if the outputs of a function depend on leaves that are not `known`.

    Only the first call for a function searches.
    """
    if function in _CHECKED:
        return
    found = GraphLeaks(known).find_leak(outputs)
    if found is not None:
        raise ValueError(leak_message(type(function).__name__, found))
    _CHECKED.add(function)


def leak_message(function: str, found: Tensor, name: str | None = None) -> str:
    """Return the error message for a tensor whose gradient would be lost."""
    kind = "parameter" if isinstance(found, nn.Parameter) else "tensor"
    which = f"{kind} of shape {tuple(found.shape)}" if name is None else f"{kind} {name} of shape {tuple(found.shape)}"
    return (
        f"{function} depends on a {which} that is neither its own nor one of its arguments, so its gradient would be "
        "lost: pass it as an argument or a further stream, register its module where it is used, or detach it"
    )


def _is_leaf(node: Any) -> bool:
    return bool(node.name() == "torch::autograd::AccumulateGrad")


def _references(node: Any) -> int:
    """Return the reference count of a node's leaf; a leaf that only the graph refers to needs no gradient."""
    return sys.getrefcount(node.variable)


def _references_of_graph() -> int:
    with torch.enable_grad():  # the first import may happen under no_grad
        output = torch.zeros(0, requires_grad=True).view_as(torch.zeros(0))
    assert output.grad_fn is not None
    node = output.grad_fn.next_functions[0][0]
    del output
    return _references(node)


_GRAPH_ONLY = _references_of_graph()
