"""What isotropic transformers share: their blocks, reversible or not, and how two streams begin and end.

A reversible block is y1 = x1 + f(x2), y2 = x2 + g(y1) with f = attention and g = MLP (Rev-ViT). The embedding
is the first value of both streams, and the head reads their mean. Neither has parameters, so a reversible
network and its plain twin have the same ones under the same names, and load each other's weights.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

from petra.models.attention import MLP, Attention
from petra.models.parts import PlainBlock, check_rates, check_sizes, draw, drop_path_rates
from petra.reversible import ReversibleBlock


def blocks(
    *,
    reversible: bool,
    width: int,
    depth: int,
    heads: int,
    mlp_ratio: float,
    dropout: float,
    drop_path: float,
    causal: bool = False,
) -> OrderedDict[str, nn.Module]:
    """``depth`` blocks; the rate of stochastic depth grows evenly from 0 in the first to ``drop_path`` in the last."""
    check_sizes(width=width, depth=depth, heads=heads)
    check_rates(dropout=dropout, drop_path=drop_path)
    if width % heads:
        raise ValueError(f"width {width} is not a multiple of heads {heads}: every head gets the same share of it")
    if (hidden := round(width * mlp_ratio)) < 1:
        raise ValueError(f"mlp_ratio {mlp_ratio} leaves nothing of width {width}: give about 4")
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    kind = ReversibleBlock if reversible else PlainBlock
    for i, rate in enumerate(drop_path_rates(depth, drop_path)):
        f = Attention(width, heads, dropout=dropout, drop_path=rate, causal=causal)
        g = MLP(width, hidden, dropout=dropout, drop_path=rate)
        layers[f"block{i}"] = kind(f, g)
    return layers


def initialise(network: nn.Module, residual_scale: float = 1.0) -> None:
    """Weights from a normal distribution of deviation 0.02 cut at two deviations, biases zero.

    ``residual_scale`` is for the last layer of each residual function.
    """
    for module in network.modules():
        if isinstance(module, nn.Linear | nn.Conv2d | nn.Embedding):
            draw(module.weight)
        if isinstance(module, nn.Linear | nn.Conv2d) and module.bias is not None:
            nn.init.zeros_(module.bias)
    if residual_scale != 1:
        for module in network.modules():
            if isinstance(module, Attention):
                draw(module.out.weight, 0.02 * residual_scale)
            elif isinstance(module, MLP):
                draw(module.down.weight, 0.02 * residual_scale)


def check_length(tokens: Tensor, length: int) -> None:
    """Refuse texts that are longer than there are positions."""
    if tokens.shape[1] > length:
        raise ValueError(
            f"texts are {tokens.shape[1]} tokens long, but there are positions for {length}: cut them, or create the "
            "network with another length"
        )
