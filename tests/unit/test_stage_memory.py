"""The memory of stages: compared with the allocator, and never shared by mistake."""

import copy
import gc
import weakref
from collections import Counter

import pytest
import torch
from helpers.networks import batches, mixed_network, reversible_network
from helpers.trainers import make, same_weights
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd.profiler import profile  # torch.profiler's would read through all events when it ends
from torch.nn.functional import cross_entropy

from petra import METHODS, Network, ReversibleBlock
from petra.measure import Activations, MemoryProbe, at_rest, nbytes
from petra.reversible.streams import storage_id

pytestmark = pytest.mark.slow


def allocated(prof):
    """Bytes that were allocated and not freed while the profiler was active."""
    return sum(e.nbytes() for e in prof.kineto_results.events() if e.name() == "[memory]")


@pytest.mark.parametrize("method", sorted(METHODS))
def test_the_memory_of_stages_is_all_that_is_allocated(method):
    """The count equals that of the allocator to the byte, for every method."""
    data = list(batches(9))  # the pipeline is full, and half of an update is accumulated
    network = mixed_network()
    before = [v.untyped_storage() for v in network.state_dict().values()]
    gc.collect()  # garbage of other tests must not be freed while the profiler is active
    with profile(use_kineto=True, profile_memory=True) as prof:
        trainer = make(network, method=method, stages=4, accumulate=2)
        for x, y in data:
            trainer.step(x, y)
    held = [t for stage in trainer.stages for ts in stage.tensors_by_category().values() for t in ts]
    held += [t for stage in range(4) for t in trainer.executor.mailbox.tensors(stage)]
    held += [targets for targets, _ in trainer.executor.mailbox.targets.values()]
    held.append(trainer._loss_so_far)  # one number, for `last_loss`
    ours = {storage_id(x) for x, _ in data} | {storage._cdata for storage in before}
    assert allocated(prof) == nbytes(t for t in held if storage_id(t) not in ours)


def equal_layers(method, layers, stages, width=8):
    """A trainer with full histories on layers that save their input and their output, which is the next one's input."""
    network = Network(*(nn.Sequential(nn.Linear(width, width, bias=False), nn.ReLU()) for _ in range(layers)))
    # A loss that saves only the outputs, with a gradient of their size.
    trainer = make(network, method=method, stages=stages, loss=lambda outputs, targets: (outputs * outputs).sum())
    for _ in range(stages + 1):
        trainer.step(torch.randn(3, width), None)
    return trainer


@given(st.data())
@settings(max_examples=10, deadline=None)
def test_the_peak_of_backprop_is_the_whole_graph_and_one_gradient(data):
    """For any partition: the inputs, the outputs of every layer, and the gradient of the loss."""
    layers = data.draw(st.integers(1, 12))
    trainer = equal_layers("backprop", layers, data.draw(st.integers(1, layers)))
    with MemoryProbe(trainer.executor) as probe:
        trainer.step(torch.randn(3, 8), None)
    assert probe.activation_peak == (layers + 2) * 3 * 8 * 4


def test_weights_of_synthesizers_are_no_activations():
    """They grow with the square of the width, activations with the width."""
    peaks = []
    for width in (8, 16, 32):
        trainer = equal_layers("dni", 6, 3, width)
        with MemoryProbe(trainer.executor) as probe:
            trainer.step(torch.randn(3, width), None)
        peaks.append(probe.activation_peak)
    assert peaks[2] - peaks[1] == 2 * (peaks[1] - peaks[0])


def test_weights_of_corrections_are_no_activations():
    peaks = []
    for corrections in ([], ["discrepancy"]):
        trainer = make(mixed_network(), stages=4, corrections=corrections)
        for x, y in batches(20):
            trainer.step(x, y)
        with MemoryProbe(trainer.executor) as probe:
            trainer.step(x.clone(), y)
        peaks.append(probe.activation_peak)
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize("method", sorted(METHODS))
def test_the_probe_agrees_with_activations_and_changes_nothing(method):
    """For all stages together and for each, in every tick; and the peak is never less than before the tick."""
    network = mixed_network()
    networks = network, copy.deepcopy(network), copy.deepcopy(network)
    probed, counted, alone = (make(n, method=method, stages=4, accumulate=2) for n in networks)
    peak = 0
    for x, y in batches(7):
        with MemoryProbe(probed.executor) as probe:
            probed.step(x, y)
        with Activations(counted.executor) as found:
            counted.step(x, y)
        alone.step(x, y)
        assert probe.activation_peak == found.peak
        assert [row.activations for row in probe.stages] == [found.stages[i] for i in range(4)]
        peak = max(peak, found.peak)
        assert all(row.graph >= rest.graph for row, rest in zip(probe.stages, probe.rest, strict=True))
    assert peak > 0
    assert same_weights(probed.network, alone.network)


def test_a_probe_keeps_nothing_alive():
    """Graphs are freed as usual while the probe is active."""
    trainer = equal_layers("backprop", 4, 2)
    gone = []

    def observe(tick, action, stage):
        for kept in stage.saved.values():
            gone.extend(weakref.ref(y) for y in kept.tape.outputs)

    trainer.executor.observers.append(observe)
    with MemoryProbe(trainer.executor):
        trainer.step(torch.randn(3, 8), None)
        assert len(gone) == 2
        assert not any(ref() is not None for ref in gone)


