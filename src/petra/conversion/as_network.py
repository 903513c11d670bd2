"""Any module as a `petra.Network`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from petra.conversion.chain import block_layers, join_boundaries
from petra.conversion.container import ReversibleBlocks
from petra.conversion.converted_segment import ConvertedSegment
from petra.conversion.hf_chain import hf_chain
from petra.conversion.hidden_outputs import has_foreign_hooks
from petra.conversion.module_network import ModuleNetwork
from petra.conversion.part import Part
from petra.conversion.traced_chain import traced_chain
from petra.reversible import Network
from petra.reversible.streams import Streams, as_streams


def as_network(
    module: nn.Module, example: Tensor | Streams | None = None, *, untie: bool = False, tolerance: float = 1e-4
) -> Network:
    """Return a module as a network of layers, which every training method can cut into stages.

    The layers are views on the module's submodules: training the network trains the module, and weights keep the
    module's names in `Trainer.weights()` and in checkpoints. `Trainer` calls this function itself.

    - A `petra.Network` and an `nn.Sequential` are returned unchanged.
    - A module with a method `stages()` tells its layers itself. It returns a list of modules, and of tuples of a bound
      method and the submodules, parameters and buffers that the method uses.
    - Networks of Hugging Face transformers are cut into embedding, blocks and head. They take `input_ids`, or
      `(input_ids, attention_mask)`, or images, and return logits, or hidden states if they have no head.
    - The `forward` of other modules is traced with `torch.fx`, and cut where one value goes from one part to the next.

    Blocks that `petra.make_reversible` has converted become one reversible layer each.

    Args:
        module: The module.
        example: Inputs, to compare the outputs of the network and of the module with.
        untie: Give weights that several layers share a copy each, in place. In GPT-2, for example, the head shares its
            weights with the embedding, and two stages cannot share weights.
        tolerance: The largest difference that `example` may show, relative to the largest output.

    Returns:
        The network.

    Raises:
        ValueError: If the module is not a chain of layers. The message names what is in the way.
    """
    if isinstance(module, nn.Sequential) and type(module).forward in (nn.Sequential.forward, Network.forward):
        return module  # type: ignore[return-value]
    if not isinstance(module, nn.Module):
        raise ValueError(f"network is a {type(module).__name__}: give an nn.Module")
    if has_foreign_hooks(module):
        raise ValueError(
            f"{type(module).__name__} has hooks, which a trainer would not call, because it calls the layers one by "
            "one: register them on the layers"
        )
    if untie:
        _untie(module)
    layers = _layers(module)
    network = ModuleNetwork(module, join_boundaries(layers))
    if example is not None:
        _compare(network, module, as_streams(example), tolerance)
    return network


def _layers(module: nn.Module) -> list[nn.Module]:
    if isinstance(module, ReversibleBlocks):
        return block_layers(module)
    if isinstance(stages := getattr(module, "stages", None), MethodType):  # in timm, it is often a submodule
        return _from_protocol(module, stages())
    return hf_chain(module) or traced_chain(module)


def _from_protocol(module: nn.Module, stages: Any) -> list[nn.Module]:
    """Return the layers of a module that tells them itself."""
    kind = type(module).__name__
    if not isinstance(stages, Iterable):
        raise ValueError(f"stages() of {kind} returns {type(stages).__name__}: return a list of layers")
    layers: list[nn.Module] = []
    for index, stage in enumerate(stages):
        if isinstance(stage, ConvertedSegment | ReversibleBlocks):
            layers += block_layers([stage] if isinstance(stage, ConvertedSegment) else stage)
        elif isinstance(stage, nn.Module):
            layers.append(stage)
        elif isinstance(stage, MethodType):
            layers.append(_bound_part(kind, index, stage, ()))
        elif isinstance(stage, Sequence) and stage and isinstance(stage[0], MethodType):
            layers.append(_bound_part(kind, index, stage[0], stage[1:]))
        else:
            raise ValueError(
                f"item {index} of stages() of {kind} is a {type(stage).__name__}: give a module, or a tuple of a "
                "bound method and the submodules, parameters and buffers that it uses"
            )
    return layers


def _bound_part(kind: str, index: int, method: MethodType, uses: Sequence[Any]) -> Part:
    owner = method.__self__
    if not isinstance(owner, nn.Module):
        raise ValueError(f"item {index} of stages() of {kind} is a method of {type(owner).__name__}, not of a module")
    names = {id(m): name for name, m in owner.named_modules() if name}
    names |= {id(t): name for name, t in (*owner.named_parameters(), *owner.named_buffers())}
    for used in uses:
        if id(used) not in names:
            raise ValueError(
                f"item {index} of stages() of {kind} uses a {type(used).__name__} that {type(owner).__name__} has not "
                "registered: give its submodules, parameters and buffers"
            )
    return Part(owner, method.__func__, [names[id(used)] for used in uses])


def _untie(module: nn.Module) -> None:
    """Give every name of a parameter its own parameter."""
    seen: set[nn.Parameter] = set()
    for inner in module.modules():
        for name, parameter in inner._parameters.items():
            if parameter is None:
                continue
            if parameter in seen:
                inner._parameters[name] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            seen.add(parameter)
    config: Any = getattr(module, "config", None)
    if hasattr(config, "tie_word_embeddings"):  # otherwise `from_pretrained` would tie them again
        config.tie_word_embeddings = False


@torch.no_grad()
def _compare(network: Network, module: nn.Module, example: Streams, tolerance: float) -> None:
    modes = [(m, m.training) for m in (*network.modules(), *module.modules())]
    try:
        for inner, _ in modes:
            inner.training = False
        found, expected = network(*example), module(*example)
    finally:
        for inner, mode in modes:
            inner.training = mode
    for a, b in zip(as_streams(found), _tensors(expected), strict=False):
        if a.shape != b.shape or not (a - b).abs().max() <= tolerance * b.abs().max():
            raise ValueError(
                f"the layers of {type(module).__name__} compute something else than its forward: give it a method "
                "stages() that returns its layers in order"
            )


def _tensors(outputs: Any) -> Streams:
    """Return the outputs of a module: of Hugging Face's, the logits or the last hidden state."""
    for name in ("logits", "last_hidden_state"):
        if (found := getattr(outputs, name, None)) is not None:
            return (found,)
    return as_streams(outputs)
