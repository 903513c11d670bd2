"""Stored layers in trainers of method reversible: the same training; and gradients that are freed after each update."""

import copy
from collections import Counter
from itertools import pairwise

import pytest
import torch
from helpers.comparison import make_optimizer, state
from helpers.networks import batches, mixed_network
from helpers.trainers import make, same_weights
from hypothesis import given
from hypothesis import strategies as st

from petra.distributed import run_together
from petra.memory.step_cost import cpu_peak
from petra.pipeline.stage import Stage

pytestmark = pytest.mark.slow

MIXED = ["store", "store", "reconstruct", "store", "store", "store"]
"""The storages of a network whose first reversible layer is stored and whose second is not."""


def network(*storages):
    torch.manual_seed(0)
    found = mixed_network().double()
    return found.use_storage(*storages) if storages else found


def train(trainer, ticks, first=0):
    losses = {}
    for x, y in list(batches(ticks, dtype=torch.float64))[first:]:
        losses |= {r.microbatch: float(r.loss) for r in trainer.step(x, y)}
    return losses | {r.microbatch: float(r.loss) for r in trainer.drain()}


def state_of(trainer):
    return state(trainer.network, [stage.optimizer for stage in trainer.stages])


@given(st.data())
def test_stored_layers_train_as_reconstructed_ones(data):
    """With dropout, batch normalisation, every exact schedule and any cut."""
    storages = [
        data.draw(st.sampled_from(("store", "reconstruct") if i in (1, 2, 4) else ("store",))) for i in range(6)
    ]
    schedule = data.draw(st.sampled_from(["sequential", "1f1b", "gpipe", "interleaved:2"]))
    stages = data.draw(st.sampled_from([2, 4, 6]))
    options = {"method": "reversible", "stages": stages, "schedule": schedule, "accumulate": 3}
    plain = make(network(), optimizer=make_optimizer, **options)
    stored = make(network(*storages), optimizer=make_optimizer, **options)
    assert train(stored, 10) == pytest.approx(train(plain, 10), rel=1e-10)
    torch.testing.assert_close(state_of(stored), state_of(plain), rtol=1e-10, atol=1e-10)


def test_stored_layers_keep_their_activations():
    """A stored layer computes its forward pass once, and a reconstructed one twice."""
    count = {}
    for storages in ([], MIXED, ["store"] * 6):
        trainer = make(network(*storages), method="reversible", stages=2, schedule="gpipe", accumulate=4)
        convolutions = [m for i in (1, 2, 4) for m in trainer.network[i].modules() if isinstance(m, torch.nn.Conv2d)]
        calls = Counter()
        for convolution in convolutions:
            convolution.register_forward_hook(lambda *_, calls=calls: calls.update(["convolution"]))
        train(trainer, 4)
        count[storages.count("store")] = calls["convolution"]
    # Four convolutions for each of four micro-batches, and for the first check of the loss; and once more for each of
    # those that are reconstructed.
    assert count == {0: 20 + 16, 5: 20 + 8, 6: 20}


def test_checkpoints_between_forward_and_backward():
    """The graphs of stored layers are not in a checkpoint; they are computed again after it is loaded."""
    options = {"method": "reversible", "stages": 3, "schedule": "1f1b", "accumulate": 4, "optimizer": make_optimizer}
    whole = make(network(*MIXED), **options)
    expected = train(whole, 8)
    first = make(network(*MIXED), **options)
    data = list(batches(8, dtype=torch.float64))
    for x, y in data[:5]:
        first.step(x, y)
    saved = copy.deepcopy(first.state_dict())
    second = make(network(*MIXED), **options)
    second.load_state_dict(saved)
    found = train(second, 8, first=5)
    assert found == pytest.approx({i: loss for i, loss in expected.items() if i in found}, rel=1e-10)
    torch.testing.assert_close(state_of(second), state_of(whole), rtol=1e-10, atol=1e-10)


def test_ranks_store_as_one_process():
    options = {"method": "reversible", "stages": 3, "schedule": "1f1b", "accumulate": 2}
    alone = make(network(*MIXED), **options)
    train(alone, 6)

    def work(transport):
        trainer = make(network(*MIXED), transport=transport, **options)
        train(trainer, 6)
        return trainer.weights()

    found = next(weights for weights in run_together(work, 3) if weights is not None)
    assert all(torch.equal(found[name], value) for name, value in alone.network.state_dict().items())


@pytest.mark.parametrize(
    ("method", "storage", "message"),
    [
        ("petra", "store", "is for method reversible, where weights are the same in forward and backward"),
        ("backprop", "store", "is for method reversible"),
        ("reversible", "selective", "is for your own training step: a trainer can store, store:B or reconstruct"),
        ("reversible", "offload", "is for your own training step"),
    ],
)
def test_storages_that_a_method_cannot_use(method, storage, message):
    with pytest.raises(ValueError, match=message):
        make(network().use_storage(storage), method=method)


@given(
    st.sampled_from(["petra", "reversible", "backprop", "ddg", "dni", "features-replay"]),
    st.sampled_from([1, 2]),
    st.sampled_from([{}, {"clip_norm": 0.1}, {"ema": 0.5}]),
)
def test_freed_gradients_change_nothing(method, accumulate, more):
    trainers = []
    for free in (False, True):
        trainer = make(network(), method=method, stages=3, accumulate=accumulate, free_gradients=free, **more)
        for x, y in batches(7, dtype=torch.float64):
            trainer.step(x, y)
        trainers.append(trainer)
        trainer.drain()
    assert same_weights(*(trainer.network for trainer in trainers))
    assert any(p.grad is not None for p in trainers[0].network.parameters())
    assert all(p.grad is None for p in trainers[1].network.parameters()) or accumulate == 2


def test_gradients_of_one_stage_exist_at_a_time(monkeypatch):
    """With exact gradients and no accumulation, a stage updates and frees before the stage below it has gradients."""
    having = []

    def backward(stage, microbatch, message):
        found = original(stage, microbatch, message)
        having.append([s.index for s in trainer.stages if any(p.grad is not None for p in s.parameters)])
        return found

    original = Stage.backward
    monkeypatch.setattr(Stage, "backward", backward)
    trainer = make(network(), method="reversible", stages=4, free_gradients=True)
    trainer.step(*next(batches(1, dtype=torch.float64)))
    assert having == [[3], [2], [1], [0]]


def test_more_stages_need_less_memory_for_gradients():
    def peak(stages):
        torch.manual_seed(0)
        wide = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
        trainer = make(wide, method="backprop", stages=stages, free_gradients=True)
        x, y = torch.randn(2, 64), torch.tensor([1, 2])
        for _ in range(2):
            trainer.step(x, y)
        return cpu_peak(lambda: trainer.step(x, y))

    peaks = [peak(stages) for stages in (1, 2, 4, 8)]
    assert all(more > less for more, less in pairwise(peaks))
    assert peaks[-1] < 2 * 4 * 65 * 64 < 8 * 4 * 65 * 64 <= peaks[0]
