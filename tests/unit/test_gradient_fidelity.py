"""The fidelity of gradients, compared with plain autograd on copies of the network."""

import copy
from dataclasses import astuple
from functools import cache
from math import sqrt

import pytest
import torch
from helpers.grids import all_pairs
from helpers.networks import batches, mixed_network, reversible_network
from helpers.trainers import make, same_weights, sgd
from torch import nn
from torch.nn.functional import cross_entropy

from petra import METHODS, Network, models, plain_autograd
from petra.distributed import run_together
from petra.measure import Fidelity, MemoryProbe
from petra.measure.gradient_similarity import METRICS, GradientSimilarity, summarise, table

pytestmark = pytest.mark.slow

EXACT = ("backprop", "reversible", "pareprop")
STALE = sorted(set(METHODS) - {*EXACT, "dni"})  # exact except for staleness


def network(build=mixed_network, dropout=True, **arguments):
    torch.manual_seed(0)
    made = build(**arguments).double()
    for module in made.modules():
        if isinstance(module, nn.Dropout) and not dropout:
            module.p = 0.0
    return made


def measurements(trainer, ticks, every=1, drain=True):
    with Fidelity(trainer.executor, every) as fidelity:
        for x, y in batches(ticks, dtype=torch.float64):
            trainer.step(x, y)
        if drain:
            trainer.drain()
    return fidelity.measurements


@pytest.mark.parametrize("k", [3])
@pytest.mark.parametrize("method", EXACT)
def test_exact_methods_are_exact(method, k):
    """Eight micro-batches are two groups of three, and one of two that draining closes."""
    found = measurements(make(network(), method=method, stages=4, accumulate=k), 8)
    assert [m.update for m in found if m.stage is None] == list(range(1, 9 if k == 1 else 4))
    assert len(found) == (8 if k == 1 else 3) * 5
    for measurement in found:
        for name, value in measurement.similarity.metrics().items():
            assert value == pytest.approx(1.0, abs=1e-12), (measurement, name)


@pytest.mark.parametrize("k", [3])
@pytest.mark.parametrize("method", STALE)
def test_stale_gradients_are_exact_without_learning(method, k):
    still = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.0)}
    found = measurements(make(network(), method=method, stages=4, accumulate=k, **still), 8)
    assert len(found) == (8 if k == 1 else 3) * 5
    for measurement in found:
        for name, value in measurement.similarity.metrics().items():
            assert value == pytest.approx(1.0, abs=1e-9), (measurement, name)


def gradients(net, x, y):
    """Gradients by plain autograd. The network is not used afterwards."""
    net.zero_grad()
    with plain_autograd():
        cross_entropy(net(x), y).backward()
    return [[p.grad for p in layer.parameters()] for layer in net]


def patched(nets, layers):
    """A network that has each layer from another tick."""
    net = copy.deepcopy(nets[0])
    for i, (old, layer) in enumerate(zip(nets, layers, strict=True)):
        net[layer].load_state_dict(old[i].state_dict())
    return net


def mean(lists):
    return [sum(tensors) / len(tensors) for tensors in zip(*lists, strict=True)]


def flat(tensors):
    return torch.cat([t.flatten() for t in tensors])


def ticks(schedule, stages, m, s):
    """The ticks of the forward and the backward of micro-batch m in stage s."""
    if schedule is None:  # Features Replay and DDG: the forward is locked, and the backward J-1-s iterations late
        return m, m + stages - 1 - s
    n = [(1 if schedule == "low-staleness" else 2) * (stages - 1 - i) for i in range(stages)]
    return (2 * m + n[0] - n[s]) // 2, (2 * m + n[0] + n[s]) // 2


