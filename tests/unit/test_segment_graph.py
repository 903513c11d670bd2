"""Which captured segment is used; capture itself needs a GPU and is tested in test_gpu_reversible.py."""

import copy
import pickle

import pytest
import torch
from torch import nn

from petra import FixedPointCoupling, Network, ReversibleResidual
from petra.reversible import segment_graph


class Eager:
    """A stand-in for a captured segment."""

    def __init__(self, couplings, streams, parameters, overlap):
        self.couplings, self.inputs, self.parameters = couplings, streams, parameters
        self.modules = [module for coupling in couplings for module in coupling.modules]

    def forward(self, streams):
        for coupling in self.couplings:
            streams = coupling.forward(streams)
        return tuple(x.clone() for x in streams)


@pytest.fixture
def graphs(monkeypatch):
    monkeypatch.setattr(segment_graph, "SegmentGraph", Eager)
    return segment_graph.SegmentGraphs()


def apply(graphs, network, x):
    couplings = [coupling for layer in network for coupling in layer.couplings()]
    parameters = [p for p in network.parameters() if p.requires_grad]
    with torch.no_grad():
        return graphs.apply(couplings, (x, x), parameters, False)


def test_segments_with_the_same_shapes_are_kept_apart(graphs):
    first, second = (Network(ReversibleResidual(nn.Linear(3, 3))).requires_grad_(False) for _ in range(2))
    x = torch.randn(2, 3)
    for network in (first, second, first):
        assert all(a.equal(b) for a, b in zip(apply(graphs, network, x), network(x, x), strict=True))
    assert len(graphs.graphs) == 2


def test_a_change_that_affects_kernels_is_captured_again(graphs):
    network = Network(ReversibleResidual(nn.Linear(3, 3)), ReversibleResidual(nn.BatchNorm1d(3)))
    x = torch.randn(4, 3)
    changes = [
        lambda: None,
        lambda: network.use_coupling(FixedPointCoupling),
        lambda: network.eval(),
        lambda: network.requires_grad_(False),
        lambda: network.load_state_dict(copy.deepcopy(network.state_dict()), assign=True),
    ]
    for number, change in enumerate(changes, 1):
        change()
        for _ in range(2):
            apply(graphs, network, x)
        assert len(graphs.graphs) == number
    apply(graphs, network, x[:2])
    apply(graphs, network, x.double()[:2].float())
    assert len(graphs.graphs) == len(changes) + 1


def test_graphs_are_not_copied_or_saved_with_a_network(graphs):
    network = Network(ReversibleResidual(nn.Linear(3, 3)))
    network.segment_graphs = graphs
    apply(graphs, network, torch.randn(2, 3))
    assert len(graphs.graphs) == 1
    assert copy.deepcopy(network).segment_graphs.graphs == {}
    assert pickle.loads(pickle.dumps(network)).segment_graphs.graphs == {}
