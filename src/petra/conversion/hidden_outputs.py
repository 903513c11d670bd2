"""Refuses outputs of single blocks, which a converted network of Hugging Face transformers does not have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from petra.conversion.container import ReversibleBlocks

_OUTPUTS = {"output_hidden_states": "hidden states", "output_attentions": "attention maps"}


def refuse_hidden_outputs(network: nn.Module) -> None:
    """Let a network, and the networks inside it, refuse to return hidden states or attention maps.

    Args:
        network: A converted network.
    """
    for module in network.modules():
        configured = hasattr(getattr(module, "config", None), "output_hidden_states")
        if configured and any(isinstance(inner, ReversibleBlocks) for inner in module.modules()):
            module.register_forward_pre_hook(check_arguments, with_kwargs=True)


def check_arguments(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise ValueError if a call asks for outputs of single blocks."""
    for name, what in _OUTPUTS.items():
        asked = kwargs.get(name)
        if asked or (asked is None and getattr(module.config, name, False)):
            raise ValueError(
                f"{name} is on, but the blocks of {type(module).__name__} are reversible and keep no {what}: turn it "
                "off in the call and in the config, or use the original network"
            )


def has_foreign_hooks(module: nn.Module) -> bool:
    """Return whether a module has forward hooks other than this check."""
    before = [hook for hook in module._forward_pre_hooks.values() if hook is not check_arguments]
    return bool(before or module._forward_hooks)
