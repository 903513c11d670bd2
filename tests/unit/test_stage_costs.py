"""The costs of stages for a simulation: operations and bytes, counted on the meta device."""

import pytest
import torch
from helpers.trainers import sgd
from torch import nn
from torch.nn.functional import cross_entropy

from petra import METHODS, Network, ReversibleBlock
from petra.measure import MemoryEstimator, Profile, Seconds, StageCounter

BATCH, WIDTH = 8, 16
PARTS = {"loss": cross_entropy, "optimizer": sgd}
X, Y = torch.randn(BATCH, WIDTH), torch.randint(4, (BATCH,))
PRODUCT = 2 * BATCH * WIDTH * WIDTH  # operations of a linear layer


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, 4, bias=False)

    def forward(self, x, y):
        return self.fc(x + y)


class Stem(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return (self.fc(x),) * 2


def network():
    def part():
        return nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU())

    return list(Network(Stem(), *(ReversibleBlock(part(), part()) for _ in range(3)), Head()))


def counter(method):
    return StageCounter(network(), METHODS[method], (X,), Y, **PARTS)


@pytest.mark.parametrize(("method", "backward"), [("petra", 3), ("backprop", 2), ("checkpointed", 3)])
def test_operations_are_those_of_the_method(method, backward):
    costs = counter(method).costs(range(1, 3), flops_per_second=PRODUCT)
    assert costs.forward == pytest.approx(4)  # two blocks of two linear layers
    assert costs.backward == pytest.approx(4 * backward)


def test_the_last_stage_recomputes_nothing_that_it_has_just_computed():
    costs = counter("checkpointed").costs(range(4, 5), 2 * BATCH * WIDTH * 4)
    assert (costs.forward, costs.backward) == (1, 2)


@pytest.mark.parametrize(("method", "up", "down"), [("petra", 2, 4), ("backprop", 2, 2)])
def test_messages_are_streams_and_gradients(method, up, down):
    costs = counter(method).costs(range(2, 3), 1.0)  # both neighbours end with a reversible layer
    stream = 4 * BATCH * WIDTH
    assert (costs.forward_bytes, costs.backward_bytes) == (up * stream, down * stream)
    assert counter(method).costs(range(3, 5), 1.0).forward_bytes == 0
    assert counter(method).costs(range(0, 1), 1.0).backward_bytes == 0


@pytest.mark.parametrize("method", ["petra", "backprop", "checkpointed", "reversible"])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_memory_agrees_with_the_estimate_that_runs_the_whole_schedule(method, stage):
    cuts = [range(0, 1), range(1, 3), range(3, 5)]
    costs = counter(method).costs(cuts[stage], 1.0)
    schedule = METHODS[method].schedule(3, 1)
    estimator = MemoryEstimator(network(), METHODS[method], (X,), Y, **PARTS)
    expected = estimator.memory([cuts[stage]], stage, schedule)[0]
    assert costs.resident_bytes == expected.weights + expected.optimizer + expected.gradients
    assert costs.gradient_bytes == expected.gradients
    # The estimate counts messages and gradients that exist only within an action with the graph.
    in_flight = schedule.staleness(stage) if method != "backprop" else 1
    activations = max(in_flight, 1) * costs.saved_bytes + costs.working_bytes
    messages = costs.forward_bytes + costs.backward_bytes + 2 * 4 * BATCH * WIDTH
    assert activations <= expected.activations + 2 * messages
    assert expected.activations <= activations + 2 * messages


def test_measured_times_replace_the_count():
    seconds = [Seconds(forward=1.0 + i, backward=2.0, update=0.5) for i in range(5)]
    found = counter("petra").timed_costs(range(1, 3), Profile(seconds, {}, [[] for _ in seconds]))
    assert (found.forward, found.backward, found.update) == (5.0, 4.0, 1.0)
    assert found.resident_bytes == counter("petra").costs(range(1, 3), 1.0).resident_bytes


def test_layers_that_are_alike_are_counted_once(monkeypatch):
    own, calls = counter("petra"), []
    count = own._count_new
    monkeypatch.setattr(own, "_count_new", lambda cut: calls.append(cut) or count(cut))
    assert own.costs(range(2, 3), 1.0) == own.costs(range(3, 4), 1.0)
    assert len(calls) == 1
