"""Plans: what a profile measures, what a plan predicts, and that the predictions are correct."""

import json
import os
import signal
import time
from copy import deepcopy
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import fork_server
from helpers.trainers import make, same_weights, sgd
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

from petra import METHODS, Network, ReversibleBlock, ReversibleResidual, Trainer
from petra.cli import plan_benchmark
from petra.cli.main import main
from petra.cli.parser import build_parser
from petra.cli.plan import report
from petra.cli.plan_config import PlanConfig
from petra.distributed import run_together
from petra.measure import (
    Link,
    MemoryEstimator,
    MemoryProbe,
    Plan,
    Profile,
    Seconds,
    StageMemory,
    Stopwatch,
    make_plan,
    profile,
    tick_seconds,
)
from petra.measure.partition_search import PartitionSearch, total_bytes
from petra.optim import hidden_matrices
from petra.pipeline import partition
from petra.reversible.storage import expand_storages
from petra.schedule import DecoupledSchedule, GPipeSchedule, SequentialSchedule, lock_step, low_staleness
from petra.trainer.loss import cross_entropy as training_loss

pytestmark = pytest.mark.slow

X, Y = torch.randn(3, 8), torch.randint(4, (3,))
PARTS = {"inputs": (X,), "targets": Y, "loss": cross_entropy, "optimizer": sgd}


class Streams(nn.Module):
    """A layer that is not reversible and returns two streams."""

    def __init__(self, inputs, width, *norm):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(inputs, width), *norm, nn.ReLU())

    def forward(self, *streams):
        y = self.body(torch.cat(streams, 1))
        return y, 2 * y


class Classify(nn.Module):
    def __init__(self, inputs):
        super().__init__()
        self.body = nn.Linear(2 * inputs, 4)

    def forward(self, x, y):
        return self.body(torch.cat([x, y], 1))


def small_network():
    """Six layers like those of `mixed_network`, but faster on the meta device: no convolutions, and only one norm."""
    residual = [nn.Sequential(nn.Linear(n, n), nn.Dropout(0.1)) for n in (6, 6, 6, 5)]
    middle = [ReversibleResidual(residual[0]), ReversibleBlock(residual[1], residual[2]), Streams(12, 5)]
    return Network(Streams(8, 6, nn.BatchNorm1d(6)), *middle, ReversibleResidual(residual[3]), Classify(5))


def made_up(*seconds):
    """A profile of layers with these seconds, half of them forward. Updates take no time."""
    return Profile([Seconds(s / 2, s / 2) for s in seconds], {}, [[] for _ in seconds])


def plan(profile, method="petra", layers=None, **options):
    method = METHODS[method]
    layers = list(small_network() if layers is None else layers)
    return make_plan(layers, method, lambda n: method.schedule(n, 1), profile, **{**PARTS, **options})


def test_the_busiest_rank_has_as_little_as_possible_to_do():
    found = plan(made_up(4, 1, 1, 1, 2, 3), ranks=3, stages=3)
    assert found.stages == [1, 3, 2]
    assert found.placement == [0, 1, 2]
    assert found.seconds == [4, 3, 5]
    assert found.tick == pytest.approx(5)
    assert found.basic == pytest.approx(12)
    assert found.speedup == pytest.approx(12 / 5)


def test_stages_are_scattered_if_that_is_faster():
    found = plan(made_up(4, 1, 1, 1, 2, 3), ranks=3)
    assert found.seconds == [4, 4, 4]
    assert found.tick == pytest.approx(4)
    assert not found.contiguous
    assert found.layers[found.placement[0]] == [0]
    even = plan(made_up(2, 2, 2, 2, 2, 2), ranks=3)
    assert even.stages == [2, 2, 2]
    assert even.contiguous


