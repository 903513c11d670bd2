"""`torch.compile` and `torch.export` of whole reversible networks."""

import pytest
import torch
from torch import nn

import petra

pytestmark = pytest.mark.slow


class Split(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x), x


class Join(nn.Module):
    def forward(self, x1, x2):
        return x1 * x2


def make_network():
    torch.manual_seed(0)

    def f():
        return nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    return petra.Network(Split(), *(petra.ReversibleBlock(f(), f()) for _ in range(3)), Join())


def gradients(network, x):
    return torch.autograd.grad(network(x).square().sum(), list(network.parameters()))


def operations(graphs):
    return [[node.target.__name__ for node in graph.graph.nodes if node.op == "call_function"] for graph in graphs]


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of the compiler
def test_compiled_networks_keep_their_segments():
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    network, x = make_network(), torch.randn(2, 4)
    expected = gradients(network, x)
    compiled = torch.compile(network, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(gradients(compiled, x), expected, strict=True))
    assert operations(graphs) == [["linear"], ["mul"]]  # stem and head; the segment is not traced
    torch.compiler.reset()


def test_export_with_gradients_enabled():
    network, x = make_network(), torch.randn(2, 4)
    program = torch.export.export(network, (x,)).module()
    assert torch.equal(program(x), network(x))
