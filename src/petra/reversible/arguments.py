"""Keyword arguments of residual functions, taken apart so that tensors among them can travel as streams."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from petra.reversible.streams import Streams


@dataclass(frozen=True)
class Keywords:
    """How to put keyword arguments together again; the tensors among them are the last companions."""

    spec: TreeSpec | None = None
    leaves: tuple[Any, ...] = ()
    """What is no tensor, and a mark where a tensor belongs."""
    tensors: int = 0

    @classmethod
    def take_apart(cls, given: Mapping[str, Any]) -> tuple[Streams, Keywords]:
        """The tensors, wherever they are nested, and the rest."""
        if not given:
            return (), NO_KEYWORDS
        leaves, spec = tree_flatten(dict(given))
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        rest = tuple(_HERE if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        return tensors, cls(spec, rest, len(tensors))

    def call(self, function: Callable[..., Any], first: Tensor, companions: Streams) -> Any:
        """Hand the companions to ``function`` as it wants them."""
        if self.spec is None:
            return function(first, *companions)
        plain = len(companions) - self.tensors
        named = iter(companions[plain:])
        leaves = [next(named) if leaf is _HERE else leaf for leaf in self.leaves]
        return function(first, *companions[:plain], **tree_unflatten(leaves, self.spec))


_HERE = object()
NO_KEYWORDS = Keywords()
