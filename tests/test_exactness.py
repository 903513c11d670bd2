"""The engine equals the plain reference bit for bit, after every tick."""

import copy
from itertools import product

import pytest
import torch
from networks import batches, mixed_network
from reference import train_locked, train_pipelined, train_sequential

from petra import Trainer
from petra.execution import partition

TICKS = 50
FEWER = 23  # eight to fill five stages, five updates of three when they are full, and a rest for every k
PIPELINED = ("petra", "petra-stashed", "checkpointed", "delayed")


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-2)


def make_trainer(network, **options):
    return Trainer(network, loss=torch.nn.functional.cross_entropy, optimizer=make_optimizer, seed=7, **options)


def state(network, optimizers):
    """Weights, running statistics and momenta, as one flat list."""
    momenta = [
        optimizer.state.get(p, {}).get("momentum_buffer")
        for optimizer in optimizers
        for group in optimizer.param_groups
        for p in group["params"]
    ]
    return [*network.state_dict().values(), *momenta]


def assert_same(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


def assert_same_run(trainer, reference_network, reference, data):
    """Step the trainer and the reference side by side; the reference yields once a tick and once at the end."""
    losses = {}
    for x, y in data:
        for finished in trainer.step(x, y):
            losses[finished.microbatch] = finished.loss
        expected_losses, stages = next(reference)
        assert losses.keys() == expected_losses.keys()
        assert all(torch.equal(losses[m], expected_losses[m]) for m in losses)
        mine = state(trainer.network, [stage.optimizer for stage in trainer.stages])
        assert_same(mine, state(reference_network, [stage.optimizer for stage in stages]))
    for finished in trainer.drain():
        losses[finished.microbatch] = finished.loss
    *_, (expected_losses, stages) = reference
    assert losses.keys() == expected_losses.keys() == set(range(len(data)))
    assert all(torch.equal(losses[m], expected_losses[m]) for m in losses)
    mine = state(trainer.network, [stage.optimizer for stage in trainer.stages])
    assert_same(mine, state(reference_network, [stage.optimizer for stage in stages]))


LAYOUTS = [*product(["lock-step"], [1, 2, 3, 5]), *product(["low-staleness"], [2, 3, 5])]


@pytest.mark.parametrize(
    ("method", "order", "stages", "k"),
    [
        (method, *layout, k)
        for number, method in enumerate(PIPELINED)
        for place, layout in enumerate(LAYOUTS)
        for k in (1, 2, 3)
        if method == "petra" or layout[0] == "lock-step" or (number + place + k) % 3  # of the others, two k each
    ],
)
def test_pipelined_methods_equal_the_reference(method, order, stages, k):
    torch.manual_seed(0)
    network = mixed_network()
    twin = copy.deepcopy(network)
    trainer = make_trainer(network, method=method, stages=stages, order=order, accumulate=k)
    data = list(batches(TICKS if order == "lock-step" else FEWER))
    cuts = [list(cut) for cut in partition(len(network), stages)]
    reference = train_pipelined(twin, cuts, data, method, order, make_optimizer, k, key=7)
    assert_same_run(trainer, twin, reference, data)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("stages", [2, 5])
@pytest.mark.parametrize("method", PIPELINED)
def test_with_a_locked_forward_pass_too(method, stages, k):
    torch.manual_seed(0)
    network = mixed_network()
    twin = copy.deepcopy(network)
    trainer = make_trainer(network, method=method, stages=stages, order="locked-forward", accumulate=k)
    data = list(batches(FEWER))
    cuts = [list(cut) for cut in partition(len(network), stages)]
    reference = train_locked(twin, cuts, data, method, make_optimizer, k, key=7)
    assert_same_run(trainer, twin, reference, data)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("method", ["backprop", "reversible"])
def test_sequential_methods_equal_the_reference(method, stages, k):
    torch.manual_seed(0)
    network = mixed_network()
    twin = copy.deepcopy(network)
    trainer = make_trainer(network, method=method, stages=stages, accumulate=k)
    data = list(batches(TICKS))
    reference = train_sequential(twin, data, make_optimizer, k, 7, reversible=method == "reversible")
    assert_same_run(trainer, twin, reference, data)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("method", ["gpipe", "1f1b"])
def test_synchronous_pipelines_equal_backprop(method, stages, k):
    torch.manual_seed(0)
    network = mixed_network()
    twin = copy.deepcopy(network)
    trainer = make_trainer(network, method=method, stages=stages, accumulate=k)
    plain = make_trainer(twin, method="backprop", accumulate=k)
    data = list(batches(TICKS))
    for i, (x, y) in enumerate(data):
        trainer.step(x, y)
        plain.step(x, y)
        if (i + 1) % k == 0:
            assert_same(network.state_dict().values(), twin.state_dict().values())
    trainer.drain()
    plain.drain()
    assert_same(
        state(network, [stage.optimizer for stage in trainer.stages]),
        state(twin, [stage.optimizer for stage in plain.stages]),
    )
