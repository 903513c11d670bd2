"""Text classifiers with the sizes of RoBERTa, reversible (Rev-RoBERTa) and plain, with the same parameters.

The published RoBERTa has a layer norm after each addition (post-norm). These networks have it before attention and MLP
(pre-norm), as ViT and GPT do: a reversible block needs residual branches that depend on the other stream only. The
plain version is pre-norm too, so that the two can be compared. They have a final layer norm before the classifier, but
neither RoBERTa's segment embedding, which is one vector, nor its two unused position embeddings: in all, one vector
less than the published classifiers.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from petra.models.registry import register
from petra.models.transformer import check_seq_len, initialise_transformer, transformer_blocks
from petra.models.transformer_parts import check_sizes, mean_stream
from petra.reversible import Network


class TextEmbedding(nn.Module):
    """The first layer: embeds tokens and positions, and returns a copy per stream, and the attention mask.

    Tokens have shape (batch, seq_len). The mask, of shape (batch, 1, 1, seq_len), is False for padding. With `pad` =
    None, texts have no padding and there is no mask. Positions count the tokens that are not padding, as in RoBERTa. A
    text has at least one token that is not padding.
    """

    def __init__(
        self, vocab_size: int, seq_len: int, width: int, dropout: float, pad: int | None, streams: int
    ) -> None:
        super().__init__()
        self.seq_len = seq_len
        self.pad = pad
        self.streams = streams
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(seq_len, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        check_seq_len(tokens, self.seq_len)
        if self.pad is None:
            attended = None
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        else:
            attended = tokens != self.pad
            positions = (attended.cumsum(1) - 1).clamp(
                min=0
            )  # that of padding is irrelevant, because no token attends to it
        x = self.dropout(self.norm(self.tokens(tokens) + self.positions(positions)))
        mask = () if attended is None else (attended[:, None, None, :],)
        return (x,) * self.streams + mask


class FirstTokenHead(nn.Module):
    """The last layer, on the first token: mean of the streams, layer norm, and RoBERTa's classifier."""

    def __init__(self, width: int, num_classes: int, dropout: float, streams: int) -> None:
        super().__init__()
        self.streams = streams
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.dense = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, num_classes)

    def forward(self, *streams: Tensor) -> Tensor:
        x = self.norm(mean_stream(tuple(x[:, 0] for x in streams[: self.streams])))
        x = torch.tanh(self.dense(self.dropout(x)))
        return self.out_proj(self.dropout(x))  # type: ignore[no-any-return]


def roberta(
    *,
    width: int,
    depth: int,
    heads: int,
    reversible: bool = True,
    vocab_size: int = 50265,
    seq_len: int = 512,
    num_classes: int = 2,
    mlp_ratio: float = 4,
    dropout: float = 0.1,
    drop_path: float = 0.0,
    pad: int | None = 1,
) -> Network:
    """Build a text classifier like RoBERTa, but pre-norm.

    Args:
        width: Channels of a stream.
        depth: Number of blocks.
        heads: Attention heads per block.
        reversible: Build reversible blocks, otherwise plain ones.
        vocab_size: Number of different tokens.
        seq_len: Maximum number of tokens in a text.
        num_classes: Number of classes.
        mlp_ratio: Hidden channels of an MLP, divided by `width`.
        dropout: Rate of dropout.
        drop_path: Rate of stochastic depth in the last block. It grows linearly from 0 in the first block.
        pad: The token that fills up short texts, or None if there is no padding.

    Returns:
        The network: embedding, blocks, head.

    Raises:
        ValueError: If a size or rate is invalid.
    """
    check_sizes(vocab_size=vocab_size, seq_len=seq_len, num_classes=num_classes)
    if pad is not None and not 0 <= pad < vocab_size:
        raise ValueError(f"pad is {pad}: give a token from 0 to {vocab_size - 1}, or None for texts without padding")
    streams = 2 if reversible else 1
    inner = transformer_blocks(
        reversible=reversible,
        width=width,
        depth=depth,
        heads=heads,
        mlp_ratio=mlp_ratio,
        dropout=dropout,
        drop_path=drop_path,
    )
    stem = TextEmbedding(vocab_size, seq_len, width, dropout, pad, streams)
    head = FirstTokenHead(width, num_classes, dropout, streams)
    network = Network(OrderedDict(stem=stem, **inner, head=head))
    initialise_transformer(network)
    return network


for _size, _width, _depth, _heads in (("base", 768, 12, 12), ("large", 1024, 24, 16), ("small", 256, 4, 4)):
    for _reversible in (True, False):
        register(
            f"{'rev-' if _reversible else ''}roberta-{_size}",
            f"{'reversible ' if _reversible else ''}RoBERTa-{_size} (pre-norm), up to {_depth + 2} stages",
            roberta,
            reversible=_reversible,
            width=_width,
            depth=_depth,
            heads=_heads,
        )
