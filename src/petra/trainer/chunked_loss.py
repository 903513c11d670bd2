"""Cross-entropy of a language model without all its logits: they are computed for one chunk of tokens at a time.

The logits of a batch are often larger than all activations of the network together: 16 texts of 1024 tokens with a
vocabulary of 32768 have 2 GiB of them in float32, and their gradients take as much. Here, each chunk of logits is
turned into its loss and its part of the gradients of hidden states and weight before the next chunk is computed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_ENOUGH_LOGITS = 2**25
"""Logits of a chunk that keep a GPU busy; 128 MiB in float32."""


def tokens_per_chunk(tokens: int, vocab_size: int, width: int) -> int:
    """Return how many tokens a chunk has.

    A chunk of logits is about as large as the hidden states of all tokens, and thus does not dominate memory, but not
    smaller than is efficient.
    """
    return max(1, -(-tokens * width // vocab_size), _ENOUGH_LOGITS // vocab_size)


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, label_smoothing: float = 0.0, chunk: int | None = None
) -> Tensor:
    """Return `F.cross_entropy(hidden @ weight.T, targets)`, with at most one chunk of logits in memory.

    Products are computed in the dtype of the hidden states, which is the autocast dtype if the network has run with
    autocast, and the softmax at least in float32.

    Args:
        hidden: Hidden states of shape (tokens, width).
        weight: The projection to logits, of shape (vocab_size, width).
        targets: The classes; negative ones are ignored.
        label_smoothing: The weight of the uniform distribution in the targets.
        chunk: Tokens per chunk; None chooses the number.

    Returns:
        The mean over targets that are not negative.
    """
    chunk = chunk or tokens_per_chunk(len(hidden), *weight.shape)
    loss: Tensor = _ChunkedCrossEntropy.apply(hidden, weight, targets, label_smoothing, chunk)  # type: ignore[no-untyped-call]
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Computes the gradients in the forward pass: the backward pass would have to compute all logits again."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, smoothing: float, chunk: int) -> Tensor:
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        precise = torch.promote_types(hidden.dtype, torch.float32)
        counted = targets >= 0
        count = counted.sum()
        share = counted.to(precise) / count.clamp(min=1)  # of each target in the mean
        projection = weight.to(hidden.dtype)
        total = torch.zeros((), dtype=precise, device=hidden.device)
        into_hidden = torch.empty_like(hidden) if wants_hidden else None
        into_weight = torch.zeros_like(weight, dtype=precise) if wants_weight else None
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            log_p = torch.log_softmax(hidden[part] @ projection.T, dim=-1, dtype=precise)
            target = targets[part].clamp(min=0)[:, None]
            losses = -(1 - smoothing) * log_p.gather(1, target)[:, 0] - smoothing * log_p.mean(dim=-1)
            total += (losses * counted[part]).sum()
            if into_hidden is None and into_weight is None:
                continue
            # d loss / d logits = p - (1 - ε) · one-hot - ε / classes
            gradient = log_p.exp_()
            gradient.scatter_add_(1, target, gradient.new_full((), smoothing - 1).expand_as(target))
            gradient = gradient.sub_(smoothing / len(weight)).mul_(share[part, None]).to(hidden.dtype)
            if into_hidden is not None:
                into_hidden[part] = gradient @ projection
            if into_weight is not None:
                into_weight += gradient.T @ hidden[part]
        ctx.save_for_backward(into_hidden, into_weight if into_weight is None else into_weight.to(weight.dtype))
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        found = (None if g is None else g * gradient.to(g.dtype) for g in ctx.saved_tensors)
        return *found, None, None, None
