"""Pipelines that are flushed: exact gradients, the same bits as without a pipeline, and constant memory."""

import copy

import pytest
import torch
from helpers.captures import assert_same as assert_same_trainers
from helpers.captures import data as images
from helpers.captures import pair, step, tiny
from helpers.comparison import assert_same, make_optimizer, state
from helpers.grids import all_pairs
from helpers.networks import batches, mixed_network, reversible_network
from helpers.trainers import make
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from petra.cudagraph import TickCapture
from petra.measure import Activations

pytestmark = pytest.mark.slow

EXACT = ["gpipe", "1f1b", "interleaved:1", "interleaved:2", "flush:1"]


def make_trainer(network, **options):
    return make(network, **{"optimizer": make_optimizer, "seed": 7, **options})


def train(trainer, data):
    losses = {}
    for x, y in data:
        losses |= {r.microbatch: r.loss for r in trainer.step(x, y)}
    return losses | {r.microbatch: r.loss for r in trainer.drain()}


def state_of(trainer):
    return state(trainer.network, [stage.optimizer for stage in trainer.stages])


@pytest.mark.parametrize(
    ("method", "schedule", "stages", "k"),
    all_pairs(
        ("reversible", "petra", "checkpointed"),
        EXACT,
        (1, 2, 4, 6),
        (1, 2, 3, 4),
        also=[("reversible", "1f1b", 4, 3), ("petra", "interleaved:2", 4, 4)],  # full pipelines
    ),
)
def test_exact_pipelines_have_the_bits_of_one_micro_batch_at_a_time(method, schedule, stages, k):
    if schedule == "interleaved:2" and stages % 2:
        stages += 1
    torch.manual_seed(0)
    network = mixed_network()
    twin = copy.deepcopy(network)
    trainer = make_trainer(network, method=method, schedule=schedule, stages=stages, accumulate=k)
    assert trainer.schedule.exact
    plain = make_trainer(twin, method=method, schedule="sequential", stages=stages, accumulate=k)
    data = list(batches(2 * k + 3))  # the last update has fewer micro-batches, unless k divides them
    losses, expected = train(trainer, data), train(plain, data)
    assert losses.keys() == expected.keys() == set(range(len(data)))
    assert all(losses[m].equal(expected[m]) for m in losses)
    assert_same(state_of(trainer), state_of(plain))


