"""Compares a trainer with a plain reference after every tick."""

import torch


def make_optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-2)


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
