"""The engine equals the plain reference bit for bit, after every tick."""

import copy
from itertools import product

import pytest
import torch
from helpers.comparison import assert_same, assert_same_run, make_optimizer, state
from helpers.networks import batches, mixed_network
from helpers.reference import train_locked, train_pipelined, train_sequential

from petra import Trainer
from petra.pipeline import partition

TICKS = 32
FEWER = 23  # eight to fill five stages, five updates of three when they are full, and a rest for every k
PIPELINED = ("petra", "petra-stashed", "checkpointed", "delayed")


def make_trainer(network, **options):
    options = {"stages": 1} | options
    return Trainer(network, loss=torch.nn.functional.cross_entropy, optimizer=make_optimizer, seed=7, **options)


LAYOUTS = [*product(["lock-step"], [1, 2, 3, 5]), *product(["low-staleness"], [2, 3, 5])]


@pytest.mark.parametrize(
    ("method", "schedule", "stages", "k"),
    [
        pytest.param(method, *layout, k, marks=() if layout == ("low-staleness", 3) else pytest.mark.slow)
        for number, method in enumerate(PIPELINED)
        for place, layout in enumerate(LAYOUTS)
        for k in (1, 2, 3)
        if method == "petra" or layout[0] == "lock-step" or (number + place + k) % 3  # of the others, two k each
    ],
)
def test_pipelined_methods_equal_the_reference(method, schedule, stages, k):
    torch.manual_seed(0)
    network = mixed_network()
    twin = copy.deepcopy(network)
    trainer = make_trainer(network, method=method, stages=stages, schedule=schedule, accumulate=k)
    data = list(batches(TICKS if schedule == "lock-step" else FEWER))
    cuts = [list(cut) for cut in partition(len(network), stages)]
    reference = train_pipelined(twin, cuts, data, method, schedule, make_optimizer, k, key=7)
    assert_same_run(trainer, twin, reference, data)


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("stages", [2, 5])
@pytest.mark.parametrize("method", PIPELINED)
def test_with_a_locked_forward_pass_too(method, stages, k):
    torch.manual_seed(0)
    network = mixed_network()
    twin = copy.deepcopy(network)
    trainer = make_trainer(network, method=method, stages=stages, schedule="locked-forward", accumulate=k)
    data = list(batches(FEWER))
    cuts = [list(cut) for cut in partition(len(network), stages)]
    reference = train_locked(twin, cuts, data, method, make_optimizer, k, key=7)
    assert_same_run(trainer, twin, reference, data)


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("method", ["backprop", "reversible"])
def test_sequential_methods_equal_the_reference(method, stages, k):
    torch.manual_seed(0)
    network = mixed_network()
    twin = copy.deepcopy(network)
    trainer = make_trainer(network, method=method, stages=stages, accumulate=k)
    data = list(batches(FEWER))
    reference = train_sequential(twin, data, make_optimizer, k, 7, reversible=method == "reversible")
    assert_same_run(trainer, twin, reference, data)


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_synchronous_pipelines_equal_backprop(schedule, stages, k):
    torch.manual_seed(0)
    network = mixed_network()
    twin = copy.deepcopy(network)
    trainer = make_trainer(network, method="backprop", schedule=schedule, stages=stages, accumulate=k)
    plain = make_trainer(twin, method="backprop", accumulate=k)
    data = list(batches(FEWER))
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
