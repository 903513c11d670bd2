"""Causal language models like GPT-2, reversible and plain, with the same parameters."""

from __future__ import annotations

from collections import OrderedDict
from math import sqrt

import torch
from torch import Tensor, nn

from petra.models.registry import register
from petra.models.transformer import check_seq_len, initialise_transformer, transformer_blocks
from petra.models.transformer_parts import check_sizes, mean_stream
from petra.reversible import Network


class TokenEmbedding(nn.Module):
    """The first layer: embeds tokens of shape (batch, seq_len) and their positions, and returns a copy per stream."""

    def __init__(self, vocab_size: int, seq_len: int, width: int, dropout: float, streams: int) -> None:
        super().__init__()
        self.seq_len = seq_len
        self.streams = streams
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(seq_len, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        check_seq_len(tokens, self.seq_len)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return (self.dropout(self.tokens(tokens) + self.positions(positions)),) * self.streams


class LanguageHead(nn.Module):
    """The last layer: mean of the streams, layer norm, and the logits of the next token at every position.

    Its weights are not tied to the token embedding as they are in GPT-2. The first and the last layer may be in
    different stages, each with its own optimizer and possibly in another process, so they cannot share weights.
    """

    def __init__(self, width: int, vocab_size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, vocab_size, bias=False)

    def forward(self, *streams: Tensor) -> Tensor:
        return self.fc(self.norm(mean_stream(streams)))  # type: ignore[no-any-return]


def gpt(
    *,
    width: int = 384,
    depth: int = 6,
    heads: int = 6,
    reversible: bool = True,
    vocab_size: int = 256,
    seq_len: int = 256,
    mlp_ratio: float = 4,
    dropout: float = 0.0,
    drop_path: float = 0.0,
) -> Network:
    """Build a causal language model like GPT-2.

    Its output has shape (batch, seq_len, vocab_size): at each position, the logits of the next token.

    Args:
        width: Channels of a stream.
        depth: Number of blocks.
        heads: Attention heads per block.
        reversible: Build reversible blocks, otherwise plain ones.
        vocab_size: Number of different tokens.
        seq_len: Maximum number of tokens in a text.
        mlp_ratio: Hidden channels of an MLP, divided by `width`.
        dropout: Rate of dropout.
        drop_path: Rate of stochastic depth in the last block. It grows linearly from 0 in the first block.

    Returns:
        The network: embedding, blocks, head.

    Raises:
        ValueError: If a size or rate is invalid.
    """
    check_sizes(vocab_size=vocab_size, seq_len=seq_len)
    inner = transformer_blocks(
        reversible=reversible,
        width=width,
        depth=depth,
        heads=heads,
        mlp_ratio=mlp_ratio,
        dropout=dropout,
        drop_path=drop_path,
        causal=True,
    )
    stem = TokenEmbedding(vocab_size, seq_len, width, dropout, streams=2 if reversible else 1)
    network = Network(OrderedDict(stem=stem, **inner, head=LanguageHead(width, vocab_size)))
    initialise_transformer(network, residual_scale=1 / sqrt(2 * depth))
    return network


register("rev-gpt", "reversible GPT, small, for bytes, up to 8 stages", gpt, reversible=True)
register("gpt", "GPT, small, for bytes, up to 8 stages", gpt, reversible=False)
