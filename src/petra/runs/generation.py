"""Generates text with a language model, one token at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from petra.models.gpt import can_cache
from petra.models.key_value_cache import KeyValueCache, use_cache
from petra.reversible import Network


@torch.no_grad()
def generate(
    network: Network,
    prompt: Sequence[int],
    count: int,
    *,
    context: int,
    entries: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: int | None = None,
) -> list[int]:
    """Sample tokens that continue a prompt.

    Random numbers are drawn on the CPU, and so are the same on every device. `rev-gpt`, `gpt` and their variants keep
    the keys and values of earlier tokens, and read only the newest token at each step. When the text is longer than
    `context`, every step reads the last `context` tokens again: the first of them is then another one, and all
    positions change. Other networks read the whole text at every step.

    Args:
        network: A language model, in evaluation mode.
        prompt: The tokens to continue; at least one.
        count: The number of tokens to sample.
        context: The number of preceding tokens that the network reads.
        entries: The size of the vocabulary; tokens are below it.
        temperature: The logits are divided by it; 0 takes the likeliest token.
        top_k: Sample only from the k likeliest tokens; 0 for all.
        top_p: Sample only from the likeliest tokens that together have this probability; 1 for all.
        seed: The seed of the samples.
        stop: A token that ends the text early; it is not returned.

    Returns:
        The new tokens.
    """
    random = torch.Generator().manual_seed(seed)
    device = next(network.parameters()).device
    tokens = list(prompt)
    cache = KeyValueCache(context)
    with use_cache(network.modules() if can_cache(network) else (), cache):
        for _ in range(count):
            if len(tokens) > context:
                cache.clear()
            outputs = network(torch.tensor([tokens[-context:][cache.length :]], device=device))
            assert isinstance(outputs, Tensor)
            logits = outputs[0, -1, :entries].double().cpu()
            if temperature == 0:
                tokens.append(int(logits.argmax()))
            else:
                probabilities = _likeliest(torch.softmax((logits - logits.max()) / temperature, 0), top_k, top_p)
                tokens.append(int(torch.multinomial(probabilities, 1, generator=random)))
            if tokens[-1] == stop:
                return tokens[len(prompt) : -1]
    return tokens[len(prompt) :]


def _likeliest(probabilities: Tensor, top_k: int, top_p: float) -> Tensor:
    """Set the probabilities of all but the likeliest tokens to zero; the others need not sum up to 1 then."""
    if top_k == 0 and top_p == 1:
        return probabilities
    ordered, order = probabilities.sort(descending=True, stable=True)
    if top_k:
        ordered[top_k:] = 0
    before = (ordered / ordered.sum()).cumsum(0).roll(1)  # the share of likelier tokens
    before[0] = 0
    return torch.zeros_like(probabilities).scatter(0, order, ordered.where(before < top_p, 0))
