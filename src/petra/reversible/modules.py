"""Walking through modules: what every step asks of all of them has to be quick, for a GPU waits for it."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn


def submodules(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules and all that is inside them, each once, in the order of ``nn.Module.modules``."""
    found: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        if module not in found:
            found[module] = None
            for child in module._modules.values():
                if child is not None:
                    visit(child)

    for module in modules:
        visit(module)
    return list(found)


def held_tensors(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Parameters and buffers of the modules and all that is inside them."""
    held = (t for m in submodules(modules) for t in (*m._parameters.values(), *m._buffers.values()))
    return [tensor for tensor in held if tensor is not None]
