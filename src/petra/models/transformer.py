"""Blocks and initialisation of transformers with one resolution: ViT, RoBERTa and GPT.

A reversible block is y1 = x1 + f(x2), y2 = x2 + g(y1) with f = attention and g = MLP (Rev-ViT). Both streams begin as
the embedding, and the head reads their mean. Neither needs parameters, so a reversible network and its plain version
have the same parameters under the same names, and can load each other's weights.
"""

from __future__ import annotations

from collections import OrderedDict
from math import inf
from numbers import Integral

from torch import Tensor, nn

from petra.models.attention import GPT2_STYLE, AttentionBranch, MLPBranch
from petra.models.transformer_parts import (
    BlockStyle,
    PlainBlock,
    check_choices,
    check_rates,
    check_sizes,
    drop_path_rates,
    hidden_channels,
    truncated_normal_,
)
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
    style: BlockStyle = GPT2_STYLE,
) -> OrderedDict[str, nn.Module]:
    """Build `depth` blocks. The rate of stochastic depth grows linearly from 0 to `drop_path` in the last block."""
    check_sizes(width=width, depth=depth, heads=heads)
    check_rates(dropout=dropout, drop_path=drop_path)
    _check_style(style, width, heads)
    hidden = hidden_channels(width, mlp_ratio)
    if style.mlp == "swiglu":
        hidden = _gated_hidden(hidden)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    kind = ReversibleBlock if reversible else PlainBlock
    for i, rate in enumerate(drop_path_rates(depth, drop_path)):
        f = AttentionBranch(width, heads, dropout=dropout, drop_path=rate, causal=causal, style=style)
        g = MLPBranch(width, hidden, dropout=dropout, drop_path=rate, style=style)
        layers[f"block{i}"] = kind(f, g)
    return layers


def _check_style(style: BlockStyle, width: int, heads: int) -> None:
    check_choices(norm=(style.norm, ("layernorm", "rmsnorm")), mlp=(style.mlp, ("gelu", "swiglu")))
    if width % heads:
        raise ValueError(f"width {width} is not a multiple of heads {heads}: give a number of heads that divides it")
    if style.rotary and width // heads % 2:
        raise ValueError(
            f"width {width} and heads {heads} give {width // heads} channels per head, but rotary positions need an "
            "even number: give another number of heads"
        )
    if not isinstance(style.kv_heads, Integral) or style.kv_heads < 0 or heads % (style.kv_heads or heads):
        raise ValueError(f"kv_heads is {style.kv_heads}: give a number that divides heads {heads}, or 0 for all heads")
    if not 0 < style.residual_scale < inf:
        raise ValueError(f"residual_scale is {style.residual_scale}: give a number above 0, such as 1")


def _gated_hidden(hidden: int) -> int:
    """The hidden channels with which SwiGLU, which has three matrices instead of two, has about as many parameters.

    A multiple of 64 if there are many, because matrix products are faster then.
    """
    exact = hidden * 2 / 3
    return 64 * round(exact / 64) if exact >= 256 else max(1, round(exact))


def initialise_transformer(network: nn.Module, out_scale: float = 1.0) -> None:
    """Initialise weights from a truncated normal distribution with deviation 0.02, and biases with zero.

    The deviation of the last layer of each residual branch is multiplied by `out_scale`.
    """
    for module in network.modules():
        if isinstance(module, nn.Linear | nn.Conv2d | nn.Embedding):
            truncated_normal_(module.weight)
        if isinstance(module, nn.Linear | nn.Conv2d) and module.bias is not None:
            nn.init.zeros_(module.bias)
    if out_scale != 1:
        for module in network.modules():
            if isinstance(module, AttentionBranch):
                truncated_normal_(module.out.weight, 0.02 * out_scale)
            elif isinstance(module, MLPBranch):
                truncated_normal_(module.down.weight, 0.02 * out_scale)


def check_seq_len(tokens: Tensor, seq_len: int, start: int = 0) -> None:
    """Raise `ValueError` for texts that are longer than `seq_len`; `start` tokens were read before."""
    if (length := start + tokens.shape[1]) > seq_len:
        raise ValueError(
            f"texts are {length} tokens long, but the network has only {seq_len} positions: cut them, or "
            "create the network with a larger seq_len"
        )
