"""The pipelines that are predicted and measured."""

import time
from dataclasses import dataclass

import torch
from torch import nn

import petra


@dataclass(frozen=True)
class Configuration:
    """A pipeline of equal stages, one per rank."""

    ranks: int
    network: str
    """blocks (RevNet), transformer, or waits, whose stages take time without using a core."""
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
TWO_CORES = [
    "2:blocks:petra:low-staleness:4:0",
    "2:blocks:petra:lock-step:4:40",
    "2:blocks:reversible:1f1b:8:0",
    "2:blocks:backprop:gpipe:8:0",
    "2:transformer:petra:low-staleness:8:0",
    "2:transformer:reversible:1f1b:4:40",
    "2:transformer:backprop:1f1b:8:0",
    "2:transformer:backprop:gpipe:4:0",
    "4:waits:petra:lock-step:4:0",
    "4:waits:petra:low-staleness:8:40",
    "4:waits:reversible:1f1b:8:0",
    "4:waits:backprop:gpipe:4:40",
    "8:waits:petra:lock-step:8:40",
    "8:waits:petra:low-staleness:8:0",
    "8:waits:reversible:1f1b:16:40",
    "8:waits:backprop:1f1b:8:0",
    "8:waits:backprop:gpipe:16:0",
]
"""For two cores: networks that compute on two ranks, and stages that only take time on more."""
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


class _Wait(torch.autograd.Function):
    """The identity, which takes time in both directions."""

    @staticmethod
    def forward(context, x, seconds):
        context.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        time.sleep(context.seconds)
        return gradient, None


class Waiting(nn.Module):
    """A residual function that takes time."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds, self.scale = seconds, nn.Parameter(torch.full((), 0.1))

    def forward(self, x):
        """Wait, and scale the inputs."""
        return _Wait.apply(x, self.seconds) * self.scale


class Split(nn.Module):
    """Makes two streams of the inputs."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        """Return the streams."""
        return x * self.scale, x


class Head(nn.Module):
    """Computes the outputs from two streams."""

    def __init__(self, features):
        super().__init__()
        self.linear = nn.Linear(features, 10)

    def forward(self, x, y):
        """Return the outputs."""
        return self.linear(x + y)


def waits(ranks, scale):
    """Two blocks per rank that wait; the ranks differ by up to a half."""
    batch, features = 16, int(2048 * scale)
    seconds = [0.005 * scale * (1 + rank % 3 / 4) for rank in range(ranks) for _ in range(2)]
    inner = [petra.ReversibleBlock(Waiting(one), Waiting(one)) for one in seconds]
    network = petra.Network(Split(), *inner, Head(features))
    return network, torch.randn(batch, features), torch.randint(10, (batch,))


NETWORKS = {"blocks": blocks, "transformer": transformer, "waits": waits}


def create(configuration, scale):
    """Return the network, the same on every rank, a micro-batch, and the layers of each stage."""
    torch.manual_seed(0)
    network, inputs, targets = NETWORKS[configuration.network](configuration.ranks, scale)
    sizes = [2] * configuration.ranks
    sizes[0] += 1  # the stem
    sizes[-1] += 1  # the head
    return network, inputs, targets, sizes