def test_bytes_and_memory_of_scattered_stages_are_summed_by_rank():
    network = small_network()
    found = plan(made_up(4, 1, 1, 1, 2, 3), ranks=3, layers=network)
    crossings = [i for i in range(len(found.stages) - 1) if found.placement[i] != found.placement[i + 1]]
    assert sum(found.sent_up) == sum(found.up_bytes[i] for i in crossings)
    assert sum(found.sent_down) == sum(found.down_bytes[i] for i in crossings)
    for rank in range(3):
        assert found.sent_up[rank] == sum(found.up_bytes[i] for i in crossings if found.placement[i] == rank)

    def held(transport):
        torch.manual_seed(0)
        trainer = make(deepcopy(network), transport=transport, stages=found.stages, placement=found.placement)
        for _ in range(2 * trainer.schedule.staleness(0) + 2):
            trainer.step(X.clone(), Y)
        trainer.state_dict()  # receives the messages that have arrived
        with MemoryProbe(trainer.executor) as probe:
            trainer.step(X.clone(), Y)
        return sum(row.total for row in probe.stages)

    for real, said in zip(run_together(held, 3), found.memory, strict=True):
        # The messages of several groups of stages do not all wait at the same time.
        assert real == pytest.approx(said, rel=0.1)


def test_stages_are_placed_as_in_the_trainer():
    found = plan(made_up(4, 1, 1, 1, 2, 3), ranks=2, stages=5)
    assert found.placement == [0, 0, 0, 1, 1]
    assert found.layers == [[0, 1, 2], [3, 4, 5]]
    assert found.seconds == [6, 6]
    assert make(small_network(), stages=found.stages).schedule.stages == 5
    assert plan(made_up(4, 1, 1, 1, 2, 3), ranks=2, stages=[1, 2, 3]).seconds == [6, 6]


def test_messages_are_counted_in_bytes():
    found = plan(made_up(1, 1, 1, 1, 1, 1), ranks=3, stages=[1, 2, 3])
    stream = 3 * 6 * 4
    assert found.up_bytes == [2 * stream, 2 * stream]
    assert found.down_bytes == [2 * stream, 4 * stream]  # the stem is not reversible and needs no streams back
    assert found.sent_up == [2 * stream, 2 * stream, 0]
    assert found.sent_down == [0, 2 * stream, 4 * stream]
    slow = plan(made_up(1, 1, 1, 1, 1, 1), ranks=3, stages=[1, 2, 3], link=Link(0.5, bandwidth=stream))
    assert slow.basic == pytest.approx(6 + 4 * 0.5 + (2 + 2 + 2 + 4))


def test_a_memory_limit_changes_the_partition_or_is_rejected():
    free = plan(made_up(5, 1, 1, 1, 1, 1), ranks=2)
    assert free.stages == [1, 5]
    tight = plan(made_up(5, 1, 1, 1, 1, 1), ranks=2, memory_limit=max(free.memory) - 1)
    assert max(tight.memory) < max(free.memory)
    assert max(tight.seconds) > max(free.seconds)
    with pytest.raises(ValueError, match=r"rank 0 cannot hold layer 0 within 0\.00 MiB per rank \(the fastest"):
        plan(made_up(1, 1, 1, 1, 1, 1), ranks=2, memory_limit=10)
    with pytest.raises(ValueError, match=r"which exceeds the limit of 0\.00 MiB: give the number of stages instead"):
        plan(made_up(1, 1, 1, 1, 1, 1), ranks=2, stages=[3, 3], memory_limit=10)
    with pytest.raises(ValueError, match="2 stages cannot keep 3 ranks busy"):
        plan(made_up(1, 1, 1, 1, 1, 1), ranks=3, stages=2)
    with pytest.raises(ValueError, match="the network has only 6 layers"):
        plan(made_up(1, 1, 1, 1, 1, 1), ranks=7)


numbers = st.lists(st.integers(0, 9), min_size=7, max_size=7)


