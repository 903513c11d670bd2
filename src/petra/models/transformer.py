"""Blocks and initialisation of transformers with one resolution: ViT, RoBERTa and GPT.

A reversible block is y1 = x1 + f(x2), y2 = x2 + g(y1) with f = attention and g = MLP (Rev-ViT). Both streams begin as
the embedding, and the head reads their mean. Neither needs parameters, so a reversible network and its plain version
have the same parameters under the same names, and can load each other's weights.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

from petra.models.attention import AttentionBranch, MLPBranch
from petra.models.transformer_parts import PlainBlock, check_rates, check_sizes, drop_path_rates, truncated_normal_
from petra.reversible import ReversibleBlock


def transformer_blocks(
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
    """Build `depth` blocks. The rate of stochastic depth grows linearly from 0 to `drop_path` in the last block."""
    check_sizes(width=width, depth=depth, heads=heads)
    check_rates(dropout=dropout, drop_path=drop_path)
    if width % heads:
        raise ValueError(f"width {width} is not a multiple of heads {heads}: give a number of heads that divides it")
    if (hidden := round(width * mlp_ratio)) < 1:
        raise ValueError(f"mlp_ratio is {mlp_ratio}, so the MLP has no hidden channels at width {width}: give about 4")
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    kind = ReversibleBlock if reversible else PlainBlock
    for i, rate in enumerate(drop_path_rates(depth, drop_path)):
        f = AttentionBranch(width, heads, dropout=dropout, drop_path=rate, causal=causal)
        g = MLPBranch(width, hidden, dropout=dropout, drop_path=rate)
        layers[f"block{i}"] = kind(f, g)
    return layers


def initialise_transformer(network: nn.Module, residual_scale: float = 1.0) -> None:
    """Initialise weights from a truncated normal distribution with deviation 0.02, and biases with zero.

    The deviation of the last layer of each residual branch is multiplied by `residual_scale`.
    """
    for module in network.modules():
        if isinstance(module, nn.Linear | nn.Conv2d | nn.Embedding):
            truncated_normal_(module.weight)
        if isinstance(module, nn.Linear | nn.Conv2d) and module.bias is not None:
            nn.init.zeros_(module.bias)
    if residual_scale != 1:
        for module in network.modules():
            if isinstance(module, AttentionBranch):
                truncated_normal_(module.out.weight, 0.02 * residual_scale)
            elif isinstance(module, MLPBranch):
                truncated_normal_(module.down.weight, 0.02 * residual_scale)


def check_seq_len(tokens: Tensor, seq_len: int) -> None:
    """Raise `ValueError` for texts that are longer than `seq_len`."""
    if tokens.shape[1] > seq_len:
        raise ValueError(
            f"texts are {tokens.shape[1]} tokens long, but the network has only {seq_len} positions: cut them, or "
            "create the network with a larger seq_len"
        )
