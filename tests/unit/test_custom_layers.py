"""Custom reversible layers next to blocks: companions and keyword arguments keep their gradients."""

import pytest
import torch
from helpers.delayed_reference import Head, Lift, data
from helpers.trainers import make
from torch import nn
from torch.nn.functional import cross_entropy

from petra import Network, ReversibleBlock, ReversibleLayer, Trainer, plain_autograd


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, scale):
        return self.fc(x) * scale


class Swap(ReversibleLayer):
    def forward(self, a, b, *rest, scale=None):
        return b, a, *rest

    inverse = forward


class Split(ReversibleLayer):
    """One stream becomes two."""

    def forward(self, x, *rest, scale=None):
        return *x.chunk(2, -1), *rest

    def inverse(self, a, b, *rest, scale=None):
        return torch.cat([a, b], -1), *rest


class Join(ReversibleLayer):
    """Two streams become one."""

    def forward(self, a, b, *rest, scale=None):
        return torch.cat([a, b], -1), *rest

    def inverse(self, x, *rest, scale=None):
        return *x.chunk(2, -1), *rest


def block():
    return ReversibleBlock(Scaled(), Scaled())


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("kind", ["between", "first", "last"])
def test_companions_get_gradients_from_below_a_custom_layer(kind, by_name):
    torch.manual_seed(0)
    layers = {
        "between": [block(), Swap(), block()],
        "first": [Split(), block(), block()],
        "last": [block(), block(), Join()],
    }[kind]
    network = Network(*layers).double()
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    scale = torch.rand(4, dtype=torch.float64, requires_grad=True)

    def gradients():
        streams = (x,) if kind == "first" else x.chunk(2, -1)
        outputs = network(*streams, scale=scale) if by_name else network(*streams, scale)
        outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
        loss = sum((y.sin() * (i + 1)).sum() for i, y in enumerate(outputs))
        return torch.autograd.grad(loss, (x, scale, *network.parameters()))

    found = gradients()
    with plain_autograd():
        expected = gradients()
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


class Stem(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, x):
        return *x.chunk(2, -1), self.scale.expand(len(x), 4)


class First(nn.Module):
    def forward(self, x, *rest):
        return x


@pytest.mark.parametrize("method", ["reversible", "petra"])
def test_companions_above_fewer_streams_get_gradients_in_a_trainer(method):
    torch.manual_seed(0)
    network = Network(Stem(), block(), block(), Join(), First()).double()
    x, y = torch.randn(3, 8, dtype=torch.float64), torch.tensor([0, 3, 7])
    with plain_autograd():
        (expected,) = torch.autograd.grad(cross_entropy(network(x), y), network[0].scale)
    optimizer = lambda p: torch.optim.SGD(p, 0.0)  # noqa: E731
    trainer = Trainer(network, loss=cross_entropy, optimizer=optimizer, method=method, stages=1)
    trainer.step(x, y)
    torch.testing.assert_close(network[0].scale.grad, expected, rtol=1e-10, atol=1e-10)


class Custom(ReversibleLayer):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))

    def forward(self, x, y):
        return x, y + self.f(x)

    def inverse(self, x, y):
        return x, y - self.f(x)


def test_norms_of_a_custom_layer_count_each_microbatch_once():
    """Although it is evaluated twice in the backward pass."""
    custom = Custom()
    trainer = make(Network(Lift(3), custom, Head(3)).double(), stages=3)
    for x, y in data(4):
        trainer.step(x, y)
    trainer.drain()
    assert custom.f[1].num_batches_tracked == 4
