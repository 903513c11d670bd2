"""Modules as chains of layers, by tracing their `forward` with `torch.fx`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx, nn

from petra.conversion.chain import block_layers
from petra.conversion.container import ReversibleBlocks
from petra.conversion.converted_segment import ConvertedSegment
from petra.formatting import first_line
from petra.reversible import Network, ReversibleLayer

_OPENED_SHARE = 0.5
"""A module with more than this share of all parameters is opened, so that it can be cut."""


class _OneInput(nn.Module):
    """Calls a module with its first argument only, so that the others keep their defaults."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Any) -> Any:
        """Call the module.

        Args:
            x: The first argument.

        Returns:
            The result of the module.
        """
        return self.module(x)


class _Tracer(fx.Tracer):
    """Records calls of the submodules of a network, without looking inside most of them."""

    def __init__(self, traced: nn.Module) -> None:
        super().__init__()
        self.traced = traced
        self.parameters = max(_count(traced), 1)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if m is self.traced:
            return False
        if isinstance(m, Network | ReversibleLayer):
            return True
        if type(m) is nn.Sequential or isinstance(m, ReversibleBlocks):
            return False
        if any(isinstance(inner, ReversibleBlocks) for inner in m.modules()):
            return False
        if super().is_leaf_module(m, module_qualified_name):
            return True
        large = any(m.children()) and _count(m) > _OPENED_SHARE * self.parameters
        return not (large or _is_stage(m))


def _is_stage(module: nn.Module) -> bool:
    """Return whether most of a module is a container of blocks, which have submodules themselves."""
    return any(
        type(child) in (nn.Sequential, nn.ModuleList)
        and len(child) > 1  # type: ignore[arg-type]
        and all(any(block.children()) for block in child.children())
        and _count(child) > _OPENED_SHARE * _count(module)
        for child in module.children()
    )


def traced_chain(module: nn.Module) -> list[nn.Module]:
    """Return a module as a chain.

    The chain is cut wherever a single value goes from one part of the graph to the next.

    Args:
        module: The module.

    Returns:
        Its layers.

    Raises:
        ValueError: If the module cannot be traced, or is not a chain.
    """
    kind = type(module).__name__
    remedy = (
        f"give {kind} a method stages() that returns its layers in order (see petra.as_network), or write it as a "
        "petra.Network"
    )
    graph = _trace(module, remedy)
    groups, crossing = _groups(graph)
    root = _OneInput(module)
    layers = [layer for group in groups for layer in _layers(root, group)]
    if len(layers) < 2 and crossing is not None:
        raise ValueError(
            f"{kind} is not a chain: {_name(crossing[0])} is used by {_name(crossing[1])} as well as by what follows "
            f"it, so there is no place to cut: {remedy}"
        )
    return layers


def _trace(module: nn.Module, remedy: str) -> fx.Graph:
    """Trace a module in training mode and in evaluation mode, and check that the results are the same."""
    kind, modes = type(module).__name__, [(m, m.training) for m in module.modules()]
    found = []
    try:
        for training in (False, True):
            for inner, _ in modes:
                inner.training = training
            found.append(_Tracer(module).trace(_OneInput(module)))
    except Exception as error:
        raise ValueError(f"the forward of {kind} cannot be traced ({first_line(error)}): {remedy}") from error
    finally:
        for inner, mode in modes:
            inner.training = mode
    graph = found[1]
    for evaluated, trained in zip(found[0].nodes, graph.nodes, strict=False):
        same = (evaluated.op, str(evaluated.target), str(evaluated.args), str(evaluated.kwargs)) == (
            trained.op,
            str(trained.target),
            str(trained.args),
            str(trained.kwargs),
        )
        if not same:
            raise ValueError(
                f"the forward of {kind} depends on self.training at {_name(trained)}, which tracing would fix: use "
                f"modules such as nn.Dropout instead of functions, or {remedy}"
            )
    return graph


def _groups(graph: fx.Graph) -> tuple[list[list[fx.Node]], tuple[fx.Node, fx.Node] | None]:
    """Split the nodes wherever one value is left; also return the value that prevents most cuts, and a user of it."""
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
    order = {node: i for i, node in enumerate(nodes)}
    last_use = {node: max((order.get(user, len(nodes)) for user in node.users), default=-1) for node in graph.nodes}
    groups: list[list[fx.Node]] = []
    group: list[fx.Node] = []
    crossing: tuple[fx.Node, fx.Node] | None = None
    longest = 0
    values = [node for node in graph.nodes if node.op not in ("output", "get_attr")]
    for i, node in enumerate(nodes):
        group.append(node)
        live = [v for v in values if order.get(v, -1) <= i < last_use[v]]
        if live == [node]:
            groups.append(group)
            group = []
        for value in live:
            if value is not node and last_use[value] - order.get(value, -1) > longest:
                longest = last_use[value] - order.get(value, -1)
                user = max(value.users, key=lambda user: order.get(user, len(nodes)))
                crossing = (value, user)
    if group:
        groups.append(group)
    return groups, crossing


def _layers(module: _OneInput, group: Sequence[fx.Node]) -> list[nn.Module]:
    """Return the layers of a group: a submodule itself if there is nothing else, or a new module for its graph."""
    (node, *others) = group
    if not others and isinstance(node.target, ConvertedSegment):
        return block_layers([node.target], _constant_arguments(node))
    if not others and node.op == "call_module" and len(node.args) == 1 and not node.kwargs:
        found = module.get_submodule(str(node.target))
        return list(found) if type(found) is Network else [found]
    for inner in group:
        if isinstance(inner.target, ConvertedSegment):
            raise ValueError(
                f"the input of {_name(inner)} is used again after it, so its blocks cannot be layers of a chain: give "
                f"{type(module.module).__name__} a method stages()"
            )
    return [_graph_module(module, group)]


def _constant_arguments(node: fx.Node) -> Any:
    """Return the arguments of a segment, which must not be results of the network."""
    if any(isinstance(value, fx.Node) for value in (*node.args[1:], *node.kwargs.values())):
        raise ValueError(f"{_name(node)} takes more than one result of the network: give the network a method stages()")
    assert isinstance(node.target, ConvertedSegment)
    bound = node.target.bind(node.args, dict(node.kwargs))[1]

    def arguments(block: Any, x: Any, companions: Any) -> dict[str, Any]:
        return dict(bound)

    return arguments


def _graph_module(module: nn.Module, group: Sequence[fx.Node]) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies:
            copies[node] = graph.node_copy(node, copied) if node.op == "get_attr" else graph.placeholder(node.name)
        return copies[node]

    for node in group:  # the input first, because placeholders precede all other nodes
        for value in node.all_input_nodes:
            if value not in group and value.op != "get_attr":
                copied(value)
    for node in group:
        copies[node] = graph.node_copy(node, copied)
    graph.output(copies[group[-1]])
    return fx.GraphModule(module, graph, "TracedLayer")


def _name(node: fx.Node) -> str:
    """Return a node in words: a submodule by its path, a function by its name."""
    if isinstance(node.target, ConvertedSegment):
        return f"the reversible {node.target.kind} segment"
    if node.op == "call_module":
        return str(node.target).removeprefix("module.")
    if node.op == "placeholder":
        return "the input"
    if node.op == "output":
        return "the output"
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", node.name)
    stack = node.nn_module_stack if hasattr(node, "nn_module_stack") else None
    where = list(stack)[-1].removeprefix("module").removeprefix(".") if stack else ""
    return f"{name} in {where}" if where else str(name)


def _count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
