"""What the engine promises whatever the method, the order and the numbers."""

import copy
import gc
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from networks import Classify, Shrink, Split, batches, mixed_network, residual, reversible_network
from torch import nn
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

from petra import METHODS, LayerError, Network, NonFiniteLoss, ReversibleBlock, ReversibleResidual, Trainer
from petra.measure import at_rest, nbytes
from petra.reversible.streams import storage_id
from petra.schedule import Kind


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def make(network, **options):
    return Trainer(network, **{"loss": cross_entropy, "optimizer": sgd, **options})


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
    method=st.sampled_from(sorted(METHODS)),
    stages=st.integers(1, 5),
    k=st.integers(1, 4),
    runs=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    order=st.sampled_from(["lock-step", "low-staleness", None]),
)
def test_every_microbatch_enters_every_stages_updates_exactly_once(method, stages, k, runs, order):
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
        order=order if pipelined else None,
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


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("stages", [1, 2, 3, 6])
@pytest.mark.parametrize("method", ["petra", "petra-stashed", "checkpointed", "delayed"])
def test_staleness_counted_from_execution(method, stages, k):
    for order, factor in (("lock-step", 2), ("low-staleness", 1)):
        trainer = make(mixed_network(), method=method, stages=stages, order=order, accumulate=k)
        forward, backward = {}, {}

        def observe(tick, action, stage, forward=forward, backward=backward):
            if action.kind is not Kind.UPDATE:
                when = forward if action.kind is Kind.FORWARD else backward
                when[stage.index, action.microbatch] = tick

        trainer.executor.observers.append(observe)
        for x, y in batches(20):
            trainer.step(x, y)
        trainer.drain()
        for stage in range(stages):
            delays = {backward[stage, m] - forward[stage, m] for m in range(20)}
            assert delays == {factor * (stages - 1 - stage)}


@pytest.mark.parametrize("order", ["lock-step", "low-staleness"])
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("k", [1, 2])
def test_without_learning_petra_gives_the_gradients_of_backprop(order, stages, k):
    torch.manual_seed(0)
    network = mixed_network().double()
    twin = copy.deepcopy(network)
    options = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.0), "accumulate": k, "seed": 3}
    petra = make(network, method="petra", stages=stages, order=order, **options)
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
    for x, y in batches(9):
        trainer.step(x, y)
    trainer.drain()
    assert Counter(layers[0].calls) == Counter(layers[1].calls) == {False: 9, True: 9}
    assert Counter(layers[2].calls) == {True: 9}  # the last layer and the loss: one evaluation serves both


def allocated(prof):
    """Bytes allocated and not freed while the profiler was watching."""
    return sum(e.nbytes() for e in prof.profiler.kineto_results.events() if e.name() == "[memory]")


@pytest.mark.parametrize("method", sorted(METHODS))
def test_what_stages_hold_is_all_that_lives(method):
    """The accounting equals what the allocator says, to the byte, for every method."""
    data = list(batches(17))
    network = mixed_network()
    gc.collect()  # what other tests have left would be freed under our eyes
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as prof:
        trainer = make(network, method=method, stages=4, accumulate=2)
        for x, y in data:
            trainer.step(x, y)
    held = [t for stage in trainer.stages for name, ts in stage.held().items() if name != "weights" for t in ts]
    held += [t for stage in range(4) for t in trainer.executor.messages(stage)]
    ours = {storage_id(x) for x, _ in data}
    assert allocated(prof) == nbytes(t for t in held if storage_id(t) not in ours)


@pytest.mark.parametrize("order", ["lock-step", "low-staleness"])
def test_petra_keeps_no_activation_of_a_reversible_stage(order):
    trainer = make(reversible_network(6), stages=8, order=order)
    for x, y in batches(30):
        trainer.step(x, y)
        assert [row.inputs for row in at_rest(trainer.executor)][1:] == [0] * 7  # stage 0 holds data
        assert [row.stashed_weights for row in at_rest(trainer.executor)] == [0] * 8


