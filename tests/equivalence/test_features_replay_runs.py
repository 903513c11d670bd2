"""Features Replay, DDG and DNI in runs: the memory they need, the options they reject, and the command line."""

import copy
import json
from collections import Counter

import pytest
import torch
from helpers.features_replay import METHODS, conv_network, images, make
from helpers.trainers import same_weights
from torch import nn
from torch.nn.functional import cross_entropy

from petra import Network, Trainer
from petra.cli.main import main
from petra.distributed import run_together
from petra.measure import MemoryProbe, at_rest, nbytes
from petra.methods import Synthesizer
from petra.methods.dni import DNI
from petra.schedule import Kind

IMAGE = 3 * 2 * 8 * 8 * 4  # bytes of a batch
MAP = 3 * 4 * 8 * 8 * 4  # of what the first two layers give


def full(method, sizes, count=9, **options):
    torch.manual_seed(0)
    trainer = make(conv_network(dropout=False), method=method, stages=sizes, **options)
    for x, y in images(count):
        trainer.step(x, y)
    return trainer


def test_features_replay_keeps_the_inputs_that_the_paper_counts():
    """K - k + 1 of them while a module computes, one less between iterations, and nothing else."""
    trainer = full("features-replay", [1, 1, 2, 4])
    assert [row.inputs for row in at_rest(trainer.executor)] == [3 * IMAGE, 2 * MAP, MAP, 0]
    assert [row.stashed_weights + row.graph for row in at_rest(trainer.executor)] == [0] * 4
    most = Counter()

    def observe(tick, action, stage):
        most[stage.index] = max(most[stage.index], len(stage.saved))

    trainer.executor.observers.append(observe)
    trainer.step(*images(1)[0])
    assert most == {0: 4, 1: 3, 2: 2, 3: 1}


def test_ddg_keeps_graphs_and_the_weights_that_they_point_into():
    trainer = full("ddg", [2, 2, 2, 2])
    rows = at_rest(trainer.executor)
    assert [row.inputs for row in rows] == [0] * 4
    assert rows[3].graph == rows[3].stashed_weights == 0
    for n, stage in zip((3, 2, 1), trainer.stages, strict=False):
        assert rows[stage.index].stashed_weights == n * nbytes(p.detach() for p in stage.parameters)
        assert len(stage.saved) == n
    # Of each layer: its input, what is normalised, mean and deviation; and what comes out at the top.
    one = IMAGE + MAP + 32 + MAP + MAP + 32 + MAP
    assert rows[0].graph == 3 * one
    with MemoryProbe(trainer.executor) as probe:
        trainer.step(*images(1)[0])
    assert probe.stages[0].graph == 4 * one


@pytest.mark.slow
def test_activations_of_the_methods_compare_as_in_table_1():
    """FR little more than backprop, DDG more than twice as much with four modules, DNI its synthesizers."""
    peak_lrs = {}
    for method in ("backprop", *METHODS):
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Conv2d(4, 4, 3, 1, 1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(24)]
        trainer = make(Network(nn.Conv2d(2, 4, 1), *layers, nn.Flatten(), nn.Linear(256, 4)), method=method, stages=4)
        for x, y in images(7):
            trainer.step(x, y)
        with MemoryProbe(trainer.executor) as probe:
            trainer.step(*images(1)[0])
        peak_lrs[method] = probe.activation_peak
        synthesizers = [row.synthesizer for row in probe.stages]
        assert [size > 0 for size in synthesizers] == [method == "dni"] * 3 + [False]
    assert peak_lrs["features-replay"] < 1.25 * peak_lrs["backprop"]
    assert peak_lrs["ddg"] > 2 * peak_lrs["backprop"]
    assert peak_lrs["dni"] < peak_lrs["backprop"]  # graphs of modules do not live at the same time


