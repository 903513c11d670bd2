"""Layers that depend on tensors other than their arguments and parameters raise instead of losing gradients."""

import copy

import pytest
import torch
from helpers.trainers import make
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from petra import LayerError, Network, ReversibleBlock, ReversibleLayer, ReversibleResidual, plain_autograd


class Conditioned(nn.Module):
    """Scales by a tensor that is not an argument."""

    def __init__(self, by=None):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.by = [by]

    def forward(self, x):
        return self.linear(x) * self.by[0]


class Custom(ReversibleLayer):
    def __init__(self, by):
        super().__init__()
        self.by = [by]

    def forward(self, a, b):
        return a + self.by[0], b

    def inverse(self, a, b):
        return a - self.by[0], b


def pair():
    return [x.requires_grad_() for x in torch.randn(2, 3, 4, dtype=torch.float64)]


def backward(net, inputs=None):
    sum(y.square().sum() for y in net(*(inputs or pair()))).backward()


@pytest.mark.parametrize("layer", [lambda by: ReversibleResidual(Conditioned(by)), Custom], ids=["block", "custom"])
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("kind", ["tensor", "parameter"])
def test_a_function_with_a_leak_raises(layer, graph, kind):
    by = torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
    by = nn.Parameter(by) if kind == "parameter" else by
    net = Network(layer(by * 2 if graph else by)).double()
    with pytest.raises(ValueError, match=rf"depends on a {kind} of shape \(3, 4\) that is neither its own nor"):
        backward(net)
    with plain_autograd():
        backward(net)
    assert by.grad is not None


def test_tensors_without_gradient_are_no_leaks():
    backward(Network(ReversibleResidual(Conditioned(torch.ones(4))), Custom(torch.ones(4))).double())


class Force(nn.Module):
    """The derivative of a function, whose graph has a leaf that the function creates."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.linear(at).sin().sum(), at, create_graph=True)
        return slope + x


class Checkpointed(nn.Linear):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


class Called(nn.Linear):
    def forward(self, x):
        doubled = {name: 2 * p for name, p in self.named_parameters()}
        return torch.func.functional_call(nn.Linear(4, 4, device="meta"), doubled, (x,))


@pytest.mark.parametrize(
    "function",
    [
        Force,
        lambda: Checkpointed(4, 4),
        lambda: Called(4, 4),
        lambda: weight_norm(nn.Linear(4, 4)),
        lambda: Inside(nn.Linear(4, 4)),
    ],
    ids=["slope", "checkpointed", "functional", "parametrized", "network inside"],
)
def test_functions_without_leaks_pass(function):
    shared = function()
    net = Network(ReversibleBlock(shared, nn.Linear(4, 4)), ReversibleResidual(shared)).double()
    inputs, found = pair(), []
    for plain in (False, True):
        net.zero_grad()
        if plain:
            with plain_autograd():
                backward(net, inputs)
        else:
            backward(net, inputs)
        found.append([p.grad.clone() for p in net.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


class Inside(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.net = Network(ReversibleResidual(f))

    def forward(self, x):
        return self.net(x, x * 2)[0]


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4))

    def forward(self, x):
        return (x @ self.weight).chunk(2, 0)


class Head(nn.Module):
    def __init__(self, embeddings):
        super().__init__()
        self.embeddings = embeddings

    def forward(self, a, b):
        return torch.cat([a, b]) @ self.embeddings[0].weight.t()


def tied(by_reference):
    torch.manual_seed(0)
    embedding = Embedding()
    head = Head([embedding] if by_reference else nn.ModuleList([embedding]))
    return Network(embedding, ReversibleResidual(nn.Linear(4, 4)), head)


def trained(network, method, stages=1):
    torch.manual_seed(1)
    trainer = make(network, method=method, stages=stages)
    trainer.step(torch.randn(4, 6), torch.randint(6, (4,)))
    trainer.drain()
    return network[0].weight.grad


def test_trainers_raise_for_a_weight_that_is_tied_by_reference():
    expected = trained(tied(by_reference=False), "backprop")
    torch.testing.assert_close(trained(tied(by_reference=False), "petra"), expected)
    assert trained(tied(by_reference=True), "backprop").equal(expected)  # one graph for both
    with pytest.raises(LayerError, match=r"layer 2 \(Head\) depends on a parameter 0.weight of shape \(6, 4\)"):
        trained(tied(by_reference=True), "petra")
    with pytest.raises(LayerError, match=r"layer 2 \(Head\) depends on a parameter of shape \(6, 4\)"):
        trained(tied(by_reference=True), "backprop", stages=3)


def test_trainers_check_functions_of_reversible_layers():
    network = tied(by_reference=False)
    network[1].f = Conditioned(nn.Parameter(torch.ones(4)))
    with pytest.raises(ValueError, match=r"Conditioned depends on a parameter of shape \(4,\)"):
        trained(network, "petra")


def test_a_function_is_checked_once(monkeypatch):
    network = tied(by_reference=False)
    trained(network, "petra")
    again = copy.deepcopy(network)
    checks = []
    monkeypatch.setattr("petra.reversible.graph_leaks.GraphLeaks.find_leak", lambda *_: checks.append(0))
    backward(network[1:2], list(torch.randn(2, 2, 4)))
    assert not checks
    backward(again[1:2], list(torch.randn(2, 2, 4)))
    assert len(checks) == 1
