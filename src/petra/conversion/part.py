"""Parts of a module's forward as layers, made of views on the module's own submodules."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import Tensor, nn

from petra.reversible.streams import Streams

M = TypeVar("M", bound=nn.Module)


class Part(nn.Module):
    """A part of a module's `forward` as a layer.

    Args:
        owner: The module.
        function: Computes the part. It is called with a view on the module, and the streams.
        uses: The names of the submodules, parameters and buffers that the function uses, with dots.
    """

    def __init__(self, owner: nn.Module, function: Callable[..., Any], uses: Iterable[str]) -> None:
        super().__init__()
        self.view = partial_view(owner, uses)
        self.function = function

    def forward(self, *streams: Tensor) -> Tensor | Streams:
        """Compute the part.

        Args:
            *streams: The inputs.

        Returns:
            The result of the function.

        Raises:
            ValueError: If the function uses something that is not in `uses`.
        """
        try:
            return self.function(self.view, *streams)  # type: ignore[no-any-return]
        except AttributeError as error:
            name = getattr(self.function, "__name__", "the function")
            raise ValueError(
                f"{name} of {type(self.view).__name__} fails ({error}): name every submodule, parameter and buffer "
                "that it uses"
            ) from error

    def extra_repr(self) -> str:
        return getattr(self.function, "__name__", "")


def partial_view(owner: M, names: Iterable[str]) -> M:
    """Return a module of the same class with some of the submodules, parameters and buffers of `owner`.

    They are the same objects, so nothing is copied, and they keep their names. Everything else that the module has
    registered is missing; other attributes are shared.
    """
    inside: dict[str, list[str]] = {}
    for name in names:
        first, _, inner = name.partition(".")
        inside.setdefault(first, []).append(inner)
    view = nn.Module.__new__(type(owner))
    view.__dict__ = dict(owner.__dict__)
    registered: dict[str, dict[str, Any]] = {"_modules": {}, "_parameters": {}, "_buffers": {}}
    for first, rest in inside.items():
        kind = next((kind for kind in registered if first in owner.__dict__[kind]), None)
        if kind is None:
            raise ValueError(f"{type(owner).__name__} has no submodule, parameter or buffer named {first!r}")
        value = owner.__dict__[kind][first]
        whole = kind != "_modules" or "" in rest
        registered[kind][first] = value if whole else partial_view(value, rest)
    for kind in registered:  # missing ones are None where they were None, such as an optional norm
        absent = {name: None for name, value in owner.__dict__[kind].items() if value is None}
        view.__dict__[kind] = absent | registered[kind]
    return view
