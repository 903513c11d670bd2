"""Causal language models like GPT-2 or with the parts of newer ones, reversible and plain, with the same parameters."""

from __future__ import annotations

from collections import OrderedDict
from math import sqrt

import torch
from torch import Tensor, nn

from petra.models.attention import AttentionBranch, MLPBranch
from petra.models.key_value_cache import CachingModule
from petra.models.registry import register
from petra.models.transformer import check_seq_len, initialise_transformer, transformer_blocks
from petra.models.transformer_parts import BlockStyle, check_choices, check_sizes, make_norm, mean_stream
from petra.reversible import Network
from petra.reversible.streams import Streams, narrowed


class TokenEmbedding(CachingModule):
    """The first layer: embeds tokens of shape (batch, seq_len), and returns a copy per stream.

    Args:
        vocab_size: Number of different tokens.
        seq_len: Maximum number of tokens in a text.
        width: Channels of a stream.
        dropout: Rate of dropout.
        streams: Number of streams.
        learned_positions: True to add an embedding of the position, which rotary positions replace.
        norm: A norm for the embeddings, or None.
    """

    def __init__(
        self,
        vocab_size: int,
        seq_len: int,
        width: int,
        dropout: float,
        streams: int,
        learned_positions: bool = True,
        norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.seq_len = seq_len
        self.streams = streams
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(seq_len, width) if learned_positions else None
        self.norm = norm
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        start = 0 if self.cache is None else self.cache.begin(tokens.shape[1])
        check_seq_len(tokens, self.seq_len, start)
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.positions(torch.arange(start, start + tokens.shape[1], device=tokens.device))
        if self.norm is not None:
            x = self.norm(x)
        return (self.dropout(x),) * self.streams


class LanguageHead(nn.Module):
    """The last layer: mean of the streams, norm, and the logits of the next token at every position.

    Its weights are not tied to the token embedding as they are in GPT-2. The first and the last layer may be in
    different stages, each with its own optimizer and possibly in another process, so they cannot share weights.

    With `chunked_loss`, the outputs in training mode are the normalised hidden states and the weight of the projection
    to logits. `petra.trainer.cross_entropy` computes the logits from them, a chunk of tokens at a time.
    """

    def __init__(self, width: int, vocab_size: int, norm: nn.Module, chunked_loss: bool = False) -> None:
        super().__init__()
        self.norm = norm
        self.fc = nn.Linear(width, vocab_size, bias=False)
        self.chunked_loss = chunked_loss

    @property
    def narrow_outputs(self) -> bool:
        """True if outputs stay in the autocast dtype: the loss multiplies in the dtype of the hidden states."""
        return self.chunked_loss and self.training

    def forward(self, *streams: Tensor) -> Tensor | Streams:
        x = self.norm(mean_stream(streams))
        if self.chunked_loss and self.training:
            return narrowed(x), self.fc.weight.view_as(self.fc.weight)
        return self.fc(x)  # type: ignore[no-any-return]


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
    norm: str = "layernorm",
    positions: str = "learned",
    mlp: str = "gelu",
    kv_heads: int = 0,
    qk_norm: bool = False,
    bias: bool = True,
    embedding_norm: bool = False,
    residual_scale: float = 1.0,
    chunked_loss: bool = False,
) -> Network:
    """Build a causal language model. By default it is like GPT-2; `rev-gpt-25m` and others have newer parts.

    Its output has shape (batch, seq_len, vocab_size): at each position, the logits of the next token.

    Args:
        width: Channels of a stream.
        depth: Number of blocks.
        heads: Attention heads per block.
        reversible: Build reversible blocks, otherwise plain ones.
        vocab_size: Number of different tokens.
        seq_len: Maximum number of tokens in a text.
        mlp_ratio: Hidden channels of an MLP, divided by `width`. SwiGLU has two thirds of them, rounded, and so about
            as many parameters.
        dropout: Rate of dropout.
        drop_path: Rate of stochastic depth in the last block. It grows linearly from 0 in the first block.
        norm: `layernorm` or `rmsnorm`.
        positions: `learned` adds an embedding of the position to each token; `rotary` rotates queries and keys.
        mlp: `gelu` or `swiglu`.
        kv_heads: Heads of keys and values (grouped-query attention). It must divide `heads`; 0 means as many.
        qk_norm: Normalise the queries and keys of each head with an RMS norm.
        bias: Give linear layers and layer norms a bias.
        embedding_norm: Normalise the embeddings, with a norm like the others.
        residual_scale: Factor of each residual branch.
        chunked_loss: In training mode, return hidden states and the weight of the last projection instead of logits.
            `petra.trainer.cross_entropy` computes the logits from them, a chunk of tokens at a time.

    Returns:
        The network: embedding, blocks, head.

    Raises:
        ValueError: If a size, rate or choice is invalid.
    """
    check_sizes(vocab_size=vocab_size, seq_len=seq_len)
    check_choices(positions=(positions, ("learned", "rotary")))
    inner = transformer_blocks(
        reversible=reversible,
        width=width,
        depth=depth,
        heads=heads,
        mlp_ratio=mlp_ratio,
        dropout=dropout,
        drop_path=drop_path,
        causal=True,
        style=BlockStyle(norm, mlp, positions == "rotary", kv_heads, qk_norm, bias, residual_scale),
    )
    stem = TokenEmbedding(
        vocab_size,
        seq_len,
        width,
        dropout,
        streams=2 if reversible else 1,
        learned_positions=positions == "learned",
        norm=make_norm(norm, width, bias) if embedding_norm else None,
    )
    head = LanguageHead(width, vocab_size, make_norm(norm, width, bias), chunked_loss)
    network = Network(OrderedDict(stem=stem, **inner, head=head))
    initialise_transformer(network, out_scale=1 / sqrt(2 * depth))
    return network


