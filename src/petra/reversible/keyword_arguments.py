"""Keyword arguments of residual functions, flattened so that tensors among them can travel as streams."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from petra.reversible.streams import Streams


@dataclass(frozen=True)
class Keywords:
    """The structure of flattened keyword arguments; the tensors among them are the last companions."""

    spec: TreeSpec | None = None
    leaves: tuple[Any, ...] = ()
    """All leaves that are not tensors, and a placeholder for each tensor."""
    tensors: int = 0
    """The number of tensors."""

    @classmethod
    def flatten(cls, kwargs: Mapping[str, Any]) -> tuple[Streams, Keywords]:
        """Return the tensors, however deeply they are nested, and the structure without them."""
        if not kwargs:
            return (), NO_KEYWORDS
        leaves, spec = tree_flatten(dict(kwargs))
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        rest = tuple(_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return tensors, cls(spec, rest, len(tensors))

    def call(self, function: Callable[..., Any], first: Tensor, companions: Streams) -> Any:
        """Call `function` with the last companions as keyword arguments and the others as positional ones."""
        if self.spec is None:
            return function(first, *companions)
        positional = len(companions) - self.tensors
        tensors = iter(companions[positional:])
        leaves = [next(tensors) if leaf is _TENSOR else leaf for leaf in self.leaves]
        return function(first, *companions[:positional], **tree_unflatten(leaves, self.spec))


_TENSOR = object()
NO_KEYWORDS = Keywords()