def test_a_synthesizer_is_counted_to_the_byte():
    trainer = full("dni", [2, 2, 4])
    conv = 4 * 4 * 25 + 4
    weights, statistics, counters = 3 * conv + 2 * 8, 2 * 8, 2
    adam = 2 * weights + 10  # two momenta, and a count for each parameter
    assert at_rest(trainer.executor)[0].synthesizer == 4 * (weights + statistics + adam) + 8 * counters


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("k", [1, 3])
def test_order_of_work_counted_from_execution(method, k):
    """Staleness K-1-s, or none; every micro-batch enters every update of every module once; drains leave nothing."""
    torch.manual_seed(0)
    trainer = make(conv_network(), method=method, stages=4, accumulate=k)
    ticks = {}
    trainer.executor.observers.append(lambda tick, action, stage: ticks.setdefault(action, tick))
    for run in (5, 1, 4):
        for x, y in images(run):
            trainer.step(x, y)
        trainer.drain()
        assert not trainer.executor.in_flight
    for s in range(4):
        done = {kind: [a.microbatch for a in ticks if a.stage == s and a.kind is kind] for kind in Kind}
        assert done[Kind.FORWARD] == done[Kind.BACKWARD] == list(range(10))
        assert done[Kind.LEARN] == (list(range(10)) if method == "dni" and s < 3 else [])
        last = [4, 5, 9] if k == 3 else list(range(10))
        assert set(done[Kind.UPDATE]) >= set(last)
        late = {ticks[b] - ticks[f] for b in ticks for f in ticks if _pair(f, b, s)}
        assert late == {0 if method == "dni" else 3 - s}


def _pair(forward, backward, stage):
    same = forward.stage == backward.stage == stage and forward.microbatch == backward.microbatch
    return same and forward.kind is Kind.FORWARD and backward.kind is Kind.BACKWARD


@pytest.mark.parametrize("method", ["features-replay", "ddg"])
@pytest.mark.parametrize("k", [1, 2])
def test_corrections_know_how_late_gradients_are(method, k):
    """The delay that a forward expects is the number of updates that come until its backward, from the first on."""
    torch.manual_seed(0)
    trainer = make(conv_network(), method=method, stages=4, accumulate=k, corrections=["predict", "shrink:0.9"])
    expected, found, began = {}, {}, {}
    for stage in trainer.stages[:3]:
        stage_corrections = stage.corrections

        def before_forward(m, accumulated, c=stage_corrections, s=stage, original=stage_corrections.before_forward):
            began[s.index, m] = s.updates
            delay, weights = original(m, accumulated)
            expected[s.index, m] = delay
            return delay, weights

        def before_backward(m, c=stage_corrections, s=stage, original=stage_corrections.before_backward):
            found[s.index, m] = s.updates - began[s.index, m]
            return original(m)

        stage_corrections.before_forward, stage_corrections.before_backward = before_forward, before_backward
    for run in (8, 5):
        for x, y in images(run):
            trainer.step(x, y)
        trainer.drain()
    assert len(found) == 3 * 13
    assert expected == found


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("tick", [1, 3, 6])
def test_ddg_notices_writing_into_weights_that_a_graph_needs(k, tick):
    """Between two updates only: with k = 1 the weights of now have no graph yet, so they may be written into."""
    torch.manual_seed(0)
    networks = [conv_network()]
    networks.append(copy.deepcopy(networks[0]))
    schedules = (("ddg", None), ("delayed", "locked-forward"))
    trainers = [
        make(n, method=m, schedule=o, stages=3, accumulate=k) for n, (m, o) in zip(networks, schedules, strict=True)
    ]
    data = images(10)

    def train(trainer, steps):
        for m in steps:
            trainer.step(*data[m])

    for trainer in trainers:
        train(trainer, range(tick + 1))
        with torch.no_grad():
            for parameter in trainer.network.parameters():
                parameter.mul_(0.5)
    if k == 1:
        for trainer in trainers:
            train(trainer, range(tick + 1, 10))
            trainer.drain()
        assert same_weights(*networks)
        return
    with pytest.raises(ValueError, match=r"modified between updates, but graphs .* \(of micro-batches .*drain\(\)"):
        train(trainers[0], range(tick + 1, 10))


@pytest.mark.parametrize("method", ["features-replay", "ddg"])
@pytest.mark.parametrize("tied", [False, True])
def test_zero_gradients_are_sparse_where_others_are(method, tied):
    table, read = nn.Embedding(9, 4, sparse=True), nn.Linear(4, 9, bias=False)
    read.weight = table.weight if tied else read.weight.requires_grad_(False)
    network = Network(nn.Sequential(table, read), nn.Linear(9, 4), nn.Flatten(), nn.Linear(8, 4))

    def optimizer(parameters):
        if parameters[0] is table.weight and not tied:  # tied, it has dense gradients
            return torch.optim.SparseAdam(parameters, 0.1)
        return torch.optim.SGD(parameters, 0.1, momentum=0.9)

    before = table.weight.detach().clone()
    trainer = Trainer(network, loss=cross_entropy, optimizer=optimizer, method=method, stages=4)
    for _ in range(6):
        trainer.step(torch.randint(9, (3, 2)), torch.randint(4, (3,)))
    trainer.drain()
    assert not table.weight.equal(before)


