"""States of trainers: what is loaded is copied, and what does not fit is refused before anything is changed."""

import copy
import pickle
from collections import namedtuple

import pytest
import torch
from helpers.networks import batches
from helpers.trainers import make, same_weights
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, NAdam
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LinearLR, MultiStepLR, SequentialLR

from petra import METHODS, Network


def network():
    torch.manual_seed(0)
    return Network(nn.Flatten(), nn.Linear(32, 6, bias=False), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 4))


def by_decay(parameters):
    """Two groups for every stage; those that have no matrix, or nothing else, are empty."""
    groups = [{"params": [p for p in parameters if (p.ndim > 1) == m], "weight_decay": m * 1e-2} for m in (1, 0)]
    return SGD(groups, 0.1, momentum=0.9)


def train(trainer, data):
    for x, y in data:
        trainer.step(x, y)


def goes_on_exactly(trainers, data):
    """Whether the second of two trainers, given the state of the first in flight, ends as the first does."""
    train(trainers[0], data[:4])
    trainers[1].load_state_dict(trainers[0].state_dict())
    for trainer in trainers:
        train(trainer, data[4:])
        trainer.drain()
    return same_weights(trainers[0].network, trainers[1].network)


def rates(trainer):
    """Of groups that have parameters."""
    groups = [group for stage in trainer.stages if stage.optimizer for group in stage.optimizer.param_groups]
    return {round(group["lr"], 9) for group in groups if group["params"]}


