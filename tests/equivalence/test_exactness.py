"""The engine equals the plain reference bit for bit, after every tick."""

import copy

import pytest
import torch
from helpers.comparison import assert_same, assert_same_run, make_optimizer, state
from helpers.grids import all_pairs
from helpers.networks import batches, mixed_network
from helpers.reference import train_locked, train_pipelined, train_sequential

from petra import Trainer
from petra.pipeline import partition

PIPELINED = ("petra", "petra-stashed", "checkpointed", "delayed")


def micro_batches(stages, k):
    """Enough to fill the stages, for four updates of k when they are full, and for a rest."""
    return list(batches(max(10, 2 * (stages - 1) + 4 * k + 3)))


def make_trainer(network, **options):
    options = {"stages": 1} | options
    return Trainer(network, loss=torch.nn.functional.cross_entropy, optimizer=make_optimizer, seed=7, **options)


LAYOUTS = [*(("lock-step", stages) for stages in (1, 2, 3, 5)), *(("low-staleness", stages) for stages in (2, 3, 5))]


@pytest.mark.parametrize(
    ("method", "schedule", "stages", "k"),
    [
        pytest.param(method, *layout, k, marks=() if layout == ("low-staleness", 3) else pytest.mark.slow)
        for method, layout, k in all_pairs(
            PIPELINED,
            LAYOUTS,
            (1, 2, 3),
            also=[("petra", (schedule, 3), k) for schedule in ("lock-step", "low-staleness") for k in (1, 2, 3)],
        )
    ],
)
def test_pipelined_methods_equal_the_reference(method, schedule, stages, k):
    torch.manual_seed(0)
    network = mixed_network()
    twin = copy.deepcopy(network)
    trainer = make_trainer(network, method=method, stages=stages, schedule=schedule, accumulate=k)
    data = micro_batches(stages, k)
    cuts = [list(cut) for cut in partition(len(network), stages)]
    reference = train_pipelined(twin, cuts, data, method, schedule, make_optimizer, k, key=7)
    assert_same_run(trainer, twin, reference, data)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "stages", "k"), all_pairs(PIPELINED, (2, 5), (1, 2, 3)))
def test_with_a_locked_forward_pass_too(method, stages, k):
    torch.manual_seed(0)
    network = mixed_network()
    twin = copy.deepcopy(network)
    trainer = make_trainer(network, method=method, stages=stages, schedule="locked-forward", accumulate=k)
    data = micro_batches(stages, k)
    cuts = [list(cut) for cut in partition(len(network), stages)]
    reference = train_locked(twin, cuts, data, method, make_optimizer, k, key=7)
    assert_same_run(trainer, twin, reference, data)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "stages", "k"), all_pairs(("backprop", "reversible"), (1, 2, 3, 5), (1, 2, 3)))
def test_sequential_methods_equal_the_reference(method, stages, k):
    torch.manual_seed(0)
    network = mixed_network()
    twin = copy.deepcopy(network)
    trainer = make_trainer(network, method=method, stages=stages, accumulate=k)
    data = micro_batches(1, k)
    reference = train_sequential(twin, data, make_optimizer, k, 7, reversible=method == "reversible")
    assert_same_run(trainer, twin, reference, data)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "stages", "k"), all_pairs(("gpipe", "1f1b"), (1, 2, 3, 5), (1, 2, 3)))
def test_synchronous_pipelines_equal_backprop(schedule, stages, k):
    torch.manual_seed(0)
    network = mixed_network()
    twin = copy.deepcopy(network)
    trainer = make_trainer(network, method="backprop", schedule=schedule, stages=stages, accumulate=k)
    plain = make_trainer(twin, method="backprop", accumulate=k)
    data = micro_batches(stages, k)
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