def test_a_state_of_before_the_first_step_begins_with_zero_features_at_another_cut():
    torch.manual_seed(0)
    network, weights = conv_network(), []
    begun = make(copy.deepcopy(network), method="features-replay", stages=2, corrections=["predict"]).state_dict()
    for loaded in (False, True):
        trainer = make(copy.deepcopy(network), method="features-replay", stages=4, corrections=["predict"])
        if loaded:
            trainer.load_drained(begun)
        for x, y in images(6):
            trainer.step(x, y)
        weights.append(trainer.network)
    assert same_weights(*weights)


def test_a_drained_state_goes_to_another_cut_with_its_synthesizers():
    trainer = full("dni", [2, 2, 4])
    trainer.drain()
    other = make(conv_network(), method="dni", stages=[1, 1, 2, 4])
    other.load_drained(trainer.state_dict())
    assert same_weights(other.network, trainer.network)
    states = [stage.synthesizer.state_dict() for stage in (*other.stages[:3], *trainer.stages[:2])]
    assert states[0]["network"] is None
    for ours, theirs in ((states[1], states[3]), (states[2], states[4])):
        assert all(torch.equal(a, b) for a, b in zip(ours["network"].values(), theirs["network"].values(), strict=True))
    other.step(*images(1)[0])


def test_synthesizers_do_not_depend_on_the_cut_nor_on_the_random_state():
    begun = []
    for sizes in ([2, 6], [1, 1, 6]):
        torch.manual_seed(len(sizes))
        trainer = full("dni", sizes, 1)
        begun.append(trainer.stages[-2].synthesizer)
    first, second = (s.network[0].weight for s in begun)
    assert (first - second).abs().max() < 1e-3  # they have learned from other gradients, once


def test_replicas_of_a_synthesizer_stay_the_same():
    def work(transport):
        torch.manual_seed(0)
        trainer = make(conv_network(), method="dni", stages=2, transport=transport)
        for x, y in images(4):
            trainer.step(x + transport.position.replica, y)
        return list(trainer.stages[0].synthesizer.network.state_dict().values())

    one, other = run_together(work, 1, 2)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("method", [*METHODS, "petra"])
def test_ranks_can_have_statistics_that_are_means_of_all_batches(method):
    network = Network(nn.Linear(4, 5), nn.BatchNorm1d(5, momentum=None), nn.Linear(5, 4))
    data = [(torch.randn(3, 4), torch.randint(4, (3,))) for _ in range(4)]

    def work(transport=None):
        trainer = make(copy.deepcopy(network), method=method, stages=3, transport=transport)
        for x, y in data:
            trainer.step(x, y)
        trainer.drain()
        return trainer.network[1].state_dict()

    alone, ranks = work(), run_together(work, 3)
    assert all(value.equal(ranks[1][name]) for name, value in alone.items())


