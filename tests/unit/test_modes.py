"""Batch norm, dropout, autocast and evaluation: everything that depends on a mode or a state."""

import copy

import pytest
import torch
from helpers.networks import Classify, Split, batches, mixed_network, reversible_network
from helpers.trainers import make, same_weights, trained
from torch import nn
from torch.nn.functional import cross_entropy

from petra import METHODS, LayerError, Network, ReversibleResidual
from petra.methods import Settings
from petra.models.resnet import resnet
from petra.reversible.streams import narrowed


def test_dropout_masks_do_not_depend_on_the_cut():
    network = mixed_network()
    runs = [trained(copy.deepcopy(network), method="reversible", stages=s) for s in (1, 2, 6, [1, 4, 1])]
    assert all(same_weights(runs[0], run) for run in runs[1:])
    assert not same_weights(runs[0], trained(network, method="reversible", seed=1))


def test_dropout_masks_of_replicas_differ():
    masks = [Settings(torch.device("cpu"), seed=3, replica=replica).replica_seed for replica in range(4)]
    assert masks[0] == 3
    assert len(set(masks)) == 4


@pytest.mark.parametrize("method", ["petra", "dni"])
def test_runs_repeat_and_the_global_random_state_is_left_alone(method):
    network = mixed_network()
    torch.manual_seed(1)
    first = trained(copy.deepcopy(network), ticks=4, method=method, stages=4)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second = trained(network, ticks=4, method=method, stages=4)
    assert same_weights(first, second)
    assert torch.equal(state, torch.get_rng_state())


def test_batch_norm_counts_each_microbatch_once_when_it_goes_backward():
    network = reversible_network(2)
    trainer = make(network, stages=4, schedule="lock-step")
    for tick, (x, y) in enumerate(batches(12), start=1):
        trainer.step(x, y)
        counted = [int(network[i].state_dict()[name]) for i, name in enumerate(NORMS)]
        assert counted == [max(0, tick - 6), max(0, tick - 5), max(0, tick - 4)]
    trainer.drain()
    assert [int(network[i].state_dict()[name]) for i, name in enumerate(NORMS)] == [12, 12, 12]


NORMS = ("body.1.num_batches_tracked", "f.1.num_batches_tracked", "f.1.num_batches_tracked")


@pytest.mark.parametrize("method", sorted(METHODS))
def test_evaluation_disturbs_nothing(method):
    network = mixed_network()
    twin = copy.deepcopy(network)
    trainers = [make(n, method=method, stages=3, accumulate=2) for n in (network, twin)]
    test = list(batches(2, seed=9))
    for x, y in batches(9):
        trainers[0].step(x, y)
        trainers[1].step(x, y)
        trainers[0].evaluate(test)
    for trainer in trainers:
        trainer.drain()
    assert same_weights(network, twin)
    assert network.training


def test_evaluation_uses_running_statistics_and_counts_right():
    network = mixed_network()
    trained(network, stages=3)
    trainer = make(network, stages=3)
    data = list(batches(8, seed=4))
    network.eval()
    with torch.no_grad():
        outputs = [network(x) for x, _ in data]
    loss = sum(float(cross_entropy(o, y)) * len(y) for o, (_, y) in zip(outputs, data, strict=True))
    right = sum(int((o.argmax(1) == y).sum()) for o, (_, y) in zip(outputs, data, strict=True))
    network.train()
    found = trainer.evaluate(data)
    assert found.samples == 23
    assert found.loss == pytest.approx(loss / 23, rel=1e-6)
    assert found.accuracy == pytest.approx(right / 23)


@pytest.mark.parametrize("pack", [lambda y: {"y": y}, lambda y: (y, None), lambda y: None])
def test_evaluation_takes_the_targets_that_training_takes(pack):
    trainer = make(mixed_network(), loss=lambda o, y: o.square().mean(), stages=2)
    data = [(x, pack(y)) for x, y in batches(8, seed=4)]
    trainer.step(*data[0])
    found = trainer.evaluate(data)
    squares = sum(float(trainer.predict(x).square().mean()) * len(x) for x, _ in data)
    assert found.loss == pytest.approx(squares / 23, rel=1e-6)
    assert (found.accuracy, found.samples) == (None, 23)


