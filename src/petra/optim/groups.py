"""Parameter groups: which matrices of a network Muon should orthogonalise."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

from torch import Tensor, nn


def hidden_matrices(network: nn.Sequential) -> set[Tensor]:
    """Return the matrices inside a network, which Muon should orthogonalise.

    Args:
        network: A network whose first and last layer connect it with its data.

    Returns:
        The parameters with two or more dimensions, without those of the first and the last layer, those of
        `nn.Embedding`, and vectors that are stored as a matrix of one row or column.
    """
    if not isinstance(network, nn.Sequential):
        raise ValueError(f"network is a {type(network).__name__}: give a sequence of layers, like nn.Sequential")
    outside = {p for end in (network[0], network[-1]) for p in end.parameters()} if len(network) else set()
    for module in network.modules():
        if isinstance(module, nn.Embedding):
            outside |= set(module.parameters())
    return {p for p in network.parameters() if p not in outside and p.ndim > 1 and 1 < len(p) < p.numel()}


def muon_groups(
    parameters: Iterable[nn.Parameter], hidden: Container[Tensor], weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Return parameter groups for `Muon`: hidden matrices, other matrices and vectors.

    Args:
        parameters: Parameters, such as those of one stage.
        hidden: The parameters to orthogonalise, such as `hidden_matrices(network)`; others are left to AdamW.
        weight_decay: The weight decay of matrices; vectors such as biases have none.

    Returns:
        The groups that have parameters.
    """
    kinds: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault((parameter in hidden, parameter.ndim > 1), []).append(parameter)
    return [
        {"params": found, "orthogonalize": orthogonalized, "weight_decay": weight_decay if matrices else 0.0}
        for (orthogonalized, matrices), found in sorted(kinds.items(), key=lambda kind: kind[0], reverse=True)
    ]
