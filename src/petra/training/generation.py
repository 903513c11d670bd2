"""Text from a language model, a token at a time."""

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
    """``count`` tokens that go on from ``prompt``, each drawn from what the network expects after those before it.

    It is shown the last ``context`` tokens; tokens are below ``entries``. Logits are divided by ``temperature``; with
    0, the likeliest token is taken. Random numbers are drawn on the CPU, and so are the same for every device.
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
            chances = torch.softmax((logits - logits.max()) / temperature, 0)
            tokens.append(int(torch.multinomial(chances, 1, generator=random)))
    return tokens[len(prompt) :]
