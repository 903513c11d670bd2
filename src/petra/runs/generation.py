"""Generates text with a language model, one token at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

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
    seed: int = 0,
) -> list[int]:
    """Sample tokens that continue a prompt.

    Random numbers are drawn on the CPU, and so are the same on every device.

    Args:
        network: A language model.
        prompt: The tokens to continue; at least one.
        count: The number of tokens to sample.
        context: The number of preceding tokens that the network reads.
        entries: The size of the vocabulary; tokens are below it.
        temperature: The logits are divided by it; 0 takes the likeliest token.
        seed: The seed of the samples.

    Returns:
        The new tokens.
    """
    random = torch.Generator().manual_seed(seed)
    device = next(network.parameters()).device
    tokens = list(prompt)
    for _ in range(count):
        outputs = network(torch.tensor([tokens[-context:]], device=device))
        assert isinstance(outputs, torch.Tensor)
        logits = outputs[0, -1, :entries].double().cpu()
        if temperature == 0:
            tokens.append(int(logits.argmax()))
        else:
            probabilities = torch.softmax((logits - logits.max()) / temperature, 0)
            tokens.append(int(torch.multinomial(probabilities, 1, generator=random)))
    return tokens[len(prompt) :]
