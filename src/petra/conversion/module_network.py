"""A module as a `petra.Network`, whose layers are views on the module's own submodules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from petra.reversible import Network


class ModuleNetwork(Network):
    """A module as a sequence of layers. Its weights are those of the module, and have the names that they have there.

    Args:
        module: The module.
        layers: Layers that together compute what the module computes.
    """

    def __init__(self, module: nn.Module, layers: Sequence[nn.Module]) -> None:
        super().__init__(*layers)
        self._module = (module,)  # in a tuple, because its submodules are registered in the layers
        owned = set(module.modules())
        for added in (m for m in self.modules() if m not in owned):
            added.training = module.training

    @property
    def module(self) -> nn.Module:
        """The module."""
        return self._module[0]

    def train(self, mode: bool = True) -> ModuleNetwork:
        """Set the training mode of the layers and of the module.

        Args:
            mode: True for training.

        Returns:
            The network itself.
        """
        super().train(mode)
        self.module.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the `state_dict()` of the module.

        Args:
            *args: As for `nn.Module.state_dict`.
            **kwargs: As for `nn.Module.state_dict`.

        Returns:
            The weights under the module's names.
        """
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a `state_dict()` of the module.

        Args:
            state_dict: The weights under the module's names.
            strict: As for `nn.Module.load_state_dict`.
            assign: Must be False, because the layers refer to the module's parameters.

        Returns:
            The result of `nn.Module.load_state_dict`.

        Raises:
            ValueError: If `assign` is true.
        """
        if assign:
            raise ValueError("assign=True would replace the parameters that the layers refer to: leave it out")
        return self.module.load_state_dict(state_dict, strict=strict)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the parameters of the module.

        Args:
            prefix: As for `nn.Module.named_parameters`.
            recurse: As for `nn.Module.named_parameters`.
            remove_duplicate: As for `nn.Module.named_parameters`.

        Returns:
            Names in the module, and parameters.
        """
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the buffers of the module.

        Args:
            prefix: As for `nn.Module.named_buffers`.
            recurse: As for `nn.Module.named_buffers`.
            remove_duplicate: As for `nn.Module.named_buffers`.

        Returns:
            Names in the module, and buffers.
        """
        return self.module.named_buffers(prefix, recurse, remove_duplicate)


def weight_owner(network: nn.Module) -> nn.Module:
    """Return the module that gives the weights of a network their names: the network itself, or the one it views.

    Args:
        network: A network, or what `as_network` has returned.

    Returns:
        The module.
    """
    return network.module if isinstance(network, ModuleNetwork) else network