@pytest.mark.parametrize(
    ("method", "schedule", "k"),
    [
        *all_pairs(("petra", "petra-stashed", "checkpointed", "delayed"), ("low-staleness", "lock-step"), (1, 2)),
        *((name, None, k) for name in ("features-replay", "ddg") for k in (1, 2)),
    ],
)
def test_stale_gradients_against_brute_force(method, schedule, k):
    """The reference has a copy of the network of every tick, and the formula of the schedule."""
    stages = layers = 4
    trainer = make(
        network(reversible_network, dropout=False, layers=layers - 2),
        method=method,
        stages=stages,
        schedule=schedule,
        accumulate=k,
    )
    used = {}

    def keep(tick, action, stage):
        if action.kind.value == "U" and action.microbatch >= 0:
            used[stage.index, action.microbatch] = [p.grad.clone() for p in stage.parameters]

    trainer.executor.observers.append(keep)
    data = list(batches(8 + 2 * k, dtype=torch.float64))
    nets = []
    with Fidelity(trainer.executor) as fidelity:
        for x, y in data:
            nets.append(copy.deepcopy(trainer.network))  # w^t
            trainer.step(x, y)

    @cache
    def stale(m):
        """Gradients of all stages with the weights that the forward of micro-batch m used."""
        met = [nets[ticks(schedule, stages, m, i)[0]] for i in range(stages)]
        return gradients(patched(met, range(layers)), *data[m])

    sums = {}
    for measurement in fidelity.measurements:
        s, ms = measurement.stage, measurement.microbatches
        assert ms == tuple(range((measurement.update - 1) * k, measurement.update * k))
        if s is None:
            expected = sums[measurement.update]
        else:
            _, now = ticks(schedule, stages, ms[-1], s)
            exact = flat(mean([gradients(nets[now], *data[m])[s] for m in ms]))
            delayed, own = flat(mean([stale(m)[s] for m in ms])), flat(used[s, ms[-1]])
            expected = torch.stack(
                [own @ own, exact @ exact, delayed @ delayed, own @ exact, own @ delayed, delayed @ exact]
            )
            sums[measurement.update] = sums.get(measurement.update, 0) + expected
        found = measurement.similarity
        uu, ee, dd, ue, ud, de = expected.tolist()
        assert astuple(found) == pytest.approx((uu, ee, dd, ue, ud, de), rel=1e-9)
        metrics = found.metrics()
        assert metrics["cosine"] == pytest.approx(ue / sqrt(uu * ee), rel=1e-9)
        assert metrics["norm_ratio"] == pytest.approx(sqrt(uu / ee), rel=1e-9)
        assert metrics["sigma"] == pytest.approx(ue / ee, rel=1e-9)
        assert metrics["cosine_to_delayed"] == pytest.approx(ud / sqrt(uu * dd), rel=1e-9)
        assert metrics["norm_ratio_to_delayed"] == pytest.approx(sqrt(uu / dd), rel=1e-9)
        assert metrics["delayed_cosine"] == pytest.approx(de / sqrt(dd * ee), rel=1e-9)
        assert metrics["delayed_norm_ratio"] == pytest.approx(sqrt(dd / ee), rel=1e-9)
        assert metrics["delayed_sigma"] == pytest.approx(de / ee, rel=1e-9)
        if method in ("delayed", "ddg"):
            assert metrics["cosine_to_delayed"] == pytest.approx(1.0, abs=1e-12)
    assert [(m.stage, m.microbatches[-1]) for m in fidelity.measurements if m.stage is not None] == list(used)
    assert sum(m.stage is None for m in fidelity.measurements) == sum(stage == 0 for stage, _ in used)
    stale = [m.similarity.metrics()["cosine"] for m in fidelity.measurements if m.stage == 0]
    assert max(stale[1:]) < 1 - 1e-6  # there is a difference to measure


@pytest.mark.parametrize("k", [1, 2])
def test_predicted_gradients_against_brute_force(k):
    """Backwards precede the forward of the last stage. Nothing is stale, so the delayed gradient is exact."""
    trainer = make(network(reversible_network, dropout=False, layers=2), method="dni", stages=4, accumulate=k)
    data, nets, used = list(batches(6, dtype=torch.float64)), [], {}

    def keep(tick, action, stage):
        if action.kind.value == "U":
            used[stage.index, action.microbatch] = flat(p.grad for p in stage.parameters)

    trainer.executor.observers.append(keep)
    with Fidelity(trainer.executor) as fidelity:
        for x, y in data:
            nets.append(copy.deepcopy(trainer.network))
            trainer.step(x, y)
    assert [m.stage for m in fidelity.measurements] == [0, 1, 2, 3, None] * (6 // k)
    for measurement in (m for m in fidelity.measurements if m.stage is not None):
        s, ms = measurement.stage, measurement.microbatches
        exact, own = flat(mean([gradients(nets[ms[-1]], *data[m])[s] for m in ms])), used[s, ms[-1]]
        ee, ue = float(exact @ exact), float(own @ exact)
        assert astuple(measurement.similarity) == pytest.approx((float(own @ own), ee, ee, ue, ue, ee), rel=1e-9)


@pytest.mark.parametrize("k", [3])
@pytest.mark.parametrize("method", sorted(METHODS))
def test_measuring_does_not_change_the_training(method, k):
    def train(watch):
        torch.manual_seed(1)
        trainer = make(
            network(),
            method=method,
            stages=4,
            accumulate=k,
            clip_norm=0.5,
            loss=lambda y, t: cross_entropy(y + 0.1 * torch.rand_like(y), t),  # the loss draws random numbers, too
            corrections=("predict", "shrink") if METHODS[method].pipelined else (),
            scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.9),
        )
        with Fidelity(trainer.executor, 2) as fidelity:
            if not watch:
                fidelity.__exit__(None, None, None)
            for x, y in batches(8, dtype=torch.float64):
                trainer.step(x, y)
            trainer.drain()
            if not watch:
                fidelity.__enter__()
        assert bool(fidelity.measurements) == watch
        return trainer, torch.get_rng_state()

    (a, random_a), (b, random_b) = train(False), train(True)
    assert torch.equal(random_a, random_b)
    assert same_weights(a.network, b.network)
    for one, other in zip(a.stages, b.stages, strict=True):
        for p, q in zip(one.gradients(), other.gradients(), strict=True):
            assert torch.equal(p, q)
        states = [
            [v for state in stage.optimizer.state_dict()["state"].values() for v in state.values()]
            for stage in (one, other)
        ]
        assert len(states[0]) > 0
        assert all(torch.equal(v, w) for v, w in zip(*states, strict=True))