@pytest.mark.parametrize("schedule", ["lock-step", "low-staleness"])
def test_petra_keeps_no_activation_of_a_reversible_stage(schedule):
    trainer = make(reversible_network(6), stages=8, schedule=schedule)
    for x, y in batches(30):
        trainer.step(x, y)
        assert [row.inputs for row in at_rest(trainer.executor)][1:] == [0] * 7  # stage 0 holds data
        assert [row.stashed_weights for row in at_rest(trainer.executor)] == [0] * 8


def test_buffers_of_stages_that_are_not_reversible():
    """τ_j + 1 inputs while a stage computes, τ_j between ticks; and no weights."""
    for schedule in ("lock-step", "low-staleness"):
        network = mixed_network()
        trainer = make(network, stages=6, schedule=schedule)
        most = Counter()

        def observe(tick, action, stage, most=most):
            most[stage.index] = max(most[stage.index], len([k for k in stage.saved.values() if k.inputs]))

        trainer.executor.observers.append(observe)
        for x, y in batches(20):
            trainer.step(x, y)
        tau = [trainer.schedule.staleness(s) for s in range(6)]
        assert most == {0: tau[0] + 1, 1: 0, 2: 0, 3: tau[3] + 1, 4: 0, 5: 0}


def test_delayed_methods_keep_one_stream_of_a_single_coupling():
    """The value of a stream that is only added to is not needed; Table 3 of the paper counts in the same way."""
    for method in ("checkpointed", "delayed"):
        trainer = make(reversible_network(1, width=4), stages=3, method=method)
        for x, y in batches(4):
            trainer.step(x, y)
        (kept,) = trainer.stages[1].saved.values()
        source, target = kept.inputs[0]
        assert source.shape == target.shape == (3, 4, 4, 4)
        assert nbytes([target]) == target.element_size()


def test_weights_are_stashed_once_per_version():
    for k in (1, 2, 3):
        trainer = make(reversible_network(4), stages=6, method="delayed", schedule="lock-step", accumulate=k)
        for x, y in batches(30):
            trainer.step(x, y)
        for stage in trainer.stages:
            tau = trainer.schedule.staleness(stage.index)
            assert len(stage.stash.copies) <= -(-tau // k)
        assert len(trainer.stages[0].stash.copies) >= 10 // k


def test_pass_through_streams_are_not_corrupted():
    """Writing into messages would overwrite the streams that layers pass through unchanged."""
    trainer = make(reversible_network(4), stages=6, schedule="lock-step")
    data = list(batches(25))
    copies = {}
    for x, y in data:
        trainer.step(x, y)
        for stage, ups in enumerate(trainer.executor.mailbox.forward):
            for m, streams in ups.items():
                for i, (now, then) in enumerate(
                    zip(streams, copies.setdefault((stage, m), [s.clone() for s in streams]), strict=True)
                ):
                    assert torch.equal(now, then), (stage, m, i)


def test_gradients_never_share_memory_with_messages():
    """The gradient of a bias that is added to a stream is the message itself, and clipping writes into gradients."""

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


def test_gradients_of_an_update_are_summed_in_place_but_not_into_a_gradient_that_was_loaded():
    """Only a sum that the stage has computed itself is certain to be referred to by nothing else."""
    network = Network(nn.Linear(4, 4), nn.Linear(4, 4))
    twin = copy.deepcopy(network)
    trainer = make(network, method="backprop", stages=1, accumulate=8, optimizer=lambda p: torch.optim.SGD(p, 1.0))
    data = [(torch.randn(3, 4), torch.randint(4, (3,))) for _ in range(5)]
    weight = network[0].weight
    own = []
    for x, y in data[:3]:
        trainer.step(x, y)
        own.append(weight.grad)
    assert own[0] is not own[1]
    assert own[1] is own[2]
    loaded = weight.grad = own[2].clone()
    before = loaded.clone()
    for x, y in data[3:]:
        trainer.step(x, y)
    assert torch.equal(loaded, before)
    for x, y in data:
        cross_entropy(twin(x), y).backward()
    torch.testing.assert_close(weight.grad, twin[0].weight.grad)


def test_a_companion_in_an_input_and_a_message_is_counted_once():
    """The input of a stage and the message from the next stage share its memory."""

    class Lift(nn.Linear):
        def forward(self, x, mask):
            return (*super().forward(x).chunk(2, 1), mask)

    class Masked(nn.Linear):
        def forward(self, x, mask):
            return super().forward(x) * mask

    class Head(nn.Linear):
        def forward(self, x, y, mask):
            return super().forward(x + y)

    blocks = [ReversibleBlock(Masked(8, 8), Masked(8, 8)) for _ in range(2)]
    trainer = make(Network(Lift(8, 16), *blocks, Head(8, 4)), stages=[2, 2], schedule="lock-step")
    for _ in range(4):
        trainer.step((torch.randn(3, 8), torch.ones(3, 8)), torch.randint(4, (3,)))
    stage, row = trainer.stages[0], at_rest(trainer.executor)[0]
    held, messages = stage.tensors_by_category(), trainer.executor.mailbox.tensors(0)
    assert row.inputs == nbytes(held["inputs"])
    assert 0 < row.messages < nbytes(messages)
    assert row.activations == nbytes([*held["inputs"], *messages, *held["graph"]])