def can_cache(network: nn.Module) -> bool:
    """Return whether a network is a language model built by `gpt`, whose evaluations can continue a cached text.

    Args:
        network: Any network.

    Returns:
        True if only causal attention connects its tokens, and every attention reads the cache.
    """
    if not isinstance(network, nn.Sequential):
        return False
    stem, *blocks, head = network
    branches = [(getattr(block, "f", None), getattr(block, "g", None)) for block in blocks]
    causal = all(isinstance(f, AttentionBranch) and f.causal and isinstance(g, MLPBranch) for f, g in branches)
    return isinstance(stem, TokenEmbedding) and isinstance(head, LanguageHead) and causal


register("rev-gpt", "reversible GPT, small, for bytes, up to 8 stages", gpt, reversible=True)
register("gpt", "GPT, small, for bytes, up to 8 stages", gpt, reversible=False)

# The smallest has 24.4M parameters in all. The larger two have the widths and depths of GPT-2 small and medium, and
# their names; with an untied embedding and head, they have 135M and 371M. Eight stages of the smallest are balanced:
# the embedding costs next to nothing and shares the first stage with a block, six stages have one block each, and the
# head, which multiplies as much as 1.5 blocks, is the last.
for _size, _width, _depth, _heads, _vocabulary in (
    ("25m", 448, 7, 7, 8192),
    ("125m", 768, 12, 12, 32768),
    ("350m", 1024, 24, 16, 32768),
):
    for _reversible in (True, False):
        register(
            f"{'rev-' if _reversible else ''}gpt-{_size}",
            f"{'reversible ' if _reversible else ''}GPT with RMSNorm, RoPE, SwiGLU, QK-norm, {_vocabulary} tokens, up "
            f"to {_depth + 2} stages",
            gpt,
            reversible=_reversible,
            width=_width,
            depth=_depth,
            heads=_heads,
            vocab_size=_vocabulary,
            seq_len=1024,
            norm="rmsnorm",
            positions="rotary",
            mlp="swiglu",
            qk_norm=True,
            bias=False,
        )
