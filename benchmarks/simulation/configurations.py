"""The pipelines that are predicted and measured."""

from dataclasses import dataclass

import torch

import petra


@dataclass(frozen=True)
class Configuration:
    """A pipeline of equal stages, one per rank."""

    ranks: int
    network: str
    """blocks (RevNet) or transformer."""
    method: str
    schedule: str
    accumulate: int
    extra: float = 0.0
    """Milliseconds by which every message is delayed."""

    @classmethod
    def parse(cls, text):
        """Read what `str` writes, like 8:blocks:petra:lock-step:8:0."""
        parts = text.split(":")
        if len(parts) != 6:
            raise ValueError(f"{text!r} is no configuration: give RANKS:NETWORK:METHOD:SCHEDULE:K:MILLISECONDS")
        ranks, network, method, schedule, accumulate, extra = parts
        if network not in NETWORKS:
            raise ValueError(f"the network is {network!r}: choose from {', '.join(NETWORKS)}")
        return cls(int(ranks), network, method, schedule, int(accumulate), float(extra))

    def __str__(self):
        fields = (self.ranks, self.network, self.method, self.schedule, self.accumulate, f"{self.extra:g}")
        return ":".join(map(str, fields))


CONFIGURATIONS = [
    "2:blocks:petra:low-staleness:4:0",
    "2:transformer:backprop:1f1b:8:0",
    "4:blocks:petra:lock-step:4:0",
    "4:blocks:petra:low-staleness:8:0",
    "4:blocks:petra:lock-step:4:40",
    "4:blocks:backprop:1f1b:16:0",
    "4:transformer:petra:low-staleness:4:0",
    "4:transformer:reversible:1f1b:8:0",
    "4:transformer:reversible:1f1b:4:40",
    "4:transformer:backprop:gpipe:4:0",
    "8:blocks:petra:lock-step:8:0",
    "8:blocks:reversible:1f1b:16:0",
    "8:blocks:backprop:gpipe:8:0",
    "8:transformer:petra:lock-step:4:0",
    "8:transformer:petra:low-staleness:8:40",
    "8:transformer:backprop:1f1b:8:0",
    "8:transformer:backprop:gpipe:16:0",
]
SMOKE = ["2:blocks:petra:lock-step:2:0", "2:transformer:backprop:1f1b:2:5"]


def blocks(ranks, scale):
    """RevNet blocks of width 32, two per rank."""
    network = petra.models.create("revnet18", depths=(2 * ranks,), width=int(32 * scale))
    return network, torch.randn(int(16 * scale), 3, 32, 32), torch.randint(10, (int(16 * scale),))


def transformer(ranks, scale):
    """Two blocks of a reversible GPT per rank."""
    width, batch, length = int(256 * scale), 2, int(128 * scale)
    network = petra.models.create("rev-gpt", depth=2 * ranks, width=width, heads=4, seq_len=length)
    tokens = torch.randint(256, (batch, length + 1))
    return network, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


NETWORKS = {"blocks": blocks, "transformer": transformer}


def create(configuration, scale):
    """Return the network, the same on every rank, a micro-batch, and the layers of each stage."""
    torch.manual_seed(0)
    network, inputs, targets = NETWORKS[configuration.network](configuration.ranks, scale)
    sizes = [2] * configuration.ranks
    sizes[0] += 1  # the stem
    sizes[-1] += 1  # the head
    return network, inputs, targets, sizes