def test_buffers_of_stages_that_are_not_reversible():
    """τ_j + 1 inputs while a stage is at work, τ_j between ticks; and no weights."""
    for order in ("lock-step", "low-staleness"):
        network = mixed_network()
        trainer = make(network, stages=6, order=order)
        most = Counter()

        def observe(tick, action, stage, most=most):
            most[stage.index] = max(most[stage.index], len([k for k in stage.kept.values() if k.inputs]))

        trainer.executor.observers.append(observe)
        for x, y in batches(20):
            trainer.step(x, y)
        tau = [trainer.order.staleness(s) for s in range(6)]
        assert most == {0: tau[0] + 1, 1: 0, 2: 0, 3: tau[3] + 1, 4: 0, 5: 0}


def test_delayed_methods_keep_one_stream_of_a_single_coupling():
    """Nobody needs the value of a stream that is only added to; the paper's Table 3 counts so too."""
    for method in ("checkpointed", "delayed"):
        trainer = make(reversible_network(1, width=4), stages=3, method=method)
        for x, y in batches(4):
            trainer.step(x, y)
        (kept,) = trainer.stages[1].kept.values()
        source, target = kept.inputs[0]
        assert source.shape == target.shape == (3, 4, 4, 4)
        assert nbytes([target]) == target.element_size()


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