class Two(nn.Module):
    """Two streams, of which the loss sees the first only."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, y=None):
        return self.fc(x), x if y is None else y


class First(nn.Module):
    def forward(self, x, y):
        return x


def test_gradients_are_predicted_on_ranks_for_streams_that_the_loss_does_not_see():
    def work(transport=None):
        torch.manual_seed(0)
        network = Network(Two(), Two(), Two(), First())
        trainer = make(network, method="dni", stages=4, transport=transport)
        for seed in range(4):
            generator = torch.Generator().manual_seed(seed)
            trainer.step(torch.randn(3, 4, generator=generator), torch.tensor([0, 1, 2]))
        return {name: v for name, v in network.state_dict().items() if not v.is_meta}

    one = work()
    for ranks in (2, 4):
        found = {name: value for rank in run_together(work, ranks) for name, value in rank.items()}
        assert all(torch.equal(found[name], value) for name, value in one.items())


class TestSynthesizers:
    def streams(self, *shapes):
        torch.manual_seed(0)
        return tuple(torch.randn(shape) for shape in shapes)

    @pytest.mark.parametrize(
        "shapes", [[(2, 3, 4, 4)], [(2, 3, 4, 4), (2, 2, 4, 4)], [(2, 5, 3), (2, 5, 3)], [(2, 6)]], ids=str
    )
    def test_it_begins_with_zero_and_learns(self, shapes):
        synthesizer = Synthesizer([], 1, seed=0, learning_rate=1e-2)
        streams, mask = self.streams(*shapes), torch.ones(2, dtype=torch.bool)
        targets = (*(0.1 * x.sign() for x in streams), None)
        errors = []
        for _ in range(60):
            found = synthesizer.predict((*streams, mask))
            assert found[-1] is None
            assert [g.shape for g in found[:-1]] == [x.shape for x in streams]
            errors.append(sum(float((g - t).square().sum()) for g, t in zip(found[:-1], targets, strict=False)))
            if len(errors) == 1:
                assert all(not g.any() for g in found[:-1])
            synthesizer.learn(targets)
        assert errors[-1] < errors[0] / 2
        learned = found[0].square().sum()
        for _ in range(30):
            found = synthesizer.predict((*streams, mask))
            synthesizer.learn([None] * len(found))  # from a loss that no longer sees any of them
        assert found[0].square().sum() < learned / 2

    def test_maps_with_channels_last_are_tokens(self):
        synthesizer = Synthesizer([nn.LayerNorm(3)], 1, seed=0, learning_rate=1e-2)
        synthesizer.predict(self.streams((2, 5, 5, 3)))
        assert [p.shape for p in synthesizer.network[0].parameters()] == [(3, 3), (3,)]

    @pytest.mark.parametrize(("above", "kind"), [(nn.LayerNorm(3), nn.Linear), (nn.LayerNorm(7), nn.Conv2d)])
    def test_whoever_takes_maps_tells_too_that_channels_come_last(self, above, kind):
        """As where patches are cut out by a layer without a norm: one over just these channels follows."""
        above = nn.Sequential(nn.Flatten(), nn.Linear(75, 7), above) if kind is nn.Conv2d else above
        network = Network(nn.Identity(), above, nn.Flatten(), nn.LazyLinear(4))
        network(*self.streams((2, 5, 5, 3)))
        trainer = make(network, method="dni", stages=[1, 3])
        trainer.step(*self.streams((2, 5, 5, 3)), torch.zeros(2, dtype=torch.long))
        assert type(trainer.stages[0].synthesizer.network[0]) is kind

    @pytest.mark.parametrize(
        "shapes", [[(2,)], [(2, 3, 4, 4, 4)], [(2, 3, 4, 4), (2, 3, 2, 2)], [(2, 3), (2, 3, 3)], []], ids=str
    )
    def test_shapes_that_none_fits(self, shapes):
        with pytest.raises(ValueError, match="no synthesizer for the inputs of layer 4, of shape"):
            Synthesizer([], 4, seed=0, learning_rate=1e-2).predict(self.streams(*shapes))

    def test_host_state_restores_a_prediction(self):
        synthesizer = Synthesizer([], 1, seed=0, learning_rate=1e-2)
        synthesizer.predict(self.streams((4, 3)))
        state = synthesizer.host_state()
        synthesizer.learn((torch.ones(4, 3),))
        assert synthesizer.host_state() == ()
        synthesizer.load_host_state(state)
        assert all(x is y for x, y in zip(synthesizer.host_state(), state, strict=True))

    def test_a_trainer_says_so_too(self):
        network = Network(nn.Conv3d(1, 2, 1), nn.Flatten(), nn.Linear(16, 4))
        trainer = Trainer(
            network, loss=cross_entropy, optimizer=lambda p: torch.optim.SGD(p, 0.1), method="dni", stages=3
        )
        with pytest.raises(ValueError, match="the inputs of layer 1, of shape"):
            trainer.step(torch.randn(2, 1, 2, 2, 2), torch.zeros(2, dtype=torch.long))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "features-replay", "stages": 9}, "stages is 9, but the network has only 8 layers"),
        (
            {"method": DNI, "stages": 2},
            r"method is <class '.*DNI'>: give a name such as 'petra', or an object like DNI\(\)",
        ),
        ({"method": None}, "method is None: give a name"),
        ({"method": "ddg", "schedule": "lock-step"}, "ddg has one schedule only"),
        ({"method": "dni", "schedule": "locked-forward"}, "dni has one schedule only"),
        ({"method": "backprop", "schedule": "locked-forward"}, "backprop computes exact gradients"),
        ({"method": "dni", "corrections": ["predict"]}, "dni has no staleness to correct"),
        ({"method": "ddg", "corrections": ["discrepancy"]}, "the backward of ddg uses the weights of its forward"),
    ],
)
def test_invalid_options_raise(options, message):
    with pytest.raises(ValueError, match=message):
        make(conv_network(), **options)


def test_a_graph_that_cannot_be_rebuilt_raises():
    """A checkpoint has inputs in place of graphs, and a layer that changes itself would give another."""

    def made():
        torch.manual_seed(0)
        layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        return make(Network(layer, nn.Linear(4, 4)), method="ddg", stages=2)

    x, y = torch.randn(2, 4), torch.zeros(2, dtype=torch.long)
    going, resumed = made(), made()
    going.step(x, y)
    resumed.load_state_dict(going.state_dict())
    with pytest.raises(
        ValueError, match=r"layer 0 \(ParametrizedLinear\) changes a buffer of its _Spectral.*drain\(\)"
    ):
        resumed.step(x, y)
    going.drain()
    drained = made()
    drained.load_state_dict(going.state_dict())
    drained.step(x, y)
    drained.drain()


class Moving(nn.Module):
    """Divides by an average that every forward writes into."""

    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.ones(()))

    def forward(self, x):
        self.average.lerp_(x.detach().abs().mean(), 0.1)
        return x / self.average


def test_a_buffer_that_graphs_need_while_they_wait_is_pointed_out():
    trainer = make(Network(nn.Linear(4, 4), Moving(), nn.Linear(4, 4)), method="ddg", stages=[2, 1])
    trainer.step(torch.randn(2, 4), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ValueError, match=r"was written into before its backward.*self\.average\.clone\(\)"):
        trainer.step(torch.randn(2, 4), torch.zeros(2, dtype=torch.long))


@pytest.mark.slow
def test_from_the_command_line(tmp_path, capsys):
    small = ["--model", "revnet18", "--width", "4", "--depths", "1,1", "--data", "synthetic:3x8x8:4", "--epochs", "1"]
    small += ["--batch-size", "256", "--stages", "3", "--threads", "1", "--device", "cpu", "--quiet"]
    main(["methods"])
    listed = capsys.readouterr().out
    for method in METHODS:
        assert f"\n{method} " in listed
        assert main(["train", *small, "--method", method, "--out", str(tmp_path / method)]) == 0
        summary = json.loads((tmp_path / method / "summary.json").read_text())
        assert summary["schedule"] == ("decoupled" if method == "dni" else "locked-forward")
        assert summary["staleness"] == ([0, 0, 0] if method == "dni" else [2, 1, 0])
        assert main(["schedule", "--method", method, "--stages", "3", "--microbatches", "4"]) == 0
    assert main(["train", *small, "--schedule", "locked-forward", "--out", str(tmp_path / "petra")]) == 0
    assert main(["train", *small, "--method", "dni", "--schedule", "lock-step", "--out", str(tmp_path / "no")]) == 2
    assert "dni has one schedule only" in capsys.readouterr().err


@pytest.mark.parametrize("rate", [-1e-5, float("nan"), float("inf"), "1e-5"])
def test_a_learning_rate_of_synthesizers_that_is_none(rate):
    with pytest.raises(ValueError, match=f"learning_rate is {rate!r}: give a number, 0 or more, like 1e-5"):
        DNI(rate)


def test_the_learning_rate_of_synthesizers_can_be_chosen():
    networks = []
    for rate in (1e-2, 1e-5):
        torch.manual_seed(0)
        networks.append(conv_network())
        trainer = make(networks[-1], method=DNI(rate), stages=2)
        for x, y in images(3):
            trainer.step(x, y)
    assert not same_weights(*networks)


def test_a_stage_that_was_several_goes_on_with_the_most_updates_of_them():
    """Zero features have given lower stages more of them."""
    trainer = full("features-replay", [2, 2, 4])
    trainer.drain()
    other = make(conv_network(), method="features-replay", stages=[4, 4])
    other.load_drained(trainer.state_dict())
    assert [stage.updates for stage in trainer.stages] == [11, 10, 9]
    assert [stage.updates for stage in other.stages] == [11, 9]


def test_no_zero_features_come_after_a_drained_state():
    torch.manual_seed(0)
    straight, loaded = (make(conv_network(), method="features-replay", stages=4, corrections=["predict"]) for _ in "ab")
    data = images(12)
    for x, y in data[:6]:
        straight.step(x, y)
    straight.drain()
    loaded.load_drained(copy.deepcopy(straight.state_dict()))
    for trainer in (straight, loaded):
        for x, y in data[6:]:
            trainer.step(x, y)
        trainer.drain()
    assert same_weights(straight.network, loaded.network)