def test_targets_inside_containers_go_to_the_device():
    seen = []
    network = Network(nn.Linear(6, 4))
    trainer = make(network, loss=lambda o, y: (seen.append(y["a"][0].device.type), o.sum())[1], device="meta")
    trainer.step(torch.randn(5, 6), {"a": [torch.zeros(5)]})
    assert seen == ["meta"]


def test_targets_that_are_to_be_ignored_are_neither_right_nor_wrong():
    trainer = make(Network(nn.Identity()), loss=lambda o, y: cross_entropy(o.flatten(0, -2), y.flatten()))
    outputs = torch.eye(3)[torch.tensor([[0, 1, 2, 2]])] * 9
    ignored = torch.full((1, 4), -100)
    found = trainer.evaluate([(outputs, torch.tensor([[0, 2, -100, -100]])), (outputs, ignored)])
    assert (found.accuracy, found.samples) == (0.5, 2)
    assert found.loss == pytest.approx(float(cross_entropy(outputs[0, :2], torch.tensor([0, 2]))))
    with pytest.raises(ValueError, match="nothing to evaluate, because all targets of the test batches are negative"):
        trainer.evaluate([(outputs, ignored)])


def test_autocast_is_the_same_forward_and_backward_and_streams_are_float32():
    seen = []

    class Look(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            y = self.fc(x)
            seen.append((torch.is_grad_enabled(), x.dtype, y.dtype))
            return y

    class Double(nn.Module):
        def forward(self, x):
            return x, x

    class Join(nn.Linear):
        def forward(self, x, y):
            return super().forward(x + y)

    network = Network(Double(), ReversibleResidual(Look()), ReversibleResidual(Look()), Join(4, 4))
    trainer = make(network, stages=3, autocast=torch.bfloat16)
    for _ in range(6):
        trainer.step(torch.randn(3, 4), torch.randint(4, (3,)))
    trainer.drain()
    assert set(seen) == {(grad, torch.float32, torch.bfloat16) for grad in (False, True)}
    assert not torch.is_autocast_enabled("cpu")


class Single(nn.Module):
    def forward(self, streams):
        return streams[0]


def test_resnets_compute_under_autocast_as_the_sequence_of_their_layers():
    network = resnet((2, 1), width=4, num_classes=4, in_channels=2).train()
    stem, *rest = copy.deepcopy(network)
    plain = nn.Sequential(stem, Single(), *rest)
    seen = []
    for layer in network[1:]:
        layer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].dtype))
    for x, y in batches(2):
        outputs = []
        for one in (network, plain):
            with torch.autocast("cpu", torch.bfloat16):
                outputs.append(one(x))
            cross_entropy(outputs[-1].float(), y).backward()
        assert torch.equal(outputs[0], outputs[1].float())
    assert seen == 2 * [*3 * [torch.bfloat16], torch.float32]  # without casts between blocks
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(network.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("method", ["backprop", "reversible"])
def test_cuts_of_resnets_make_no_difference_under_autocast(method):
    network = resnet((2, 1), width=4, num_classes=4, in_channels=2)
    options = {"ticks": 4, "method": method, "autocast": torch.bfloat16}
    runs = [trained(copy.deepcopy(network), stages=s, **options) for s in (1, 2, [1, 2, 1, 1], 5)]
    assert all(same_weights(runs[0], run) for run in runs[1:])


class Narrow(nn.Linear):
    narrows = True

    def forward(self, x):
        x = narrowed(x)
        return x + super().forward(x)


def test_what_is_narrowed_anyway_is_not_widened_before():
    seen = []
    network = Network(nn.Linear(4, 4), Narrow(4, 4), Narrow(4, 4), nn.Linear(4, 4))
    for layer in network[1:]:
        layer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0].dtype))
    low, high = torch.bfloat16, torch.float32
    with torch.autocast("cpu", low):
        assert network(torch.randn(3, 4)).dtype == high
    assert seen == [low, low, high]
    for stages, expected in ((1, [low, low, high]), ([2, 2], [low, high, high])):
        seen.clear()
        make(network, method="backprop", stages=stages, autocast=low).step(torch.randn(3, 4), torch.randint(4, (3,)))
        assert seen == expected
    with torch.autocast("cpu", low):
        assert narrowed(torch.zeros(2, dtype=torch.float64)).dtype == torch.float64  # which autocast leaves alone
    assert narrowed(torch.zeros(2)).dtype == high


