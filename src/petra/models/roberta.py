"""Text classifiers of RoBERTa's sizes, reversible (Rev-RoBERTa) and plain, with the same parameters.

The published RoBERTa normalises after each addition. These normalise before attention and MLP, as ViT and GPT do:
only then is what is added a function of the other stream alone, which a reversible block needs, and the plain
twin does the same so that the two can be compared. They have a last norm before the classifier, but neither
RoBERTa's segment embedding, which is one vector, nor its two positions that are no token's: one vector less than
the published classifiers.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from petra.models.parts import check_sizes, mean
from petra.models.registry import register
from petra.models.transformer import blocks, check_length, initialise
from petra.reversible import Network


class TextEmbedding(nn.Module):
    """The first layer: tokens and positions, once for every stream, and then the mask of what may be attended to.

    Tokens have shape (batch, length). The mask, of shape (batch, 1, 1, length), is True where there is no
    padding; ``pad`` = None stands for texts without padding and no mask at all. Positions count the tokens
    that are not padding, as in RoBERTa. A text has at least one token that is not padding.
    """

    def __init__(self, vocab_size: int, length: int, width: int, dropout: float, pad: int | None, streams: int) -> None:
        super().__init__()
        self.length = length
        self.pad = pad
        self.streams = streams
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(length, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        check_length(tokens, self.length)
        if self.pad is None:
            attended = None
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        else:
            attended = tokens != self.pad
            positions = (attended.cumsum(1) - 1).clamp(min=0)  # padding has any: nobody attends to it
        x = self.dropout(self.norm(self.tokens(tokens) + self.positions(positions)))
        mask = () if attended is None else (attended[:, None, None, :],)
        return (x,) * self.streams + mask


class FirstTokenHead(nn.Module):
    """The last layer: mean of the streams, norm, and RoBERTa's classifier, all of the first token."""

    def __init__(self, width: int, num_classes: int, dropout: float, streams: int) -> None:
        super().__init__()
        self.streams = streams
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.dense = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, num_classes)

    def forward(self, *streams: Tensor) -> Tensor:
        x = self.norm(mean(tuple(x[:, 0] for x in streams[: self.streams])))
        x = torch.tanh(self.dense(self.dropout(x)))
        return self.out_proj(self.dropout(x))  # type: ignore[no-any-return]


def roberta(
    *,
    width: int,
    depth: int,
    heads: int,
    reversible: bool = True,
    vocab_size: int = 50265,
    length: int = 512,
    num_classes: int = 2,
    mlp_ratio: float = 4,
    dropout: float = 0.1,
    drop_path: float = 0.0,
    pad: int | None = 1,
) -> Network:
    """A classifier of texts of up to ``length`` tokens; ``pad`` is the token that fills up the shorter ones."""
    check_sizes(vocab_size=vocab_size, length=length, num_classes=num_classes)
    if pad is not None and not 0 <= pad < vocab_size:
        raise ValueError(f"pad is {pad}: give a token from 0 to {vocab_size - 1}, or None if there is no padding")
    streams = 2 if reversible else 1
    inner = blocks(
        reversible=reversible,
        width=width,
        depth=depth,
        heads=heads,
        mlp_ratio=mlp_ratio,
        dropout=dropout,
        drop_path=drop_path,
    )
    stem = TextEmbedding(vocab_size, length, width, dropout, pad, streams)
    head = FirstTokenHead(width, num_classes, dropout, streams)
    network = Network(OrderedDict(stem=stem, **inner, head=head))
    initialise(network)
    return network


for _size, _width, _depth, _heads in (("base", 768, 12, 12), ("large", 1024, 24, 16), ("small", 256, 4, 4)):
    for _reversible in (True, False):
        register(
            f"{'rev-' if _reversible else ''}roberta-{_size}",
            f"{'reversible ' if _reversible else ''}RoBERTa-{_size} (pre-norm), {_depth + 2} layers to cut",
            roberta,
            reversible=_reversible,
            width=_width,
            depth=_depth,
            heads=_heads,
        )