@pytest.mark.parametrize("method", ["backprop", "backprop gpipe", "reversible 1f1b", *STALE])
def test_every_third_update_is_measured_and_no_state_remains(method):
    method, _, schedule = method.partition(" ")
    trainer = make(network(), method=method, schedule=schedule or None, stages=3, accumulate=2)
    fidelity = Fidelity(trainer.executor, every=3)
    data = list(batches(13, dtype=torch.float64))
    with fidelity:
        for part in (data, data[:4], data[:7]):  # 7, 2 and 4 updates
            for x, y in part:
                trainer.step(x, y)
            trainer.drain()
    assert [m.update for m in fidelity.measurements if m.stage is None] == [3, 6, 9, 12]
    assert [m.microbatches for m in fidelity.measurements if m.stage is None] == [(4, 5), (10, 11), (15, 16), (21, 22)]
    for left in (fidelity._updates, fidelity._weights, fidelity._due):
        assert not left
    assert not any(fidelity._pending.values())
    assert not trainer.executor.observers
    assert not trainer.executor.announcements


def test_a_flushed_pipeline_is_measured_if_stages_update_once_per_tick():
    with pytest.raises(ValueError, match="flush:2 and k = 2, a stage makes several updates in one tick"):
        Fidelity(make(network(), schedule="flush:2", stages=3, accumulate=2).executor)
    for schedule in ("flush:1", "flush:2"):
        trainer = make(network(), schedule=schedule, stages=3, accumulate=4)
        cosines = {(m.update, m.stage): m.similarity.metrics()["cosine"] for m in measurements(trainer, 24)}
        assert sorted(u for u, stage in cosines if stage is None) == [1, 2, 3, 4, 5, 6]
        for (update, stage), cosine in cosines.items():
            if schedule == "flush:1" or (stage == 2 and update % 2):  # the first update of the last stage after a flush
                assert cosine == pytest.approx(1, abs=1e-9)
            else:
                assert stage == 1 or cosine < 0.999


def test_loading_a_state_discards_updates_in_flight():
    trainer = make(network(), stages=3)
    empty = copy.deepcopy(trainer.state_dict())
    data = list(batches(3, dtype=torch.float64))
    with Fidelity(trainer.executor, every=3):
        for x, y in data:
            trainer.step(x, y)
        assert trainer.executor.observers
        trainer.load_state_dict(empty)
        trainer.step(*data[0])
        assert not trainer.executor.observers


@pytest.mark.parametrize("schedule", ["low-staleness", "lock-step"])
@pytest.mark.parametrize("k", [2, 3])
def test_updates_between_measurements_do_not_affect_them(schedule, k):
    """Between two measurements, some updates have micro-batches of which only the first are observed."""
    found = []
    for every in (1, 3):
        trainer = make(network(dropout=False), method="petra", stages=2, schedule=schedule, accumulate=k)
        found.append(measurements(trainer, 6 * k + 1, every))
    assert found[1] == [m for m in found[0] if m.update % 3 == 0]
    assert [m.update for m in found[1] if m.stage is None] == [3, 6]


@pytest.mark.parametrize("method", ["backprop gpipe", "reversible 1f1b", *STALE])
def test_entered_in_flight_only_later_microbatches_are_measured(method):
    method, _, schedule = method.partition(" ")
    rows = []
    for late in (False, True):
        trainer = make(network(), method=method, schedule=schedule or None, stages=4, accumulate=2)
        data = list(batches(12, dtype=torch.float64))
        fidelity = Fidelity(trainer.executor)
        if not late:
            fidelity.__enter__()
        for i, (x, y) in enumerate(data):
            if late and i == 7:
                fidelity.__enter__()
            trainer.step(x, y)
        trainer.drain()
        rows.append([m for m in fidelity.measurements if m.microbatches[0] >= 8])
        assert late == (len(rows[-1]) == len(fidelity.measurements))
    assert rows[0] == rows[1]
    assert len(rows[0]) == 2 * 5


