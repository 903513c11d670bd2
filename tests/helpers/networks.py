"""Small networks with everything that can go wrong in them: batch norm, dropout, all kinds of layers."""

import torch
from torch import Tensor, nn

from petra import Network, ReversibleBlock, ReversibleResidual


class Split(nn.Module):
    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(inputs, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU())

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.body(x).chunk(2, dim=1)


class Shrink(nn.Module):
    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Conv2d(inputs, width, 3, stride=2, padding=1), nn.BatchNorm2d(width), nn.Dropout(0.2))
        self.b = nn.Conv2d(inputs, width, 1, stride=2)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.relu(self.a(x)) + self.b(y), self.b(x)


class Classify(nn.Module):
    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)
        self.fc = nn.Linear(2 * inputs, classes)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.fc(self.drop(torch.cat([x.mean((2, 3)), y.mean((2, 3))], 1)))


def residual(width: int, dropout: float = 0.2) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout(dropout))


def mixed_network(width: int = 3, classes: int = 4) -> Network:
    """Six layers: stem, one-residual block, two-residual block, downsampling, one-residual block, head."""
    return Network(
        Split(2, width),
        ReversibleResidual(residual(width)),
        ReversibleBlock(residual(width), residual(width)),
        Shrink(width, 4),
        ReversibleResidual(residual(4)),
        Classify(4, classes),
    )


def reversible_network(layers: int, width: int = 3, classes: int = 4, dropout: float = 0.0) -> Network:
    """A stem, ``layers`` reversible blocks of both kinds, and a head."""
    blocks = [
        ReversibleBlock(residual(width, dropout), residual(width, dropout))
        if i % 2
        else ReversibleResidual(residual(width, dropout))
        for i in range(layers)
    ]
    return Network(Split(2, width), *blocks, Classify(width, classes))


def batches(count: int, size: int = 3, classes: int = 4, dtype: torch.dtype = torch.float32, seed: int = 0):
    """``count`` micro-batches of random images; the sixth is smaller, as at the end of an epoch."""
    generator = torch.Generator().manual_seed(seed)
    for i in range(count):
        n = size - 1 if i == 5 else size
        yield (
            torch.randn(n, 2, 4, 4, generator=generator, dtype=dtype),
            torch.randint(classes, (n,), generator=generator),
        )