class Halved(nn.Linear):
    def forward(self, x):
        return super().forward(x).half()


def test_what_comes_in_another_low_precision_is_narrowed_too():
    network = Network(Halved(4, 4), Narrow(4, 4))
    options = {"method": "backprop", "autocast": torch.bfloat16}
    x = torch.randn(3, 4)
    whole, cut = (make(network, stages=stages, **options).predict(x) for stages in (1, 2))
    assert torch.equal(whole, cut)
    with torch.autocast("cpu", torch.bfloat16):
        expected = network[1:](x.half())
    assert torch.equal(make(network[1:], **options).predict(x.half()), expected)


def test_modules_in_evaluation_mode_stay_so():
    network = mixed_network()
    network[1].eval()
    before = copy.deepcopy(network[1])
    trained(network, stages=3)
    assert not network[1].f.training
    assert torch.equal(network[1].f[1].running_mean, before.f[1].running_mean)
    assert not torch.equal(network[1].f[0].weight, before.f[0].weight)


class Counting(nn.Module):
    """Counts what it has seen, or begins with a scale that it takes from the first data and keeps."""

    def __init__(self, always, in_place=True):
        super().__init__()
        self.always = always
        self.in_place = in_place
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.always or not self.seen:
            if self.in_place:
                self.seen += len(x)
            else:
                self.seen = self.seen + len(x)
        return x * 2


@pytest.mark.parametrize("always", [True, False])
@pytest.mark.parametrize("method", ["backprop", "reversible", "petra", "checkpointed"])
def test_layers_that_count_their_evaluations_are_noticed_where_there_are_two(method, always):
    network = Network(nn.Linear(4, 4), nn.Sequential(Counting(always)), nn.Linear(4, 4))
    trainer = make(network, method=method, stages=3)
    x, y = torch.randn(3, 4), torch.randint(4, (3,))
    if always and method != "backprop":
        with pytest.raises(LayerError, match=r"layer 1 \(Sequential\) changes a buffer of its Counting"):
            trainer.step(x, y), trainer.drain()
    else:
        for _ in range(4):
            trainer.step(x, y)
        assert network[1][0].seen == (12 if always else 3)


def test_layers_that_replace_a_buffer_whenever_they_run_are_noticed():
    network = Network(nn.Linear(4, 4), Counting(True, in_place=False), nn.Linear(4, 4))
    trainer = make(network, method="petra", stages=3)
    with pytest.raises(LayerError, match=r"layer 1 \(Counting\) changes a buffer of its Counting"):
        trainer.step(torch.randn(3, 4), torch.randint(4, (3,))), trainer.drain()


def test_a_norm_shared_by_layers_keeps_its_statistics():
    f = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    network = Network(Split(2, 3), ReversibleResidual(f), ReversibleResidual(f), Classify(3, 4))
    trained(network, stages=[3, 1], ticks=4)
    assert int(f[1].num_batches_tracked) == 8


def test_evaluation_leaves_every_module_in_its_mode():
    network = mixed_network()
    network[1].eval()
    modes = [m.training for m in network.modules()]
    make(network, stages=3).evaluate(batches(2))
    assert [m.training for m in network.modules()] == modes


def test_masks_of_a_replica_are_those_of_no_other_seed():
    pairs = [(seed, replica) for seed in range(4) for replica in range(4)]
    masks = {Settings(torch.device("cpu"), seed, replica=replica).replica_seed for seed, replica in pairs}
    assert len(masks) == 16


def test_an_evaluation_that_fails_leaves_every_module_in_its_mode():
    network = mixed_network()
    with pytest.raises(LayerError, match="layer 0"):
        make(network, stages=3).predict(torch.randn(3, 5, 4, 4))
    assert all(m.training for m in network.modules())
