"""Guarantees of the engine for every method, schedule and size."""

import copy
from collections import Counter

import pytest
import torch
from helpers.grids import all_pairs
from helpers.networks import Classify, Shrink, Split, batches, mixed_network, residual, reversible_network
from helpers.trainers import make, same_weights, trained
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from petra import METHODS, Network, ReversibleBlock, ReversibleResidual
from petra.schedule import Kind


class Probe(nn.Module):
    """A linear map small enough for thousands of runs."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))

    def forward(self, x):
        return x * self.w


def probes(count):
    return Network(*(Probe() for _ in range(count)))


@given(
    method=st.sampled_from(sorted(METHODS.keys() - {"dni"})),  # whose gradients are predicted
    stages=st.integers(1, 5),
    k=st.integers(1, 4),
    runs=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    schedule=st.sampled_from(["lock-step", "low-staleness", None]),
)
def test_every_microbatch_enters_every_stages_updates_exactly_once(method, stages, k, runs, schedule):
    """Counted from execution: each gradient is a different power of two, so their sum tells which were used."""
    network = probes(stages)
    used = [Counter() for _ in range(stages)]

    class Count(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})

        def step(self):
            (parameter,) = self.param_groups[0]["params"]
            stage = next(i for i, layer in enumerate(network) if layer.w is parameter)
            total = round(float(parameter.grad) * counts[stage])
            used[stage].update(m for m in range(40) if total >> m & 1)

    pipelined = METHODS[method].pipelined
    trainer = make(
        network,
        method=method,
        stages=stages,
        accumulate=k,
        schedule=schedule if pipelined else None,
        optimizer=Count,
        loss=lambda output, target: (output * target).sum(),
    )
    counts = Counter()  # gradients since the last update, as the stage itself sees them
    seen = []

    def observe(tick, action, stage):
        seen.append(action)
        if action.kind is Kind.BACKWARD:
            counts[stage.index] += 1
        elif action.kind is Kind.UPDATE:
            counts[stage.index] = 0

    trainer.executor.observers.append(observe)
    m = 0
    finished = []
    for run in runs:  # fill and drain, several times over
        for _ in range(run):
            value = torch.tensor([float(2**m)], dtype=torch.float64)
            finished += trainer.step(torch.ones(1, dtype=torch.float64), value)
            m += 1
        finished += trainer.drain()
        assert not trainer.executor.in_flight
    assert sorted(f.microbatch for f in finished) == list(range(m))
    for stage in range(stages):
        assert used[stage] == Counter(range(m))
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            assert [a.microbatch for a in seen if a.stage == stage and a.kind is kind] == list(range(m))


@pytest.mark.parametrize(
    ("method", "stages", "k"),
    all_pairs(("petra", "petra-stashed", "checkpointed", "delayed"), (1, 2, 3, 6), (1, 3)),
)
def test_staleness_counted_from_execution(method, stages, k):
    for schedule, factor in (("lock-step", 2), ("low-staleness", 1)):
        trainer = make(mixed_network(), method=method, stages=stages, schedule=schedule, accumulate=k)
        forward, backward = {}, {}

        def observe(tick, action, stage, forward=forward, backward=backward):
            if action.kind is not Kind.UPDATE:
                when = forward if action.kind is Kind.FORWARD else backward
                when[stage.index, action.microbatch] = tick

        trainer.executor.observers.append(observe)
        for x, y in batches(12):
            trainer.step(x, y)
        trainer.drain()
        for stage in range(stages):
            delays = {backward[stage, m] - forward[stage, m] for m in range(12)}
            assert delays == {factor * (stages - 1 - stage)}


@pytest.mark.parametrize(("schedule", "stages", "k"), all_pairs(("lock-step", "low-staleness"), (1, 2, 3, 5), (1, 2)))
def test_without_learning_petra_gives_the_gradients_of_backprop(schedule, stages, k):
    torch.manual_seed(0)
    network = mixed_network().double()
    twin = copy.deepcopy(network)
    options = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.0), "accumulate": k, "seed": 3}
    petra = make(network, method="petra", stages=stages, schedule=schedule, **options)
    backprop = make(twin, method="backprop", **options)
    found, expected = {}, {}
    for trainer, into in ((petra, found), (backprop, expected)):

        def keep(tick, action, stage, trainer=trainer, into=into):
            if action.kind is Kind.UPDATE:
                names = {p: name for name, p in trainer.network.named_parameters()}
                for p in stage.parameters:
                    into[names[p], action.microbatch] = p.grad.clone()

        trainer.executor.observers.append(keep)
        for x, y in batches(7, dtype=torch.float64):
            trainer.step(x, y)
        trainer.drain()
    assert found.keys() == expected.keys()
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, expected[key], rtol=1e-10, atol=1e-10)


class Counted(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.calls = []

    def forward(self, *x):
        self.calls.append(torch.is_grad_enabled())
        return self.inner(*x)


@pytest.mark.parametrize("method", ["petra", "reversible"])
@pytest.mark.parametrize("stages", [1, 2, 4, 6])
def test_residual_functions_run_once_forward_and_once_backward(method, stages):
    functions = [Counted(residual(3)) for _ in range(5)]
    network = Network(
        Split(2, 3),
        ReversibleResidual(functions[0]),
        ReversibleBlock(functions[1], functions[2]),
        ReversibleResidual(functions[3]),
        ReversibleResidual(functions[4]),
        Classify(3, 4),
    )
    trainer = make(network, method=method, stages=stages)
    trainer.loss_checked = True  # takes an evaluation
    for x, y in batches(9):
        trainer.step(x, y)
    trainer.drain()
    for function in functions:
        assert Counter(function.calls) == {False: 9, True: 9}


@pytest.mark.parametrize("stages", [2, 4, 6])
def test_ordinary_layers_run_once_forward_and_once_backward_under_petra(stages):
    layers = [Counted(Split(2, 3)), Counted(Shrink(3, 4)), Counted(Classify(4, 4))]
    network = mixed_network()
    network[0], network[3], network[5] = layers
    trainer = make(network, stages=stages)
    trainer.loss_checked = True  # takes an evaluation
    for x, y in batches(9):
        trainer.step(x, y)
    trainer.drain()
    assert Counter(layers[0].calls) == Counter(layers[1].calls) == {False: 9, True: 9}
    assert Counter(layers[2].calls) == {True: 9}  # the last layer and the loss: one evaluation serves both


def test_nobody_asks_for_the_gradient_of_the_data():
    asked = []

    class Ask(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            asked.append(x.requires_grad)
            return self.fc(x)

    for method in METHODS:
        asked.clear()
        trainer = make(Network(Ask(), nn.Linear(4, 4)), stages=2, method=method)
        for _ in range(4):
            trainer.step(torch.randn(3, 4), torch.randint(4, (3,)))
        trainer.drain()
        assert set(asked) == {False}


@pytest.mark.parametrize(
    ("one", "other"), [("petra", "reversible"), ("petra-stashed", "reversible"), ("delayed", "backprop")]
)
def test_on_one_stage_pipelined_methods_are_their_exact_twins(one, other):
    network = mixed_network()
    assert same_weights(trained(copy.deepcopy(network), method=one), trained(network, method=other))


def test_until_its_first_message_a_stage_does_nothing():
    network = mixed_network()
    before = copy.deepcopy(network)
    trainer = make(
        network, stages=6, schedule="lock-step", optimizer=lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.5)
    )
    data = list(batches(11))
    for tick, (x, y) in enumerate(data):
        trainer.step(x, y)
        for stage in range(6):
            first_backward = 5 + (5 - stage)
            untouched = same_weights(network[stage], before[stage])
            assert untouched == (tick < first_backward)


def test_scheduler_and_any_optimizer_per_stage():
    network = reversible_network(2)
    trainer = make(
        network,
        stages=4,
        accumulate=2,
        optimizer=lambda p: torch.optim.AdamW(p, lr=1.0),
        scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=3, gamma=0.1),
    )
    for x, y in batches(8):
        trainer.step(x, y)
    trainer.drain()
    assert [stage.updates for stage in trainer.stages] == [4] * 4
    assert [stage.optimizer.param_groups[0]["lr"] for stage in trainer.stages] == [0.1] * 4


def test_sparse_gradients_and_integer_inputs():
    class Mean(nn.Module):
        def forward(self, x):
            return x.mean(1)

    network = Network(nn.Embedding(9, 5, sparse=True), Mean(), nn.Linear(5, 4))
    before = copy.deepcopy(network)
    trainer = make(network, stages=3, accumulate=2, optimizer=lambda p: torch.optim.SGD(p, 0.1))
    for _ in range(6):
        trainer.step(torch.randint(9, (3, 2)), torch.randint(4, (3,)))
    trainer.drain()
    assert not same_weights(network[0], before[0])


def test_frozen_parameters_and_stages_without_any():
    network = Network(nn.Flatten(), nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 4))
    network[1].requires_grad_(False)
    before = copy.deepcopy(network)
    trained(network, stages=4, method="petra")
    assert same_weights(network[1], before[1])
    assert not same_weights(network[3], before[3])


def test_what_a_caller_can_read():
    trainer = make(mixed_network(), stages=3, schedule="lock-step")
    losses = {}
    for x, y in batches(6):
        for finished in trainer.step(x, y):
            losses[finished.microbatch] = float(finished.loss)
            assert finished.outputs.shape == (len(finished.targets), 4)
    assert sorted(losses) == [0, 1, 2, 3]
    stage = trainer.stages[1]
    assert [g.shape for g in stage.gradients()] == [p.shape for p in stage.parameters]
    assert sorted(stage.saved) == [3, 4]
    assert stage.tensors_by_category()["inputs"]
    trainer.drain()
    trainer.step(x, y)
    assert trainer.executor.activity.tick == 6  # of all, not of those since the pipeline was empty


def test_what_would_train_nothing_or_otherwise_is_refused_and_leaves_no_trace():
    trainer = make(mixed_network(), stages=3)
    data = list(batches(4))
    trainer.step(*data[0])
    with torch.inference_mode(), pytest.raises(RuntimeError, match="outside of it"):
        trainer.step(*data[1])
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match=r"with autocast=torch\.bfloat16"):
        trainer.step(*data[1])
    with torch.no_grad():
        trainer.step(*data[1])
    other = make(mixed_network(), stages=3, autocast=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        other.step(*data[0])
    assert trainer.executor.microbatches == 2


def test_a_loss_that_is_no_number_is_refused():
    trainer = make(mixed_network(), loss=lambda outputs, targets: (outputs.sum(), targets))
    with pytest.raises(TypeError, match="the loss returns tuple: return one number"):
        trainer.step(*next(iter(batches(1))))


@pytest.mark.parametrize(
    ("method", "schedule"),
    [("petra", None), ("features-replay", None), ("backprop", "gpipe"), ("reversible", "1f1b"), ("backprop", None)],
)
def test_the_memory_of_a_batch_may_be_used_for_the_next_one(method, schedule):
    data = list(batches(5))
    plain, reusing = (make(mixed_network(), method=method, schedule=schedule, stages=3, accumulate=2) for _ in range(2))
    reusing.network.load_state_dict(plain.network.state_dict())
    x, y = (torch.empty_like(t) for t in data[0])
    for inputs, targets in data:
        plain.step(inputs, targets)
        reusing.step(x.copy_(inputs), y.copy_(targets))
    plain.drain()
    reusing.drain()
    assert same_weights(plain.network, reusing.network)


def test_masks_of_minus_infinity_are_data():
    class Masked(nn.Linear):
        def forward(self, x, mask):
            return super().forward(x) + mask.exp()

    trainer = make(Network(Masked(4, 4)))
    mask = torch.zeros(3, 4).fill_diagonal_(-torch.inf)
    trainer.step((torch.randn(3, 4), mask), torch.randint(4, (3,)))
    with pytest.raises(ValueError, match="contains NaN or infinity"):
        trainer.step((torch.randn(3, 4), -mask), torch.randint(4, (3,)))
