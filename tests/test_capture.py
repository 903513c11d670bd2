"""Which recorded run is replayed; what is recorded needs a GPU and is tested in test_cuda_reversible.py."""

import copy
import pickle

import pytest
import torch
from torch import nn

from petra import FixedPoint, Network, ReversibleResidual
from petra.reversible import capture


class Eager:
    """Stands for a recorded program."""

    def __init__(self, couplings, streams, parameters, overlap):
        self.couplings, self.inputs, self.parameters = couplings, streams, parameters
        self.modules = [module for coupling in couplings for module in coupling.modules]

    def forward(self, streams):
        for coupling in self.couplings:
            streams = coupling.forward(streams)
        return tuple(x.clone() for x in streams)


@pytest.fixture
def captures(monkeypatch):
    monkeypatch.setattr(capture, "Program", Eager)
    return capture.Captures()


def run(captures, network, x):
    couplings = [coupling for layer in network for coupling in layer.couplings()]
    parameters = [p for p in network.parameters() if p.requires_grad]
    with torch.no_grad():
        return captures.run(couplings, (x, x), parameters, False)


def test_runs_that_are_alike_are_kept_apart(captures):
    first, second = (Network(ReversibleResidual(nn.Linear(3, 3))).requires_grad_(False) for _ in range(2))
    x = torch.randn(2, 3)
    for network in (first, second, first):
        assert all(a.equal(b) for a, b in zip(run(captures, network, x), network(x, x), strict=True))
    assert len(captures.programs) == 2


def test_what_decides_the_kernels_makes_a_new_recording(captures):
    network = Network(ReversibleResidual(nn.Linear(3, 3)), ReversibleResidual(nn.BatchNorm1d(3)))
    x = torch.randn(4, 3)
    changes = [
        lambda: None,
        lambda: network.use_coupling(FixedPoint),
        lambda: network.eval(),
        lambda: network.requires_grad_(False),
        lambda: network.load_state_dict(copy.deepcopy(network.state_dict()), assign=True),
    ]
    for number, change in enumerate(changes, 1):
        change()
        for _ in range(2):
            run(captures, network, x)
        assert len(captures.programs) == number
    run(captures, network, x[:2])
    run(captures, network, x.double()[:2].float())
    assert len(captures.programs) == len(changes) + 1


def test_recordings_stay_behind_when_a_network_is_copied_or_saved(captures):
    network = Network(ReversibleResidual(nn.Linear(3, 3)))
    network.captures = captures
    run(captures, network, torch.randn(2, 3))
    assert len(captures.programs) == 1
    assert copy.deepcopy(network).captures.programs == {}
    assert pickle.loads(pickle.dumps(network)).captures.programs == {}