@settings(max_examples=300)
@given(st.integers(1, 6), st.data(), numbers, numbers, numbers)
def test_the_search_finds_the_fastest_partition_that_fits(layers, data, costs, weights, messages):
    """Compared with all partitions. The memory of a rank grows with its layers, except for the messages at its ends."""
    ranks = data.draw(st.integers(1, layers))

    def seconds(cuts):
        return sum(costs[i] for cut in cuts for i in cut)

    def held(rank, cuts):
        (cut,) = cuts
        waiting = messages[cut.start] + messages[cut.stop]
        return [StageMemory((rank + 1) * sum(weights[i] for i in cut), 0, 0, 0, 0, waiting)]

    def most(cuts):
        return max(held(rank, cut)[0].total for rank, cut in enumerate(cuts))

    ends = combinations(range(1, layers), ranks - 1)
    cuts = [[(range(a, b),) for a, b in pairwise((0, *inner, layers))] for inner in ends]
    limit = data.draw(st.sampled_from(sorted(map(most, cuts))[:3])) - data.draw(st.integers(0, 1))
    fitting = [cut for cut in cuts if most(cut) <= limit]
    search = PartitionSearch(layers, [1] * ranks, seconds, held, limit)
    if not fitting:
        with pytest.raises(ValueError, match="cannot hold layer"):
            search.best()
        return
    found = search.best()
    assert found in fitting
    assert max(map(seconds, found)) == min(max(map(seconds, cut)) for cut in fitting)


@pytest.mark.parametrize(
    ("method", "ranks"),
    [*((method, (1, 2, 4)[i % 3]) for i, method in enumerate(sorted(METHODS))), ("petra", 4), ("features-replay", 2)],
)
def test_predicted_memory_is_that_of_a_real_run(method, ranks):
    """For every rank, with any number of stages, to the byte."""
    network, k = small_network(), 2

    def held(transport):
        trainer = make(deepcopy(network), method=method, transport=transport, stages=4, accumulate=k)
        for _ in range(2 * (trainer.schedule.staleness(0) + k)):
            trainer.step(X.clone(), Y)
        ticks = []
        for _ in range(k):
            trainer.state_dict()  # receives the messages that have arrived
            with MemoryProbe(trainer.executor) as probe:
                trainer.step(X.clone(), Y)
            ticks.append(probe.stages)
        return trainer.schedule, [max(rows, key=lambda row: row.total) for rows in zip(*ticks, strict=True)]

    estimator = MemoryEstimator(list(network), METHODS[method], (X,), Y, loss=cross_entropy, optimizer=sgd)
    cuts, first = partition(6, 4), 0
    for schedule, real in run_together(held, ranks):
        own = range(first, first := first + len(real))
        assert estimator.memory([cuts[s] for s in own], own.start, schedule) == real
    assert first == 4


TINY_GPT = ["--model", "gpt", "--width", "16", "--depth", "2", "--heads", "2", "--seq-len", "4", "--batch-size", "2"]


