"""Finds runs of residual blocks in a network and makes them reversible."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from inspect import signature
from itertools import groupby

from torch import nn

from petra.conversion.branch import Branch, Given
from petra.conversion.container import Member, ReversibleBlocks
from petra.conversion.kinds import Kind, try_out
from petra.conversion.libraries import KINDS
from petra.conversion.run import Run
from petra.reversible import ReversibleBlock

Split = Callable[[nn.Module], tuple[nn.Module, nn.Module] | None]

Choice = tuple[nn.Module, nn.Module] | Kind | None


def make_reversible(module: nn.Module, split: Split | None = None) -> nn.Module:
    """A network with the same weights whose runs of residual blocks are reversible.

    Looks into every ``nn.Sequential`` and ``nn.ModuleList`` for blocks that follow each other and are known: of timm
    (ViT, Swin, Swin v2), Hugging Face transformers (ViT, DeiT, BERT, RoBERTa and their like, GPT-2) and PyTorch
    (``nn.TransformerEncoderLayer``). For blocks of your own, ``split(block)`` returns their residual functions (f, g),
    made from the block's parts, or None; f and g get the block's input and by name whatever else it is called with.

    A run of blocks a = x + f(x), y = a + g(a) becomes

        x1 = x2 = x;   x1 ← x1 + f(x2), x2 ← x2 + g(x1) for each block;   y = x1 + x2 - x

    **It computes something else than before** and has to be fine-tuned. y is the sum of x and all residuals in both
    networks, but f sees x and the residuals of the g's only, and g those of the f's, where they have seen all. One
    block alone computes what it did; for two, the second f is evaluated at x + g(a) instead of x + f(x) + g(a), and so
    on. Post-norm blocks (BERT) become pre-norm ones besides: see docs/reversible.md.

    The given network is left as it is. Its parameters and buffers are shared, not copied: training one trains both
    (``copy.deepcopy`` it before if you want both), while modules, with their modes and hooks, are copies. Parameters
    and state dicts keep their names. Blocks are no longer called one by one: hooks on a block are not run, and outputs
    between the blocks of a run are not to be had.
    """
    # Tensors that the copy is told it has copied already are shared.
    copy = deepcopy(module, {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())})
    converted: dict[nn.Module, nn.Module] = {}
    copy = _convert(copy, split, converted)
    if not any(isinstance(found, ReversibleBlocks) for found in converted.values()):
        seen = sorted({type(m).__name__ for m in module.modules()})
        raise ValueError(
            f"{type(module).__name__} has no blocks that can be made reversible, in an nn.Sequential or nn.ModuleList. "
            f"It has {', '.join(seen)}. Known are {_known()}. For others, give "
            "split=lambda block: (f, g), their residual functions, or None"
        )
    return copy


def _convert(module: nn.Module, split: Split | None, converted: dict[nn.Module, nn.Module]) -> nn.Module:
    """What to put in the module's place; modules that occur several times are converted once."""
    if module in converted or isinstance(module, ReversibleBlocks):
        return converted.get(module, module)
    converted[module] = module
    choices: dict[str, Choice] = {}
    if type(module) in (nn.Sequential, nn.ModuleList):  # a class derived from them may do something else
        choices = {name: _choose(child, split) for name, child in module._modules.items() if child is not None}
    for name, child in module._modules.items():
        if child is not None and choices.get(name) is None:
            module._modules[name] = _convert(child, split, converted)
            if isinstance(module._modules[name], ReversibleBlocks) and isinstance(module, nn.TransformerEncoder):
                module.use_nested_tensor = False  # its blocks take nested tensors, but not part by part
    if any(choice is not None for choice in choices.values()):
        converted[module] = _container(module, choices)
    return converted[module]


def _choose(block: nn.Module, split: Split | None) -> Choice:
    """How a block is made reversible, if it can be."""
    pair = split(block) if split is not None else None
    if pair is not None:
        if not (isinstance(pair, tuple) and len(pair) == 2 and all(isinstance(part, nn.Module) for part in pair)):
            raise ValueError(
                f"split returns {pair!r} for {type(block).__name__}: return two nn.Modules, f and g (functions would "
                "not be copied along with the network), or None"
            )
        return pair
    return next((kind for kind in KINDS if kind.matches(block)), None)


def _container(container: nn.Module, choices: dict[str, Choice]) -> ReversibleBlocks:
    """Group what follows each other, is of one kind and takes the same arguments into runs."""
    children = {name: child for name, child in container._modules.items() if child is not None}
    members: list[Member] = []

    def alike(name: str) -> object:
        choice = choices[name]
        kind = id(choice) if isinstance(choice, Kind) else None
        return None if choice is None else (kind, tuple(signature(children[name].forward).parameters))

    for key, names in groupby(children, alike):
        run = {name: children[name] for name in names}
        if key is None:
            members += run.values()
        else:
            members.append(_run(run, [choices[name] for name in run]))
    reversible = ReversibleBlocks(children, members)
    reversible.training = container.training
    return reversible


def _run(blocks: dict[str, nn.Module], choices: list[Choice]) -> Run:
    kind = choices[0]
    if isinstance(kind, Kind):
        returned = [try_out(kind, block) for block in blocks.values()]
        layers = _of_kind(kind, list(blocks.values()))
        return Run(list(blocks), list(blocks.values()), layers, tuples=returned[0], last=kind.post and kind.post[1])
    layers = [
        ReversibleBlock(Given(block, pair[0]), Given(block, pair[1]))
        for block, pair in zip(blocks.values(), choices, strict=True)
        if isinstance(pair, tuple)
    ]
    return Run(list(blocks), list(blocks.values()), layers)


def _of_kind(kind: Kind, blocks: list[nn.Module]) -> list[ReversibleBlock]:
    if kind.post is None:
        return [ReversibleBlock(Branch(block, kind.f), Branch(block, kind.g)) for block in blocks]
    # Each norm stays before the function that it has stood before: norm2 of one block before f of the next.
    norm1, norm2 = kind.post
    layers = []
    for before, block in zip((None, *blocks), blocks, strict=False):
        f = Branch(block, kind.f) if before is None else Branch(block, kind.f, before, norm2)
        layers.append(ReversibleBlock(f, Branch(block, kind.g, block, norm1)))
    return layers


def _known() -> str:
    names: dict[str, dict[str, None]] = {}
    for kind in KINDS:
        names.setdefault(kind.library, {}).update(dict.fromkeys(kind.classes))
    return "; ".join(f"of {library} {', '.join(classes)}" for library, classes in names.items())
