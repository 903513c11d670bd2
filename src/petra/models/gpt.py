"""Language models like GPT-2, reversible and plain, with the same parameters."""

from __future__ import annotations

from collections import OrderedDict
from math import sqrt

import torch
from torch import Tensor, nn

from petra.models.parts import check_sizes, mean
from petra.models.registry import register
from petra.models.transformer import blocks, check_length, initialise
from petra.reversible import Network


class TokenEmbedding(nn.Module):
    """The first layer: tokens of shape (batch, length) and learned positions, once for every stream."""

    def __init__(self, vocab_size: int, length: int, width: int, dropout: float, streams: int) -> None:
        super().__init__()
        self.length = length
        self.streams = streams
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        check_length(tokens, self.length)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return (self.dropout(self.tokens(tokens) + self.positions(positions)),) * self.streams


class LanguageHead(nn.Module):
    """The last layer: mean of the streams, norm, and the logits of the next token at every place.

    It has weights of its own. GPT-2 uses the token embedding here; but the first and the last layer may lie in
    different stages, each with its own optimizer and perhaps in another process, and so cannot share weights.
    """

    def __init__(self, width: int, vocab_size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, vocab_size, bias=False)

    def forward(self, *streams: Tensor) -> Tensor:
        return self.fc(self.norm(mean(streams)))  # type: ignore[no-any-return]


def gpt(
    *,
    width: int = 384,
    depth: int = 6,
    heads: int = 6,
    reversible: bool = True,
    vocab_size: int = 256,
    length: int = 256,
    mlp_ratio: float = 4,
    dropout: float = 0.0,
    drop_path: float = 0.0,
) -> Network:
    """A causal language model: logits of shape (batch, length, vocab_size), each from the tokens up to its place."""
    check_sizes(vocab_size=vocab_size, length=length)
    inner = blocks(
        reversible=reversible,
        width=width,
        depth=depth,
        heads=heads,
        mlp_ratio=mlp_ratio,
        dropout=dropout,
        drop_path=drop_path,
        causal=True,
    )
    stem = TokenEmbedding(vocab_size, length, width, dropout, streams=2 if reversible else 1)
    network = Network(OrderedDict(stem=stem, **inner, head=LanguageHead(width, vocab_size)))
    initialise(network, residual_scale=1 / sqrt(2 * depth))
    return network


register("rev-gpt", "reversible GPT, small and on bytes, eight layers to cut", gpt, reversible=True)
register("gpt", "GPT, small and on bytes, eight layers to cut", gpt, reversible=False)
