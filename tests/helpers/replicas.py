"""Training with replicas, on a network whose result does not depend on who shares a batch."""

import torch
from torch import nn

from helpers.networks import batches
from helpers.trainers import make
from petra import Network, ReversibleBlock


def smooth_network(width=6):
    """Without batch norm and dropout, whose results depend on who is in a batch."""

    class Both(nn.Module):
        def forward(self, x, y):
            return x + y

    def f():
        return nn.Sequential(nn.Linear(width, width), nn.Tanh())

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.lift = nn.Linear(32, 2 * width)

        def forward(self, x):
            return self.lift(x.flatten(1)).chunk(2, 1)

    return Network(Two(), ReversibleBlock(f(), f()), ReversibleBlock(f(), f()), Both(), nn.Linear(width, 4))


def train_replicas(transport=None, uneven=False, **options):
    """Weights after training on shares of the same micro-batches, in no particular order."""
    torch.manual_seed(0)
    trainer = make(smooth_network().double(), transport=transport, **options)
    position = trainer.transport.position
    for i, (x, y) in enumerate(batches(12, size=8, dtype=torch.float64)):
        rows = slice(None, 7) if uneven and i % 3 == 0 else slice(None)
        x, y = x[rows], y[rows]
        share = [t.tensor_split(position.replicas)[position.replica] for t in (x, y)]
        trainer.step(*share, weight=len(share[1]) * position.replicas / len(y))
    trainer.drain()
    return {name: value for name, value in trainer.network.state_dict().items() if not value.is_meta}