def tensors_of(trainer):
    """All that a trainer has between two ticks."""
    state = trainer.state_dict()
    return [t for t in torch.utils._pytree.tree_leaves(state) if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_state_in_memory_can_be_loaded_twice_and_nothing_is_shared(method):
    options = {"method": method, "stages": 3, "accumulate": 2, "clip_norm": 0.1}
    data = list(batches(11))
    first, others = make(network(), **options), [make(network(), **options) for _ in range(2)]
    train(first, data[:5])
    state = first.state_dict()
    kept = copy.deepcopy(state)
    for trainer in others:
        trainer.load_state_dict(kept)
        train(trainer, data[5:])
        trainer.drain()
    assert same_weights(others[0].network, others[1].network)
    others[0].load_state_dict(state)
    places = [{t.data_ptr() for t in tensors_of(trainer) if t.numel()} for trainer in (first, others[0])]
    assert not places[0] & places[1]
    for trainer in (first, others[0]):
        train(trainer, data[5:])
        trainer.drain()
        assert same_weights(trainer.network, others[1].network)


@pytest.mark.parametrize("method", ["petra", "dni"])
def test_a_drained_state_is_copied_too(method):
    first, other = make(network(), method=method, stages=3), make(network(), method=method, stages=[3, 2])
    train(first, batches(5))
    first.drain()
    other.load_drained(first.state_dict())
    places = [{t.data_ptr() for t in tensors_of(trainer) if t.numel()} for trainer in (first, other)]
    assert not places[0] & places[1]


@pytest.mark.parametrize("method", ["petra", "delayed", "ddg", "dni"])
def test_a_drained_state_leaves_nothing_of_what_a_trainer_did_before(method):
    # Gradients that waited for their update went into the first one after it, and a pipeline did not get empty again.
    options = {"method": method, "accumulate": 2}
    first = make(network(), stages=3, **options)
    fresh, used = (make(network(), stages=[3, 2], **options) for _ in range(2))
    data = list(batches(9))
    train(first, data[:4])
    first.drain()
    train(used, data[6:])
    for trainer in (fresh, used):
        trainer.load_drained(first.state_dict())
        train(trainer, data[4:])
        trainer.drain()
    assert same_weights(fresh.network, used.network)


def test_containers_of_targets_and_schedulers_stay_what_they_are():
    Pair = namedtuple("Pair", "a b")

    def scheduler(optimizer):
        return SequentialLR(optimizer, [LinearLR(optimizer, 0.1, total_iters=3), MultiStepLR(optimizer, [4, 8])], [6])

    trainer = make(network(), loss=lambda o, y: cross_entropy(o, y.a), scheduler=scheduler, stages=3)
    for step, (x, y) in enumerate(batches(14)):
        if step == 4:
            trainer.load_state_dict(trainer.state_dict())
        trainer.step(x, Pair(y, y))
    trainer.drain()


def test_numbers_of_an_optimizer_keep_their_dtype():
    """Some are float32 whatever the parameters are, and PyTorch would load them in the dtype of these."""
    data = list(batches(8, dtype=torch.float64))
    trainers = [make(network().double(), stages=2, optimizer=lambda p: NAdam(p, 0.01)) for _ in range(2)]
    assert goes_on_exactly(trainers, data)


def test_averages_take_the_dtype_of_another_network():
    def sgd(parameters):
        return SGD(parameters, 0.1, momentum=0.9)

    double, single = make(network().double(), optimizer=sgd, stages=2), make(network(), optimizer=sgd, stages=3)
    train(double, batches(4, dtype=torch.float64))
    double.drain()
    single.load_drained(double.state_dict())
    states = [s for stage in single.stages if stage.optimizer for s in stage.optimizer.state.values()]
    assert {s["momentum_buffer"].dtype for s in states} == {torch.float32}


def test_groups_without_parameters_can_be_resumed():
    data = list(batches(9))
    trainers = [make(network(), optimizer=by_decay, stages=4, scheduler=lambda o: ExponentialLR(o, 0.9)) for _ in "ab"]
    assert goes_on_exactly(trainers, data)


@pytest.mark.parametrize(
    ("old", "new", "milestones", "empty"),
    [
        (*cuts, milestones, (i + len(milestones)) % 2 == 0)
        for i, cuts in enumerate([(5, 1), (1, 5), (2, 5), (5, 2)])
        for milestones in ([4], [4, 8])
    ],
)
def test_nested_schedulers_go_on_at_another_cut(old, new, milestones, empty):
    def optimizer(parameters):
        made = by_decay(parameters)
        return made if empty else SGD([group for group in made.param_groups if group["params"]], 0.1)

    def scheduler(optimizer):
        parts = [
            LinearLR(optimizer, 0.1, total_iters=4),
            CosineAnnealingLR(optimizer, 20),
            ExponentialLR(optimizer, 0.5),
        ]
        return SequentialLR(optimizer, parts[: len(milestones) + 1], milestones)

    first, other = (make(network(), optimizer=optimizer, scheduler=scheduler, stages=cut) for cut in (old, new))
    data = list(batches(12))
    train(first, data[:6])
    first.drain()
    other.load_drained(first.state_dict())
    for trainer in (first, other):
        train(trainer, data[6:])
        trainer.drain()
    assert rates(first) == rates(other)
    assert len(rates(first)) == 1


def frozen(made):
    made[1].requires_grad_(False)
    return made


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ({"network": frozen(network())}, {}, r"1\.weight was not trained when .* freeze the same layers"),
        ({"optimizer": lambda p: AdamW(p, 0.1)}, {}, "an optimizer that has amsgrad, betas.* not SGD: use the same"),
        ({}, {"optimizer": lambda p: AdamW(p, 0.1)}, "an optimizer that has dampening.* not AdamW: use the same"),
        ({"optimizer": lambda p: NAdam(p, 0.1)}, {"optimizer": lambda p: AdamW(p, 0.1)}, "not AdamW: use the same"),
        ({}, {"scheduler": lambda o: ExponentialLR(o, 0.9)}, "was written without a scheduler: leave it out"),
    ],
)
@pytest.mark.parametrize("stages", [3, 2])
def test_what_does_not_fit_is_refused_before_anything_is_changed(old, new, message, stages):
    old, new = ({"network": network(), "stages": cut, **options} for cut, options in ((3, old), (stages, new)))
    first, other = make(**copy.deepcopy(old)), make(**new)
    train(first, batches(4))
    first.drain()
    before = copy.deepcopy(other.network)
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(first.state_dict()) if stages == 3 else other.load_drained(first.state_dict())
    assert same_weights(other.network, before)
    assert [stage.updates for stage in other.stages] == [0] * stages


def test_weights_of_another_shape_change_nothing():
    other = network()
    other[4] = nn.Linear(6, 5)
    first, other = make(network(), stages=2), make(other, stages=2)
    train(first, batches(3))
    before = copy.deepcopy(other.network)
    with pytest.raises(RuntimeError, match=r"4\.weight has shape \[4, 6\] in the checkpoint, not \[5, 6\]"):
        other.load_state_dict(first.state_dict())
    assert same_weights(other.network, before)


class Extra(nn.Linear):
    seen = ()

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


class Normalized(nn.Sequential):
    def __init__(self, *layers):
        super().__init__(*layers)
        self.register_buffer("mean", torch.zeros(3))


def test_buffers_of_the_network_itself_and_extra_states():
    first, other = (make(Normalized(nn.Flatten(), Extra(32, 6), nn.Linear(6, 4)), stages=2) for _ in "ab")
    first.network.mean.fill_(2)
    first.network[1].seen = [7]
    train(first, batches(3))
    other.load_state_dict(first.state_dict())
    assert other.network.mean.tolist() == [2, 2, 2]
    assert other.network[1].seen == [7]
    assert other.network[1].seen is not first.network[1].seen


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, pickle.dumps])
def test_trainers_are_not_duplicated_without_their_gradients(duplicate):
    trainer = make(network())
    with pytest.raises(ValueError, match="load_state_dict"):
        duplicate(trainer)