def test_stages_and_parameters_that_are_not_trained():
    torch.manual_seed(0)
    net = models.create("irevnet18", depths=(1, 1), width=4, in_channels=2, num_classes=4).double()
    net[-1].fc.bias.requires_grad_(False)
    trainer = make(net, method="petra", stages=len(net))
    found = measurements(trainer, 12)
    measured = {m.stage for m in found} - {None}
    assert measured == {s.index for s in trainer.stages if s.parameters} < set(range(len(net)))
    assert sum(m.stage is None for m in found) == 12


def test_gradients_may_be_sparse():
    found = []
    for sparse in (False, True):
        torch.manual_seed(0)
        net = Network(nn.Embedding(9, 5, sparse=sparse), nn.Flatten(), nn.Linear(10, 4))
        trainer = make(net, stages=3, accumulate=2, optimizer=lambda p: torch.optim.SGD(p, 0.1))
        with Fidelity(trainer.executor) as fidelity:
            for _ in range(6):
                trainer.step(torch.randint(9, (3, 2)), torch.randint(4, (3,)))
        found.append(fidelity.measurements)
    assert found[0]
    for dense, sparse in zip(*found, strict=True):
        assert astuple(sparse.similarity) == pytest.approx(astuple(dense.similarity), rel=1e-5)


def test_a_measured_tick_has_the_memory_of_any_other():
    peaks = []
    for every in (1, 1000):
        trainer = make(network(), method="petra", stages=4)
        with Fidelity(trainer.executor, every):
            for x, y in batches(8, dtype=torch.float64):
                with MemoryProbe(trainer.executor) as probe:
                    trainer.step(x, y)
            peaks.append((probe.stages, probe.activation_peak))
    assert peaks[0] == peaks[1]


def test_clipping_does_not_count_as_a_difference():
    found = measurements(make(network(), method="backprop", stages=2, clip_norm=1e-3), 2)
    assert all(m.similarity.metrics()["norm_ratio"] == pytest.approx(1.0, abs=1e-12) for m in found)


def test_bad_requests():
    trainer = make(network())
    with pytest.raises(ValueError, match="every is 0"):
        Fidelity(trainer.executor, 0)

    def on_a_rank(transport):
        with pytest.raises(ValueError, match="in one process"):
            Fidelity(make(network(), stages=2, transport=transport).executor)
        return True

    assert run_together(on_a_rank, ranks=2) == [True, True]


def test_metrics_of_known_gradients():
    used, exact, delayed = (torch.tensor(v) for v in ([3.0, 4.0], [0.0, 2.0], [1.0, 0.0]))
    metrics = GradientSimilarity.from_gradients([(used, exact, delayed)]).metrics()
    assert tuple(metrics) == METRICS
    assert metrics == pytest.approx(
        {
            "cosine": 0.8,
            "norm_ratio": 2.5,
            "sigma": 2.0,
            "cosine_to_delayed": 0.6,
            "norm_ratio_to_delayed": 5.0,
            "delayed_cosine": 0.0,
            "delayed_norm_ratio": 0.5,
            "delayed_sigma": 0.0,
        }
    )
    nothing = GradientSimilarity.from_gradients([(used, torch.zeros(2), torch.full((2,), torch.inf))]).metrics()
    assert set(nothing.values()) == {None}
    rows = [{"update": u, "stage": s, **metrics, "sigma": u} for u in (1, 2) for s in ("all", 1, 0)]
    means = summarise([*rows, {"update": 3, "stage": 0, **nothing}])
    assert [row["stage"] for row in means] == [0, 1, "all"]
    assert [row["measurements"] for row in means] == [3, 2, 2]
    assert means[0]["sigma"] == 1.5
    assert means[0]["lowest_sigma"] == 1
    assert " ".join(table(rows).splitlines()[2].split()) == "0 0.8000 2.5000 1.5000 1.0000 0.6000 5.0000 0.0000 0.5000"


def test_a_loss_with_a_weight_and_a_network_of_one_layer():
    net = Network(nn.Sequential(nn.Flatten(), nn.Linear(32, 4)))
    trainer = make(net, method="petra", optimizer=sgd)
    with Fidelity(trainer.executor) as fidelity:
        for x, y in batches(3):
            trainer.step(x, y, weight=0.5)
    assert [m.similarity.metrics()["norm_ratio"] for m in fidelity.measurements] == pytest.approx([1.0] * 6)


def test_the_lowest_sigma_can_be_negative():
    rows = [{"stage": 0, **dict.fromkeys(METRICS), "sigma": sigma} for sigma in (0.5, -0.9, 0.1)]
    assert summarise(rows)[0]["lowest_sigma"] == -0.9