def test_weights_are_stashed_once_per_version():
    for k in (1, 2, 3):
        trainer = make(reversible_network(4), stages=6, method="delayed", order="lock-step", accumulate=k)
        for x, y in batches(30):
            trainer.step(x, y)
        for stage in trainer.stages:
            tau = trainer.order.staleness(stage.index)
            assert len(stage.stash.copies) <= -(-tau // k)
        assert len(trainer.stages[0].stash.copies) >= 10 // k


def same_weights(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def trained(network, ticks=15, **options):
    trainer = make(network, **options)
    for x, y in batches(ticks):
        trainer.step(x, y)
    trainer.drain()
    return trainer.network


@pytest.mark.parametrize(
    ("one", "other"), [("petra", "reversible"), ("petra-stashed", "reversible"), ("delayed", "backprop")]
)
def test_on_one_stage_pipelined_methods_are_their_exact_twins(one, other):
    network = mixed_network()
    assert same_weights(trained(copy.deepcopy(network), method=one), trained(network, method=other))


def test_dropout_masks_do_not_depend_on_the_cut():
    network = mixed_network()
    runs = [trained(copy.deepcopy(network), method="reversible", stages=s) for s in (1, 2, 6, [1, 4, 1])]
    assert all(same_weights(runs[0], run) for run in runs[1:])
    assert not same_weights(runs[0], trained(network, method="reversible", seed=1))


def test_runs_repeat_and_the_global_random_state_is_left_alone():
    network = mixed_network()
    torch.manual_seed(1)
    first = trained(copy.deepcopy(network), stages=4)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second = trained(network, stages=4)
    assert same_weights(first, second)
    assert torch.equal(state, torch.get_rng_state())


def test_until_its_first_message_a_stage_does_nothing():
    network = mixed_network()
    before = copy.deepcopy(network)
    trainer = make(network, stages=6, order="lock-step", optimizer=lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.5))
    data = list(batches(11))
    for tick, (x, y) in enumerate(data):
        trainer.step(x, y)
        for stage in range(6):
            first_backward = 5 + (5 - stage)
            untouched = same_weights(network[stage], before[stage])
            assert untouched == (tick < first_backward)


def test_batch_norm_counts_each_microbatch_once_when_it_goes_backward():
    network = reversible_network(2)
    trainer = make(network, stages=4, order="lock-step")
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
    for x, y in batches(13):
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


def test_pass_through_streams_are_not_corrupted():
    """With in-place messages the streams that layers hand on unchanged would be overwritten."""
    trainer = make(reversible_network(4), stages=6, order="lock-step")
    data = list(batches(25))
    copies = {}
    for x, y in data:
        trainer.step(x, y)
        for stage, ups in enumerate(trainer.executor.ups):
            for m, streams in ups.items():
                for i, (now, then) in enumerate(
                    zip(streams, copies.setdefault((stage, m), [s.clone() for s in streams]), strict=True)
                ):
                    assert torch.equal(now, then), (stage, m, i)


def test_gradients_never_share_memory_with_messages():
    """A bias that is added to a stream has the message itself for a gradient; clipping writes into gradients."""

    class Bias(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.zeros(3, 4))
            self.b = nn.Parameter(torch.zeros(3, 4))

        def forward(self, x):
            return x + self.a + self.b

    network = Network(nn.Linear(4, 4), Bias(), nn.Linear(4, 4))
    twin = copy.deepcopy(network)
    x, y = torch.randn(3, 4), torch.randint(4, (3,))
    trainer = make(network, method="backprop", stages=3, clip_norm=0.01, optimizer=lambda p: torch.optim.SGD(p, 1.0))
    trainer.step(x, y)
    cross_entropy(twin(x), y).backward()
    for layer in twin:
        nn.utils.clip_grad_norm_(layer.parameters(), 0.01)
    torch.optim.SGD(twin.parameters(), 1.0).step()
    for a, b in zip(network.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b)


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


@pytest.mark.parametrize("method", ["petra", "backprop"])
@pytest.mark.parametrize("stages", [1, 3])
def test_non_finite_loss_stops_with_stage_and_microbatch_and_keeps_the_weights(method, stages):
    network = reversible_network(3)
    trainer = make(
        network, stages=stages, method=method, loss=lambda o, y: cross_entropy(o, y % 4) * (0 / (y < 4)).sum()
    )

    def train():
        for m, (x, y) in enumerate(batches(20)):
            trainer.step(x, y + 4 * (m == 9))

    with pytest.raises(NonFiniteLoss, match=rf"micro-batch 9 on stage {stages - 1} is (nan|inf)"):
        train()
    assert all(torch.isfinite(value).all() for value in network.state_dict().values())


def test_bad_inputs_are_refused_before_anything_is_touched():
    network = reversible_network(3)
    twin = copy.deepcopy(network)
    trainer = make(network, stages=3)
    for m, (x, y) in enumerate(batches(12)):
        if m % 4 == 1:
            with pytest.raises(ValueError, match=r"micro-batch \d+ holds NaN or infinity"):
                trainer.step(x * torch.inf, y)
        trainer.step(x, y)
    trainer.drain()
    assert same_weights(network, trained(twin, ticks=12, stages=3))


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


def test_modules_in_evaluation_mode_stay_so():
    network = mixed_network()
    network[1].eval()
    before = copy.deepcopy(network[1])
    trained(network, stages=3)
    assert not network[1].f.training
    assert torch.equal(network[1].f[1].running_mean, before.f[1].running_mean)
    assert not torch.equal(network[1].f[0].weight, before.f[0].weight)


def test_a_norm_shared_by_layers_keeps_its_statistics():
    f = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    network = Network(Split(2, 3), ReversibleResidual(f), ReversibleResidual(f), Classify(3, 4))
    trained(network, stages=[3, 1], ticks=4)
    assert int(f[1].num_batches_tracked) == 8


def test_frozen_parameters_and_stages_without_any():
    network = Network(nn.Flatten(), nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 4))
    network[1].requires_grad_(False)
    before = copy.deepcopy(network)
    trained(network, stages=4, method="petra")
    assert same_weights(network[1], before[1])
    assert not same_weights(network[3], before[3])


