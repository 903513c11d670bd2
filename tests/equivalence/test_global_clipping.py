"""Clipping by the norm over all stages: torch's clip_grad_norm_, and a plain version with late norms."""

import copy
from itertools import pairwise
from math import sqrt

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import petra
from petra.distributed import run_together

NORM = 0.3


def make_network():
    torch.manual_seed(0)
    sizes = (6, 9, 5, 7, 3)
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(sizes)]
    return nn.Sequential(*layers).double()


def make_trainer(transport=None, clip="global", **options):
    options = {"method": "petra", "stages": 4, "accumulate": 2} | options
    return petra.Trainer(
        make_network(),
        loss=cross_entropy,
        optimizer=lambda p: torch.optim.SGD(p, 0.5, momentum=0.9),
        transport=transport,
        clip=clip,
        clip_norm=None if clip == "stage" else NORM,
        **options,
    )


def batches(count=14):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 4, 6, dtype=torch.float64, generator=generator)
    return list(zip(x, torch.arange(4 * count).view(count, 4) % 3, strict=True))


def train(trainer, data=None):
    for x, y in batches() if data is None else data:
        trainer.step(x, y)
    trainer.drain()
    return trainer


def own_weights(trainer):
    return {name: value for name, value in trainer.network.state_dict().items() if not value.is_meta}


@pytest.mark.parametrize("schedule", ["sequential", "gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("count", [14, 13])
def test_exact_schedules_clip_as_torch_does(schedule, count):
    trainer = train(make_trainer(schedule=schedule), batches(count))
    network = make_network()
    optimizer = torch.optim.SGD(network.parameters(), 0.5, momentum=0.9)
    clipped = 0
    for first in range(0, count, 2):
        optimizer.zero_grad()
        group = batches(count)[first : first + 2]
        for x, y in group:
            (cross_entropy(network(x), y) / len(group)).backward()
        clipped += float(nn.utils.clip_grad_norm_(network.parameters(), NORM)) > NORM
        optimizer.step()
    assert clipped > 3
    for name, value in network.state_dict().items():
        torch.testing.assert_close(trainer.network.state_dict()[name], value, rtol=1e-11, atol=1e-13)


class LateNorms:
    """A plain version: the norms of all updates so far, and which of them a stage may use."""

    def __init__(self, trainer):
        self.tick, self.history, self.clipped = 0, [], 0
        self.stages = len(trainer.stages)
        trainer.executor.announcements.append(self.begin)
        for stage in trainer.stages:
            stage.update = lambda stage=stage: self.update(stage)

    def begin(self, start, tick):
        self.tick += 1

    def update(self, stage):
        stage.prepare_update()
        gradients = [p.grad for p in stage.parameters]
        own = sum(float(g.square().sum()) for g in gradients)
        total = own
        for other in set(range(self.stages)) - {stage.index}:
            known = [norm for tick, s, norm in self.history if s == other and tick <= self.tick - self.stages - 1]
            total += known[-1] if known else 0.0
        self.history.append((self.tick, stage.index, own))
        factor = min(1.0, NORM / (sqrt(total) + 1e-6))
        self.clipped += factor < 1
        for gradient in gradients:
            gradient.mul_(factor)
        stage.apply_update()


@pytest.mark.parametrize("options", [{}, {"accumulate": 1}, {"schedule": "flush:2"}, {"method": "delayed"}])
def test_late_norms_are_those_of_a_plain_version(options):
    trainer, plain = make_trainer(**options), make_trainer(clip="stage", **options)
    reference = LateNorms(plain)
    train(trainer)
    train(plain)
    assert reference.clipped > 5
    for name, value in plain.network.state_dict().items():
        torch.testing.assert_close(trainer.network.state_dict()[name], value, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"schedule": "1f1b"}, {"schedule": "interleaved"}])
def test_ranks_clip_bit_for_bit_as_one_process(options):
    alone = own_weights(train(make_trainer(**options)))
    found = run_together(lambda transport: own_weights(train(make_trainer(transport, **options))), 2)
    together = found[0] | found[1]
    assert together.keys() == alone.keys()
    assert all(torch.equal(together[name], value) for name, value in alone.items())


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("read", [3, 8])
def test_norms_on_their_way_are_saved(ranks, read):
    whole = own_weights(train(make_trainer()))

    def work(transport):
        first = make_trainer(transport)
        for x, y in batches()[:read]:
            first.step(x, y)
        state = copy.deepcopy(first.state_dict())
        again = make_trainer(transport)
        again.load_state_dict(state)
        return own_weights(train(again, batches()[read:]))

    found = {name: value for own in run_together(work, ranks) for name, value in own.items()}
    assert all(torch.equal(found[name], value) for name, value in whole.items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip": "all"}, "clip is 'all': give 'stage' or 'global'"),
        ({"clip": "global"}, "clip is 'global', but there is no clip_norm"),
        ({"clip_norm": -1}, "clip_norm is -1: give a positive norm"),
    ],
)
def test_impossible_clipping_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        petra.Trainer(make_network(), loss=cross_entropy, optimizer=lambda p: torch.optim.SGD(p, 0.1), **options)