@settings(max_examples=12, deadline=None)
@given(st.data())
def test_exact_pipelines_equal_autograd_in_float64(data):
    """Against a loop with `backward()` on the whole network, to 1e-10, with any cut and any number of micro-batches."""
    schedule, k = data.draw(st.sampled_from(EXACT)), data.draw(st.integers(1, 9))
    torch.manual_seed(0)
    network = reversible_network(6).double()
    network[-1].drop.p = 0.0
    stages = data.draw(st.integers(1, 8)) if schedule != "interleaved:2" else 2 * data.draw(st.integers(1, 4))
    borders = sorted(data.draw(st.permutations(range(1, 8)))[: stages - 1])
    cut = [b - a for a, b in zip([0, *borders], [*borders, 8], strict=True)]
    twin = copy.deepcopy(network)
    method = data.draw(st.sampled_from(["reversible", "petra"]))
    trainer = make_trainer(network, method=method, schedule=schedule, stages=cut, accumulate=k)
    batch = list(batches(2 * k, dtype=torch.float64))
    train(trainer, batch)
    optimizer = make_optimizer(twin.parameters())
    for i, (x, y) in enumerate(batch):
        (cross_entropy(twin(x), y) / k).backward()
        if (i + 1) % k == 0:
            optimizer.step()
            optimizer.zero_grad()
    for (name, a), b in zip(network.state_dict().items(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10, msg=name)


def flushed_by_hand(trainer, data, after):
    """Drain the pipeline wherever `after(updates)` says, which is known to be exact."""
    k, updates = trainer.schedule.accumulate, 0
    for i, (x, y) in enumerate(data):
        trainer.step(x, y)
        if (i + 1) % k == 0:
            updates += 1
            if after(updates):
                trainer.drain()
    trainer.drain()


FLUSHES = [
    *((None, every, until) for every, until in ((1, 0), (2, 0), (3, 0), (None, 1), (None, 4), (2, 3))),
    *(("lock-step", None, until) for until in (1, 4)),  # flush:N is low-staleness
]


@pytest.mark.parametrize(
    ("method", "inner", "every", "until", "k"),
    [
        (method, *flushes, (1, 3)[(number + place // (1 if method == "petra" else 2)) % 2])
        for number, method in enumerate(["petra", "petra-stashed", "delayed"])
        for place, flushes in enumerate(FLUSHES)
        if method == "petra" or (number + place) % 2
    ],
)
def test_flushes_equal_draining_by_hand(method, inner, every, until, k):
    torch.manual_seed(0)
    network = mixed_network()
    twin = copy.deepcopy(network)
    common = {"method": method, "stages": 4, "accumulate": k}
    schedule = inner if every is None else f"flush:{every}"
    trainer = make_trainer(network, schedule=schedule, flush_until=until if every != 1 else None, **common)
    plain = make_trainer(twin, schedule=inner, **common)
    data = list(batches(6 * k + 2))
    train(trainer, data)
    flushed_by_hand(plain, data, lambda u: u <= until or (every is not None and (u - until) % every == 0))
    assert_same(state_of(trainer), state_of(plain))


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("petra", {"schedule": "flush:2"}),
        ("petra", {"flush_until": 3}),
        ("petra", {"schedule": "1f1b"}),
        ("backprop", {"schedule": "1f1b"}),
    ],
    ids=str,
)
def test_a_flushed_run_resumes_at_every_tick(method, options):
    torch.manual_seed(0)
    start = mixed_network()
    data = list(batches(10))
    common = {"method": method, "stages": 3, "accumulate": 2, **options}
    whole = make_trainer(copy.deepcopy(start), **common)
    train(whole, data)
    for tick in range(1, len(data)):
        first, second = make_trainer(copy.deepcopy(start), **common), make_trainer(copy.deepcopy(start), **common)
        for x, y in data[:tick]:
            first.step(x, y)
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        train(second, data[tick:])
        assert_same(state_of(second), state_of(whole))


def test_every_drain_counts_its_update():
    """A drain in the middle of a group makes an update, which the warm-up counts like any other."""
    trainer = make_trainer(mixed_network(), method="petra", stages=4, accumulate=4, flush_until=4, corrections=["damp"])
    for i, (x, y) in enumerate(batches(10)):
        trainer.step(x, y)
        if i % 5 == 4:
            trainer.drain()
    assert trainer.stages[0].updates == 4
    assert trainer.executor._current.until == 0
    assert trainer.stages[0].corrections.context.staleness == 3 / 4
    other = make_trainer(mixed_network(), method="petra", stages=2, accumulate=4, flush_until=4)
    other.load_drained(copy.deepcopy(trainer.state_dict()))
    assert other.executor._current.until == 0


def test_flush_without_a_number_is_exact():
    for schedule in ("flush", "flush:01"):
        assert make_trainer(mixed_network(), method="reversible", schedule=schedule, stages=2).schedule.exact


@pytest.mark.parametrize("drained_after", [1, 4, 6, 9])
def test_a_warm_up_continues_after_a_drain(drained_after):
    """The updates of the warm-up are counted from the start of training, whoever drains the pipeline."""
    torch.manual_seed(0)
    network = mixed_network()
    twin = copy.deepcopy(network)
    trainer = make_trainer(network, method="petra", stages=4, accumulate=2, flush_until=4)
    plain = make_trainer(twin, method="petra", stages=4, accumulate=2)
    data = list(batches(18))
    for one in (trainer, plain):
        for i, (x, y) in enumerate(data):
            one.step(x, y)
            updates = i + 1 - drained_after if i >= drained_after else i + 1
            before = -(-drained_after // 2) if i >= drained_after else 0
            flushes = updates % 2 == 0 and before + updates // 2 <= 4
            if i + 1 == drained_after or (one is plain and flushes):
                one.drain()
        one.drain()
    assert_same(state_of(trainer), state_of(plain))


def bytes_of_stages(method, schedule, k, stages=6):
    """Peak bytes of activations of every stage over two updates, counted with the executor's actions."""
    torch.manual_seed(0)
    trainer = make(reversible_network(stages - 2), method=method, schedule=schedule, stages=stages, accumulate=k)
    with Activations(trainer.executor) as found:
        for x, y in batches(2 * k):
            trainer.step(x, y)
            for stage in trainer.stages[1:-1] if method == "reversible" else ():
                assert all(not saved.inputs and saved.tape is None for saved in stage.saved.values())
    return [found.stages[index] for index in range(stages)]


def test_the_memory_of_reversible_stages_does_not_depend_on_k():
    """To the byte; the first stage, which is not reversible, saves its input of every micro-batch in flight."""
    one, eight, many = (bytes_of_stages("reversible", "1f1b", k) for k in (1, 8, 24))
    assert one[1:] == eight[1:] == many[1:]
    assert one[0] < eight[0] == many[0]
    assert bytes_of_stages("petra", "1f1b", 8) == eight
    stored = bytes_of_stages("backprop", "1f1b", 8)
    assert all(stored[s] > (6 - s) / 2 * eight[s] for s in range(1, 5))


def test_the_memory_of_interleaved_stages_does_not_depend_on_k():
    """Messages wait while a rank works with another of its stages, but not more of them with more micro-batches."""
    few, many = (bytes_of_stages("reversible", "interleaved:2", k) for k in (12, 30))
    assert few == many


def test_gpipe_holds_all_micro_batches_of_an_update_in_the_last_stage_only():
    small, large = bytes_of_stages("reversible", "gpipe", 4), bytes_of_stages("reversible", "gpipe", 24)
    assert large[-1] > 4 * small[-1]


@pytest.mark.parametrize(
    ("options", "graphs"),
    [
        ({"schedule": "1f1b", "accumulate": 6}, 6),
        ({"schedule": "1f1b", "accumulate": 8}, 6),  # most ticks of the full pipeline are alike
        ({"schedule": "1f1b", "accumulate": 2}, 2),  # never full
        ({"schedule": "gpipe", "accumulate": 3}, 3),
        ({"schedule": "interleaved:2", "accumulate": 4}, 4),
        ({"method": "petra", "schedule": "flush:2", "accumulate": 4}, 8),
        ({"method": "petra", "schedule": "flush:2", "accumulate": 2}, 3),  # in the fourth, a stage makes two updates
        ({"method": "petra", "flush_until": 3, "accumulate": 3}, None),
        ({"method": "petra", "flush_until": 4, "accumulate": 2, "corrections": ["predict", "shrink:0.9"]}, None),
        ({"method": "petra", "schedule": "flush:3", "corrections": ["predict"]}, None),
        ({"method": "petra", "schedule": "flush:3", "flush_until": 6, "accumulate": 2}, None),  # then more waits
        ({"method": "checkpointed", "schedule": "1f1b", "accumulate": 3}, 3),
        ({"method": "backprop", "schedule": "gpipe", "accumulate": 2}, 2),
    ],
    ids=str,
)
def test_flushed_pipelines_are_captured(options, graphs):
    trainers = pair(**{"method": "reversible", **options})
    k = options.get("accumulate", 1)
    for x, y in images(6 * k + 16 if options.get("method") == "petra" else 5 * k + 11):
        step(trainers, x, y)
        assert_same_trainers(*trainers)
    capture = trainers[1].executor.capture
    assert capture.ineligible_reason is None
    assert capture.captured_ticks >= 2 * k
    if graphs is not None:
        assert capture._graph_capture.recorded == graphs
    for trainer in trainers:
        trainer.drain()
    assert_same_trainers(*trainers)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "reversible", "schedule": "low-staleness"}, "computes exact gradients, but the schedule low-stal"),
        ({"method": "backprop", "schedule": "flush:2"}, "computes exact gradients, but the schedule flush:2"),
        ({"method": "dni", "schedule": "1f1b"}, "dni has one schedule only"),
        ({"method": "petra", "schedule": "flush:0"}, "flush:0 has 0 updates between two flushes: give 1 or more"),
        ({"method": "petra", "schedule": "lock-step:2"}, "write it like lock-step"),
        ({"method": "petra", "schedule": "interleaved:3"}, "3 stages per rank, but there are 4 stages"),
        ({"method": "petra", "schedule": "1f1b", "flush_until": 3}, "1f1b flushes after every update"),
        ({"method": "petra", "schedule": "locked-forward", "flush_until": 3}, "locked-forward cannot be flushed"),
        ({"method": "petra", "flush_until": -1}, "flush_until is -1: give the number of synchronous updates"),
        ({"method": "petra", "schedule": "flush:²"}, "write it like flush:4"),
        ({"method": "backprop", "flush_until": 3}, "backprop is never stale: leave flush_until out"),
        ({"method": "petra", "schedule": "zigzag"}, "there is no schedule named 'zigzag'"),
        ({"method": "1f1b"}, "1f1b is a schedule"),
    ],
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        make(mixed_network(), stages=4, **options)


def test_captured_ticks_with_graphs_in_flight_say_why_not():
    trainer = make(tiny(), method="backprop", schedule="1f1b", stages=4, accumulate=4)
    trainer.executor.capture = TickCapture(trainer.executor, None)
    for x, y in images(3):
        trainer.step(x, y)
    assert "keeps autograd graphs" in trainer.ineligible_reason or "not fused" in trainer.ineligible_reason