def test_what_a_caller_can_read():
    trainer = make(mixed_network(), stages=3, order="lock-step")
    losses = {}
    for x, y in batches(6):
        for finished in trainer.step(x, y):
            losses[finished.microbatch] = float(finished.loss)
            assert finished.outputs.shape == (len(finished.targets), 4)
    assert sorted(losses) == [0, 1, 2, 3]
    stage = trainer.stages[1]
    assert [g.shape for g in stage.gradients()] == [p.shape for p in stage.parameters]
    assert sorted(stage.kept) == [3, 4]
    assert stage.held()["inputs"]


class TestErrors:
    def test_layers_that_cannot_take_their_input(self):
        trainer = make(mixed_network(), stages=2)
        with pytest.raises(LayerError, match=r"layer 0 \(Split\) cannot take inputs of shape \(3, 5, 4, 4\)"):
            trainer.step(torch.randn(3, 5, 4, 4), torch.zeros(3, dtype=torch.long))

    def test_targets_of_another_length(self):
        with pytest.raises(ValueError, match="3 inputs but 2 targets"):
            make(mixed_network()).step(torch.randn(3, 2, 4, 4), torch.zeros(2, dtype=torch.long))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"method": "petr"}, "no method named 'petr': did you mean 'petra'"),
            ({"stages": 7}, "stages is 7, but the network has only 6 layers"),
            ({"stages": 0}, "stages is 0"),
            ({"stages": [3, 4]}, "add up to the network's 6, not 7"),
            ({"accumulate": 0}, "accumulate is 0"),
            ({"order": "low"}, "no order named 'low'"),
            ({"method": "backprop", "order": "lock-step"}, "backprop has one order only"),
            ({"stages": 2, "order": [2, 1, 0]}, "3 numbers for 2 stages"),
            ({"clip_norm": 0.0}, "clip_norm is 0.0"),
        ],
    )
    def test_bad_options(self, options, message):
        with pytest.raises(ValueError, match=message):
            make(mixed_network(), **options)

    def test_layers_that_write_into_their_input(self):
        class Halve(nn.Module):
            def forward(self, x):
                return x.mul_(0.5)

        x, y = torch.randn(3, 4), torch.randint(4, (3,))
        for network in (
            Network(Halve(), nn.Linear(4, 4)),
            Network(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)),
        ):
            for method in METHODS:
                trainer = make(network, method=method, stages=len(network))
                with pytest.raises(LayerError, match=r"changes its input in place.*inplace=False"):
                    [trainer.step(x, y) for _ in range(6)]

    def test_a_tick_that_stopped_half_way_says_so(self):
        trainer = make(mixed_network(), stages=3)
        data = list(batches(4))
        for x, y in data[:2]:
            trainer.step(x, y)
        good = copy.deepcopy(trainer.state_dict())
        with pytest.raises(LayerError):
            trainer.step(torch.randn(3, 5, 4, 4), data[2][1])
        for call in (lambda: trainer.step(*data[2]), trainer.drain, trainer.state_dict):
            with pytest.raises(RuntimeError, match=r"stopped half-way \(LayerError: layer 0"):
                call()
        trainer.load_state_dict(good)
        trainer.step(*data[2])
        trainer.drain()

    def test_optimizers_and_schedulers_that_a_pipeline_cannot_drive(self):
        with pytest.raises(ValueError, match="LBFGS"):
            make(mixed_network(), optimizer=torch.optim.LBFGS)
        with pytest.raises(ValueError, match="ReduceLROnPlateau"):
            make(mixed_network(), scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau)

    def test_networks_that_are_not_lists_of_layers(self):
        with pytest.raises(ValueError, match="network is a Linear"):
            make(nn.Linear(2, 2))

    def test_weights_shared_between_stages(self):
        layer = nn.Linear(4, 4)
        with pytest.raises(ValueError, match="belongs to stages 0 and 2"):
            make(Network(layer, nn.ReLU(), layer), stages=3)

    def test_nothing_to_evaluate(self):
        with pytest.raises(ValueError, match="nothing to evaluate"):
            make(mixed_network()).evaluate([])
