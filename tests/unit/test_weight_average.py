"""Averaged weights compared with an average that is computed after every update, in every way of training."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import petra
from petra.distributed import run_together


def make_trainer(transport=None, **options):
    torch.manual_seed(0)
    shared = nn.Linear(8, 8)
    network = nn.Sequential(
        nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8)), nn.Sequential(shared, nn.Tanh(), shared), nn.Linear(8, 3)
    )
    options = {"stages": 3, "ema": 0.8, "optimizer": lambda p: torch.optim.SGD(p, 0.1)} | options
    return petra.Trainer(network, loss=cross_entropy, transport=transport, **options)


def batches(count=10):
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 5, generator=generator), torch.arange(4) % 3) for _ in range(count)]


@pytest.mark.parametrize("options", [{}, {"method": "delayed"}, {"method": "reversible", "stages": 1}])
def test_averages_follow_every_update(options):
    trainer = make_trainer(**options)
    expected = {name: value.clone() for name, value in trainer.network.state_dict().items()}
    for x, y in batches():
        before = trainer.updates
        trainer.step(x, y)
        for stage in trainer.stages:
            if trainer.updates[stage.index] == before[stage.index]:
                continue
            for name, value in trainer._networks()[stage.index].items():
                if value.is_floating_point():
                    expected[name] = torch.lerp(expected[name], value, 1 - 0.8)
                else:
                    expected[name] = value.clone()
    found = trainer.weights(average=True)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert not torch.equal(found["2.weight"], trainer.network[2].weight)


def test_averages_are_evaluated_and_then_put_away():
    trainer, other = make_trainer(), make_trainer(ema=None)
    for x, y in batches():
        trainer.step(x, y)
    before = {name: value.clone() for name, value in trainer.network.state_dict().items()}
    found = trainer.evaluate(batches(), average=True)
    other.network.load_state_dict(trainer.weights(average=True))
    assert found == other.evaluate(batches()) != trainer.evaluate(batches())
    assert all(torch.equal(value, before[name]) for name, value in trainer.network.state_dict().items())
    trainer.step(*batches()[0])
    with pytest.raises(ValueError, match="averages no weights: create it with ema"):
        other.evaluate(batches(), average=True)
    with pytest.raises(ValueError, match=r"ema is 1\.5: give a decay"):
        make_trainer(ema=1.5)


@pytest.mark.parametrize("stages", [3, 2])
def test_averages_are_resumed(stages):
    first, whole = make_trainer(), make_trainer()
    for i, (x, y) in enumerate(batches()):
        whole.step(x, y)
        if i < 5:
            first.step(x, y)
    again = make_trainer(stages=stages)
    if stages == 3:
        again.load_state_dict(copy.deepcopy(first.state_dict()))
        for x, y in batches()[5:]:
            again.step(x, y)
        expected = whole.weights(average=True)
    else:
        first.drain()
        again.load_drained(first.state_dict())
        expected = first.weights(average=True)
    assert all(torch.equal(value, expected[name]) for name, value in again.weights(average=True).items())


def test_ranks_have_the_averages_of_one_process(tmp_path):
    def train(transport=None):
        trainer = make_trainer(transport)
        trainer.fit(batches(), batches(2), epochs=2, out=tmp_path / str(transport is None), quiet=True)
        return trainer.weights(average=True)

    alone = train()
    found = next(own for own in run_together(train, 2) if own is not None)
    assert all(torch.equal(value, alone[name]) for name, value in found.items())
    for name in ("ema.safetensors", "best.safetensors", "weights.safetensors"):
        assert (tmp_path / "True" / name).read_bytes() == (tmp_path / "False" / name).read_bytes()


def test_the_best_weights_are_averages(tmp_path):
    from safetensors.torch import load_file

    trainer = make_trainer()
    result = trainer.fit(batches(), batches(2), epochs=1, out=tmp_path, quiet=True)
    assert result.best in (result.ema_test_accuracy, result.ema_test_loss)
    averages = load_file(tmp_path / "ema.safetensors")
    assert all(torch.equal(value, averages[name]) for name, value in load_file(tmp_path / "best.safetensors").items())