@pytest.mark.parametrize(
    ("options", "values"),
    [
        (["sgd"], lambda matrices, hidden, others: matrices + others),
        (["adamw"], lambda matrices, hidden, others: 2 * (matrices + others)),
        (["adamw", "--optimizer-state", "bf16"], lambda matrices, hidden, others: matrices + others),  # of two bytes
        (["nadamw"], lambda matrices, hidden, others: 2 * (matrices + others)),
        (["muon"], lambda matrices, hidden, others: hidden + 2 * (matrices - hidden + others)),
        (["soap"], lambda matrices, hidden, others: 2 * (matrices + others)),  # and more
    ],
    ids=lambda options: "-".join(options) if isinstance(options, list) else "",
)
def test_the_state_of_any_optimizer_is_predicted(options, values):
    arguments = ["plan", *TINY_GPT, "--ranks", "1", "--method", "backprop", "--optimizer", *options]
    config = PlanConfig.from_options(build_parser().parse_args(arguments))
    inputs, targets = config.batch()
    settings = {"loss": training_loss, "optimizer": config.make_optimizer}
    trainer = Trainer(config.network(), method="backprop", stages=1, **settings)
    trainer.step(inputs, targets)
    (stage,) = trainer.stages
    states = [x for state in stage.optimizer.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
    layers = list(config.network())
    estimator = MemoryEstimator(layers, METHODS["backprop"], (inputs,), targets, **settings)
    (found,) = estimator.memory([range(len(layers))], 0, trainer.schedule)
    assert found.optimizer == sum(x.nbytes for x in states)
    matrices = sum(p.numel() for p in trainer.network.parameters() if p.ndim > 1)
    others = sum(p.numel() for p in trainer.network.parameters() if p.ndim <= 1)
    hidden = sum(p.numel() for p in hidden_matrices(trainer.network))
    assert 0 < hidden < matrices
    least = 4 * values(matrices, hidden, others)
    assert least <= found.optimizer
    if options != ["soap"]:
        assert found.optimizer <= least + 1024  # numbers of steps


def real_memory(network, storage, stages, transport):
    """The bytes of this rank in a full reversible pipeline."""
    network = deepcopy(network)
    network.use_storage(*expand_storages(storage))
    trainer = make(network, method="reversible", transport=transport, stages=stages, accumulate=2, schedule="gpipe")
    for _ in range(4):
        trainer.step(X.clone(), Y)
    peaks = []
    for _ in range(2):
        trainer.state_dict()  # receives the messages that have arrived
        with MemoryProbe(trainer.executor) as probe:
            trainer.step(X.clone(), Y)
        peaks.append(sum(row.total for row in probe.stages))
    return max(peaks)


REVERSIBLE = (1, 2, 4)  # layers of `small_network`


def test_ranks_store_what_fits():
    """No rank could store one more layer, and the predicted memory is that of a real run."""
    profile = made_up(1, 4, 2, 1, 6, 1)

    def planned(limit):
        return make_plan(
            list(small_network()),
            METHODS["reversible"],
            lambda n: GPipeSchedule(n, 2),
            profile,
            **PARTS,
            ranks=2,
            stages=[3, 3],
            memory_limit=limit,
        )

    everything = planned(2**30)
    assert everything.storage == ["6*store"]
    estimator = MemoryEstimator(list(small_network()), METHODS["reversible"], **PARTS)
    subsets = [set(chosen) for size in range(4) for chosen in combinations(REVERSIBLE, size)]

    def needed(stored):
        names = ["reconstruct" if i in REVERSIBLE and i not in stored else "store" for i in range(6)]
        found = estimator.with_storage(names)
        return [
            total_bytes(found.memory([cut], rank, GPipeSchedule(2, 2))) for rank, cut in enumerate(partition(6, [3, 3]))
        ]

    by_subset = [(stored, needed(stored)) for stored in subsets]
    counts = []
    for limit in sorted({max(memory) for _, memory in by_subset}):
        found = planned(limit)
        names = expand_storages(found.storage) if found.storage else [None] * 6
        stored = {i for i in REVERSIBLE if names[i] == "store"}
        assert max(found.memory) <= limit
        more = [memory for other, memory in by_subset if stored < other and len(other) == len(stored) + 1]
        assert all(max(memory) > limit for memory in more)
        saved = [sum((0, 2, 1, 0, 3, 0)[i] for i in stored & own) for own in ({1, 2}, {4})]
        assert found.seconds == [7 - saved[0], 8 - saved[1]]
        if len(stored) == 2:
            real = run_together(partial(real_memory, small_network(), found.storage, [3, 3]), 2)
            assert found.memory == real
        counts.append(len(stored))
    assert sorted(counts) == counts
    assert counts[-1] == 3
    assert len(set(counts)) > 2


@pytest.mark.parametrize(("method", "limit"), [("petra", 2**30), ("reversible", None), ("backprop", 2**30)])
def test_layers_are_stored_for_a_limit_and_with_reversible_only(method, limit):
    assert plan(made_up(1, 1, 1, 1, 1, 1), method=method, ranks=2, memory_limit=limit).storage == []


def test_storage_and_optimizer_are_among_the_options_to_train_with():
    arguments = ["plan", "--model", "revnet18", "--ranks", "2", "--method", "reversible", "--no-run"]
    arguments += ["--optimizer", "adamw", "--optimizer-state", "bf16"]
    config = PlanConfig.from_options(build_parser().parse_args(arguments))
    found = Plan([5, 5], [0, 1], [1.0, 1.0], 1.0, 2.0, [0], [0], [0, 0], ["4*store", "6*reconstruct"])
    options = "--ranks 2 --stages 5,5 --storage 4*store,6*reconstruct"
    assert report(config, found, None).endswith(f" --optimizer adamw --optimizer-state bf16 {options}")


def test_the_memory_of_a_later_rank_includes_its_graph():
    estimator = MemoryEstimator(list(small_network()), METHODS["petra"], (X,), Y, loss=cross_entropy, optimizer=sgd)
    (row,) = estimator.memory([range(3, 5)], 2, low_staleness(4))
    assert row.graph > 0


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_profile_does_not_change_the_network(method):
    network = small_network()
    network[0].body[0].weight.grad = torch.ones_like(network[0].body[0].weight)
    twin = deepcopy(network)
    state = torch.get_rng_state()
    found = profile(list(network), METHODS[method], (X,), Y, loss=cross_entropy, optimizer=sgd, repeats=2, warmup=1)
    assert same_weights(network, twin)
    assert torch.equal(network[0].body[0].weight.grad, torch.ones_like(network[0].body[0].weight))
    assert all(p.grad is None for p in list(network.parameters())[1:])
    assert torch.equal(torch.get_rng_state(), state)
    assert len(found.layers) == 6
    assert all(s.forward > 0 and s.backward > 0 and s.update > 0 for s in found.layers)
    assert [s.learn > 0 for s in found.layers] == [method == "dni"] * 5 + [False]


def test_layers_that_the_last_stage_does_not_recompute_have_their_own_times():
    layers = list(small_network())
    records = {
        method: profile(layers, METHODS[method], (X,), Y, loss=cross_entropy, optimizer=sgd, repeats=1, warmup=1)
        for method in ("petra", "checkpointed", "backprop")
    }
    assert records["petra"].records == [[]] * 6  # the head is always in the last stage
    assert records["checkpointed"].records == [list(range(start, 5)) for start in range(6)]
    assert records["backprop"].records == [[]] * 6
    plain = Network(nn.Flatten(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    found = profile(list(plain), METHODS["petra"], (X,), Y, loss=cross_entropy, optimizer=sgd, repeats=1, warmup=1)
    assert found.records == [[0, 1, 2], [1, 2], [2], []]


def test_the_time_of_a_stage_is_the_sum_of_its_layers():
    found = Profile([Seconds(1, 2, 3), Seconds(10, 20, 30), Seconds(5, 5, 5)], {1: Seconds(7, 8, 9)}, [[1], [1], []])
    assert found.stage(range(0, 2)) == Seconds(11, 22, 33)
    assert found.stage(range(0, 3)) == Seconds(13, 15, 17)
    assert Seconds(1, 2, 6).per_tick(3) == 5
    assert Seconds(1, 2, 6, 4).per_tick(3) == 9
    others = [Profile([s * x for s in found.layers], {1: found.recorded[1] * x}, found.records) for x in (3, 0.5)]
    assert Profile.median([others[0], found, others[1]]) == found


def test_a_stopwatch_records_all_actions_of_a_stage():
    trainer = make(small_network(), method="dni", stages=2, accumulate=2)
    watches = [Stopwatch(stage) for stage in trainer.stages]
    for _ in range(4):
        trainer.step(X, Y)
    for watch, learned in zip(watches, (4, 0), strict=True):
        assert [len(x) for x in (watch.forward, watch.backward, watch.update, watch.learn)] == [4, 4, 2, learned]
        assert watch.total == pytest.approx(sum((*watch.forward, *watch.backward, *watch.update, *watch.learn)))
        assert len(watch.rounds()) == 2


def test_simulated_ticks():
    even = [Seconds(1, 2, 0)] * 4
    assert tick_seconds(low_staleness(4), range(4), even) == pytest.approx(3)
    assert tick_seconds(SequentialSchedule(4), range(4), even) == pytest.approx(12)
    assert tick_seconds(GPipeSchedule(4, 6), range(4), even) == pytest.approx(3 * (6 + 3) / 6)
    # A stage that predicts gradients continues when its synthesizer has learned from the true one.
    assert tick_seconds(DecoupledSchedule(2), range(2), [Seconds(1, 1, 0), Seconds(1, 5, 0)]) == pytest.approx(
        1 + 1 + 5
    )
    learning = [Seconds(1, 1, 0, 3), Seconds(1, 5, 0)]
    assert tick_seconds(DecoupledSchedule(2, 4), range(2), learning) == pytest.approx(
        1 + 1 + 5 + 3
    )  # at every micro-batch
    uneven = [Seconds(1, 2, 0), Seconds(2, 4, 1), Seconds(1, 1, 0), Seconds(0, 1, 0)]
    assert tick_seconds(low_staleness(4), range(4), uneven) == pytest.approx(7)
    assert tick_seconds(low_staleness(4), [0, 0, 1, 1], uneven) == pytest.approx(10)
    # Lock-step hides the time of messages, low-staleness does not.
    slow = [0.5] * 3
    assert tick_seconds(low_staleness(4), range(4), even, slow, slow) == pytest.approx((12 + 6 * 0.5) / 4)
    assert tick_seconds(lock_step(4), range(4), even, slow, slow) == pytest.approx(3)


TINY = ["--model", "revnet18", "--width", "2", "--depths", "1,1", "--image", "1x8x8", "--batch-size", "2"]


def test_the_command_plans_and_measures(tmp_path, capfd, monkeypatch):
    fork(monkeypatch)
    file = tmp_path / "plan.json"
    code = main(["plan", *TINY, "--ranks", "2", "--ticks", "4", "--json", str(file)])
    printed, said = capfd.readouterr()
    assert code == 0, said
    result = json.loads(file.read_text())
    assert result["config"]["ranks"] == 2
    stages = result["plan"]["stages"]
    assert sum(stages) == 4
    assert "predicted/measured" in printed
    assert "speed-up over one rank working at a time (reversible): predicted" in printed
    assert f"to train with: --method petra --ranks 2 --stages {','.join(map(str, stages))}" in printed
    assert all(
        0 <= real - said <= 8 for said, real in zip(result["plan"]["memory"], result["measured"]["memory"], strict=True)
    )
    assert result["measured"]["tick"] >= max(result["measured"]["own"]) > 0
    assert result["measured"]["basic"] > 0


def test_numbers_in_flight_are_chosen_for_slow_links(tmp_path, capfd, monkeypatch):
    fork(monkeypatch)
    file = tmp_path / "plan.json"
    slow = ["--latency", "100", "--bandwidth", "1", "--stages", "1,1,2", "--memory-limit", "100"]
    code = main(["plan", *TINY, "--ranks", "2", "--ticks", "2", *slow, "--json", str(file)])
    printed, said = capfd.readouterr()
    assert code == 0, said
    result = json.loads(file.read_text())
    chosen, low, lock = result["in_flight"]
    assert [row["schedule"] for row in (chosen, low, lock)] == ["chosen", "low-staleness", "lock-step"]
    assert low["throughput"] < lock["throughput"] < 0.6 < 0.94 < chosen["throughput"]
    assert chosen["in_flight"][0] > 0.2 / chosen["tick"] / 1.5
    assert chosen["in_flight"][0] - chosen["in_flight"][1] == 1  # on the same rank
    assert chosen["delays"] == chosen["in_flight"]
    assert result["plan"]["tick"] == pytest.approx(chosen["tick"])
    assert result["measured"] is None
    numbers = ",".join(map(str, chosen["in_flight"]))
    assert f"to train with: --method petra --schedule {numbers} --ranks 2 --stages 1,1,2" in printed
    assert "links of 100 ms and 1 Gbit/s, messages of up to" in printed


def fork(monkeypatch):
    """Start ranks from a process that has already imported everything."""
    fork_server.context()
    monkeypatch.setattr(
        plan_benchmark, "spawn", partial(torch.multiprocessing.start_processes, start_method="forkserver")
    )


@pytest.mark.parametrize(("rank", "quiet", "lines"), [(0, False, 1), (1, False, 0), (0, True, 0)])
def test_the_first_rank_says_what_it_does(rank, quiet, lines, capsys):
    own = SimpleNamespace(rank=rank, config=SimpleNamespace(quiet=quiet))
    plan_benchmark.Rank.print(own, "timing 4 layers")
    assert capsys.readouterr().err == "petra plan: timing 4 layers …\n" * lines


class TestErrorsOfRanks:
    def test_the_first_error_counts(self, tmp_path):
        plan_benchmark._report(1, ValueError("too large"), tmp_path)
        plan_benchmark._report(0, RuntimeError("closed by peer"), tmp_path)
        assert json.loads((tmp_path / plan_benchmark.ERROR).read_text()) == {"ours": True, "text": "too large"}

    def test_a_rank_that_ends_while_it_writes_reports_nothing(self, tmp_path, monkeypatch):
        def half(path, text):
            path.write_bytes(text[:9].encode())
            raise KeyboardInterrupt

        monkeypatch.setattr(Path, "write_text", half)
        with pytest.raises(KeyboardInterrupt):
            plan_benchmark._report(1, ValueError("too large"), tmp_path)
        assert not (tmp_path / plan_benchmark.ERROR).exists()

    def test_a_killed_rank_is_reported_before_errors_of_others(self, tmp_path, monkeypatch):
        monkeypatch.setattr(plan_benchmark, "_work", killed)
        fork(monkeypatch)
        with pytest.raises(RuntimeError, match="rank 1 was ended by SIGKILL"):
            plan_benchmark.spawn_ranks(SimpleNamespace(ranks=2), tmp_path)


def killed(rank, config, folder):
    if rank == 0:
        plan_benchmark._report(0, RuntimeError("closed by peer"), Path(folder))
        time.sleep(60)
    while not Path(folder, plan_benchmark.ERROR).exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def test_an_error_of_a_rank_is_one_line(capfd, monkeypatch):
    fork(monkeypatch)
    assert main(["plan", *TINY, "--ranks", "1", "--memory-limit", "0.001", "--quiet"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("petra: error: rank 0 cannot hold layers 0 to 3 within 0.00 MiB per rank")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "5"], "only 4 layers"),
        (["--ranks", "0"], "--ranks is 0"),
        (["--ranks", "2", "--stages", "1,2"], "add up to the network's 4, not 3"),
        (["--ranks", "3", "--stages", "2"], "--stages is 2 for 3 ranks"),
        (["--ranks", "2", "--memory-limit", "-1"], "--memory-limit is -1.0"),
        (["--ranks", "2", "--method", "petr"], "did you mean 'petra'"),
        (["--ranks", "2", "--latency", "1", "--schedule", "lock-step"], "leave --schedule out"),
        (["--ranks", "2", "--bandwidth", "1", "--method", "backprop"], "but backprop has none: choose a pipelined"),
        (["--ranks", "2", "--bandwidth", "0"], "--bandwidth is 0.0: give more than 0"),
        (["--ranks", "2", "--optimizer", "rmsprop"], "--optimizer is 'rmsprop': choose from sgd"),
        (["--ranks", "2", "--optimizer-state", "bf16"], "--optimizer-state bf16 is for adamw, not for sgd"),
        (["--ranks", "2", "--method", "backprop", "--schedule", "lock-step"], "backprop computes exact gradients"),
    ],
)
def test_bad_options_are_rejected_before_ranks_start(arguments, message, capsys):
    try:
        code = main(["plan", *TINY, *arguments])
    except SystemExit as error:  # values that the parser rejects
        code = error.code
    assert code == 2
    assert message in capsys.readouterr().err
