"""Finds segments of residual blocks in a network and makes them reversible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from inspect import signature
from itertools import groupby

from torch import nn

from petra.conversion.blended import Blend, BlendedCoupling, BlendedStep, check_blend, default_blend
from petra.conversion.block_spec import BlockSpec, check_block
from petra.conversion.container import Member, ReversibleBlocks
from petra.conversion.converted_segment import ConvertedSegment
from petra.conversion.hidden_outputs import refuse_hidden_outputs
from petra.conversion.known_blocks import KNOWN_BLOCKS
from petra.conversion.module_network import ModuleNetwork
from petra.conversion.residual_views import KnownResidual, SplitChange, UserResidual
from petra.reversible import ReversibleBlock, ReversibleResidual

COUPLINGS = ("additive", "bdia", "midpoint")

Split = Callable[[nn.Module], tuple[nn.Module, nn.Module] | nn.Module | None]
"""Returns the one or two residual functions of a block, or None if it is not to be converted."""

Choice = tuple[nn.Module, ...] | BlockSpec | None
"""How a block is converted: with the functions that `split` returned, as a known block, or not at all."""


def make_reversible(
    module: nn.Module, split: Split | None = None, *, coupling: str = "additive", blend: float | None = None
) -> nn.Module:
    """Return a network with the same weights whose segments of residual blocks are reversible.

    Searches every `nn.Sequential` and `nn.ModuleList` for consecutive blocks that are known: those of timm (ViT, Swin,
    Swin v2), Hugging Face transformers (ViT, DeiT, BERT, RoBERTa and similar models, GPT-2) and PyTorch
    (`nn.TransformerEncoderLayer`). For your own blocks, give `split`.

    A segment of blocks a = x + f(x), y = a + g(a) becomes

        x1 = x2 = x;   x1 ← x1 + f(x2), x2 ← x2 + g(x1) for each block;   y = x1 + x2 - x

    **With this additive coupling, the network computes a different function** and needs fine-tuning. In both networks,
    y is the sum of x and all residuals. But here, each f receives x and the residuals of the g's only, and each g
    receives x and those of the f's only. A single block computes the same as before. With two blocks, the second f is
    evaluated at x + g(a) instead of x + f(x) + g(a), and so on. Post-norm blocks (BERT) also become pre-norm blocks.

    Two other couplings start from the function that the network had. They combine three consecutive states,

        x_{n+1} = γ x_{n-1} + (1 - γ) x_n + (1 + γ) r_n(x_n)      with the residual r_n(x) = f(x) + g(x + f(x))

    - `"bdia"`: in training mode, γ is +blend or -blend at random for each sample and block. In evaluation mode, γ is 0:
      the original function.
    - `"midpoint"`: γ is `blend`, in both modes. `petra.set_blend` changes it during training.

    Their streams are in float64, because the inverse multiplies errors by 1/γ in every block.

    The given network is not changed. The new one shares its parameters and buffers, so training one trains both; use
    `copy.deepcopy` first to separate them. Modules, with their modes and hooks, are copies. Parameters and state dicts
    keep their names. Blocks are no longer called one by one: hooks on a block do not run, and the outputs between the
    blocks of a segment are not available.

    Args:
        module: The network.
        split: A function that returns the residual functions of a block, made from submodules of the block: (f, g) for
            a block a = x + f(x), y = a + g(a), only f for a block y = x + f(x), or None for a block that it does not
            handle. f and g receive the block's input, and all its other arguments as keyword arguments.
        coupling: `"additive"`, `"bdia"` or `"midpoint"`.
        blend: The absolute value of γ, for couplings other than `"additive"`: above 0, which is the original network,
            and up to 1. By default it is 0.25, or more if a segment has more than 16 blocks.

    Returns:
        The reversible network.

    Raises:
        ValueError: If there is nothing to convert, or a block cannot be converted.
    """
    if coupling not in COUPLINGS:
        raise ValueError(f"coupling is {coupling!r}: give one of {', '.join(COUPLINGS)}")
    state = (
        None
        if coupling == "additive"
        else Blend(0.0 if blend is None else blend, random=coupling == "bdia", automatic=blend is None)
    )
    # Tensors in the memo of `deepcopy` are shared instead of copied.
    copy = deepcopy(module, {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())})
    converted: dict[nn.Module, nn.Module] = {}
    copy = _convert(copy, split, state, converted)
    if not any(isinstance(found, ReversibleBlocks) for found in converted.values()):
        seen = sorted({type(m).__name__ for m in module.modules()})
        raise ValueError(
            f"{type(module).__name__} has no blocks that can be made reversible in an nn.Sequential or nn.ModuleList. "
            f"It has {', '.join(seen)}. Known blocks are {_known()}. For other blocks, give "
            "split=lambda block: (f, g), a function that returns their residual functions, only f, or None"
            + _remark(seen)
        )
    refuse_hidden_outputs(copy)
    return copy


def set_blend(network: nn.Module, blend: float) -> None:
    """Set the blend of a network that was converted with coupling `"bdia"` or `"midpoint"`.

    Do not call it between a forward and its backward, and call it on every rank.

    Args:
        network: What `make_reversible` returned, or `as_network` of it.
        blend: The absolute value of γ: above 0 and up to 1.

    Raises:
        ValueError: If the network has no blend, or it is too small for the number of blocks.
    """
    module = network.module if isinstance(network, ModuleNetwork) else network
    containers = (m for m in module.modules() if isinstance(m, ReversibleBlocks))
    segments = [s for container in containers for s in container.segments if s.blend is not None]
    if not segments:
        raise ValueError(
            f"{type(module).__name__} has no blend: convert it with make_reversible(network, coupling='midpoint')"
        )
    for segment in segments:
        check_blend(blend, len(segment.blocks))
    for segment in segments:
        assert segment.blend is not None
        segment.blend.value = blend


def _convert(
    module: nn.Module, split: Split | None, blend: Blend | None, converted: dict[nn.Module, nn.Module]
) -> nn.Module:
    """Return the replacement of a module; a module that occurs several times is converted once."""
    if module in converted or isinstance(module, ReversibleBlocks):
        return converted.get(module, module)
    converted[module] = module
    choices: dict[str, Choice] = {}
    if type(module) in (nn.Sequential, nn.ModuleList):  # a derived class may do something else
        choices = {name: _choose(child, split) for name, child in module._modules.items() if child is not None}
    for name, child in module._modules.items():
        if child is not None and choices.get(name) is None:
            module._modules[name] = _convert(child, split, blend, converted)
            if isinstance(module._modules[name], ReversibleBlocks) and isinstance(module, nn.TransformerEncoder):
                module.use_nested_tensor = False  # only whole blocks support nested tensors
    if any(choice is not None for choice in choices.values()):
        converted[module] = _container(module, choices, blend)
    return converted[module]


def _choose(block: nn.Module, split: Split | None) -> Choice:
    """Choose how to convert a block."""
    found = split(block) if split is not None else None
    if isinstance(found, nn.Module):
        return (found,)
    if found is not None:
        if not (isinstance(found, tuple) and len(found) == 2 and all(isinstance(part, nn.Module) for part in found)):
            parts = found if isinstance(found, tuple) else (found,)
            names = ", ".join("None" if part is None else type(part).__name__ for part in parts)
            raise ValueError(
                f"split returns ({names}) for {type(block).__name__}: return two nn.Modules (f, g), only f for a block "
                "x + f(x), or None (plain functions would not be copied with the network)"
            )
        return found
    return next((spec for spec in KNOWN_BLOCKS if spec.matches(block)), None)


def _container(container: nn.Module, choices: dict[str, Choice], blend: Blend | None) -> ReversibleBlocks:
    """Group consecutive blocks with the same spec and the same arguments into segments."""
    children = {name: child for name, child in container._modules.items() if child is not None}
    members: list[Member] = []

    def group(name: str) -> object:
        choice = choices[name]
        spec = id(choice) if isinstance(choice, BlockSpec) else None
        return None if choice is None else (spec, tuple(signature(children[name].forward).parameters))

    for key, names in groupby(children, group):
        blocks = {name: children[name] for name in names}
        if key is None:
            members += blocks.values()
        else:
            members.append(_segment(blocks, [choices[name] for name in blocks], blend))
    reversible = ReversibleBlocks(children, members)
    reversible.training = container.training
    return reversible


def _segment(blocks: dict[str, nn.Module], choices: list[Choice], blend: Blend | None) -> ConvertedSegment:
    spec = choices[0]
    if blend is not None:
        return _blended_segment(blocks, choices, blend)
    if isinstance(spec, BlockSpec):
        tuples = [check_block(spec, block) for block in blocks.values()]
        layers = _known_layers(spec, list(blocks.values()))
        return ConvertedSegment(
            list(blocks),
            list(blocks.values()),
            layers,
            returns_tuple=tuples[0],
            final_norm=spec.post_norms and spec.post_norms[1],
        )
    layers = [
        _split_layer(block, choice)
        for block, choice in zip(blocks.values(), choices, strict=True)
        if isinstance(choice, tuple)
    ]
    return ConvertedSegment(list(blocks), list(blocks.values()), layers)


def _split_layer(block: nn.Module, functions: tuple[nn.Module, ...]) -> ReversibleBlock | ReversibleResidual:
    f, *g = (UserResidual(block, function) for function in functions)
    return ReversibleBlock(f, g[0]) if g else ReversibleResidual(f)


def _blended_segment(blocks: dict[str, nn.Module], choices: list[Choice], blend: Blend) -> ConvertedSegment:
    if blend.automatic:
        blend.value = max(blend.value, default_blend(len(blocks)))
    check_blend(blend.value, len(blocks))
    layers, returns_tuple = [], False
    for index, (block, choice) in enumerate(zip(blocks.values(), choices, strict=True)):
        if isinstance(choice, BlockSpec):
            returns_tuple = check_block(choice, block)
            change, parts, post_norm = choice.change, [block], choice.post_norms is not None
        else:
            assert choice is not None
            views = [UserResidual(block, function) for function in choice]
            change, parts, post_norm = SplitChange(*views), [block, *views], False
        step = BlendedStep(block, parts, change, blend, first=index == 0, post_norm=post_norm)
        layers.append(ReversibleResidual(step, BlendedCoupling))
    return ConvertedSegment(list(blocks), list(blocks.values()), layers, returns_tuple=returns_tuple, blend=blend)


def _known_layers(spec: BlockSpec, blocks: list[nn.Module]) -> Sequence[ReversibleBlock | ReversibleResidual]:
    if spec.g is None:  # the streams change places, so that the functions of consecutive blocks alternate
        return [ReversibleResidual(KnownResidual(block, spec.f)) for block in blocks]
    if spec.post_norms is None:
        return [ReversibleBlock(KnownResidual(block, spec.f), KnownResidual(block, spec.g)) for block in blocks]
    # Each norm stays in front of the function that it precedes: norm2 of one block in front of f of the next.
    norm1, norm2 = spec.post_norms
    layers = []
    for before, block in zip((None, *blocks), blocks, strict=False):
        f = KnownResidual(block, spec.f, before, None if before is None else norm2, last_norm=norm2)
        layers.append(ReversibleBlock(f, KnownResidual(block, spec.g, block, norm1, last_norm=norm2)))
    return layers


def _remark(seen: list[str]) -> str:
    if not {"BasicBlock", "Bottleneck"} & set(seen):
        return ""
    return (
        ". Blocks of ResNets apply a ReLU to the sum, which cannot be inverted: use a pre-activation ResNet, such as "
        "resnetv2_50 of timm, or a RevNet of petra.models"
    )


def _known() -> str:
    names: dict[str, dict[str, None]] = {}
    for spec in KNOWN_BLOCKS:
        names.setdefault(spec.library, {}).update(dict.fromkeys(spec.classes))
    return "; ".join(f"of {library} {', '.join(classes)}" for library, classes in names.items())
