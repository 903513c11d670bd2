"""Every reversible layer is one node of the graph: its gradients are complete before the layer below begins."""

import copy
import gc
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from helpers.networks import residual
from torch import nn
from torch.autograd.graph import GradientEdge

from petra import Network, ReversibleBlock, ReversibleLayer
from petra.memory.step_cost import cpu_peak

LAYERS = 4


class Recorded(nn.Module):
    """A residual function that notes when it is evaluated."""

    def __init__(self, notes, layer, width=3):
        super().__init__()
        self.function, self.notes, self.layer = residual(width), notes, layer

    def forward(self, x):
        self.notes.append(("evaluated", self.layer))
        return self.function(x)


def recorded_network(notes):
    torch.manual_seed(0)
    blocks = [ReversibleBlock(Recorded(notes, i), Recorded(notes, i)) for i in range(LAYERS)]
    return Network(*blocks).double()


def loss_of(network, seed=1):
    torch.manual_seed(seed)
    x = torch.randn(2, 4, 3, 5, 5, dtype=torch.float64)
    return sum(y.square().mean() for y in network(*x))


def test_hooks_on_gradients_run_before_the_layer_below_is_evaluated():
    notes = []
    network = recorded_network(notes)
    for i, block in enumerate(network):
        for parameter in block.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p, i=i: notes.append(("complete", i)))
    loss = loss_of(network)
    notes.clear()
    loss.backward()
    expected = []
    for i in reversed(range(LAYERS)):
        expected += [("evaluated", i)] * 2 + [("complete", i)] * len(list(network[i].parameters()))
    assert notes == expected


def step_in_hooks(network, optimizer):
    """Give every parameter its own optimizer, whose steps free its gradient."""
    optimizers = {p: optimizer([p], 1e-2) for p in network.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in network.parameters():
        parameter.register_post_accumulate_grad_hook(step)


def test_optimizer_steps_in_hooks_have_the_weights_of_ordinary_steps():
    ordinary = recorded_network([])
    hooked = copy.deepcopy(ordinary)
    optimizer = torch.optim.AdamW(ordinary.parameters(), 1e-2)
    step_in_hooks(hooked, torch.optim.AdamW)
    for seed in range(3):
        optimizer.zero_grad()
        loss_of(ordinary, seed).backward()
        optimizer.step()
        loss_of(hooked, seed).backward()
    for a, b in zip(ordinary.state_dict().values(), hooked.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_frozen_layers_at_the_beginning_are_not_evaluated_in_the_backward_pass():
    notes = []
    network = recorded_network(notes)
    network[:2].requires_grad_(False)
    loss = loss_of(network)
    notes.clear()
    loss.backward()
    assert notes == [("evaluated", i) for i in (3, 3, 2, 2)]


def test_a_graph_can_be_used_again_and_in_part():
    network = recorded_network([])
    loss, parameters = loss_of(network), list(network.parameters())
    top = list(network[-1].parameters())
    in_part = torch.autograd.grad(loss, top, retain_graph=True)
    twice = [torch.autograd.grad(loss, parameters, retain_graph=again) for again in (True, False)]
    for a, b in zip(*twice, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(in_part, twice[0][-len(top) :], strict=True):
        assert torch.equal(a, b)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_shared_functions_have_the_sum_of_their_gradients():
    torch.manual_seed(0)
    shared = residual(3)
    network = Network(*(ReversibleBlock(shared, residual(3)) for _ in range(3))).double()
    fired = []
    for parameter in shared.parameters():
        parameter.register_hook(lambda gradient: fired.append(gradient.clone()))
    loss_of(network).backward()
    found = [p.grad for p in shared.parameters()]
    assert len(fired) == len(found)
    assert all(any(a.equal(b) for b in fired) for a in found)
    network.use_storage("store")
    network.zero_grad()
    loss_of(network).backward()
    torch.testing.assert_close(found, [p.grad for p in shared.parameters()], rtol=1e-10, atol=1e-12)


def wide_network():
    """Eight layers whose gradients are much larger than their streams; also the bytes of a layer's gradients."""
    torch.manual_seed(0)
    network = Network(*(ReversibleBlock(nn.Linear(512, 512), nn.Linear(512, 512)) for _ in range(8)))
    return network, sum(p.nbytes for p in network[0].parameters())


def backward(network):
    sum(y.square().mean() for y in network(*torch.ones(2, 4, 512))).backward()


def test_accumulation_needs_memory_for_the_gradients_of_one_layer_only():
    network, layer = wide_network()
    backward(network)  # from now on, gradients are added to these
    assert cpu_peak(lambda: backward(network)) < 2.5 * layer


def test_optimizer_steps_in_hooks_need_memory_for_the_gradients_of_one_layer_only():
    network, layer = wide_network()
    step_in_hooks(network, torch.optim.SGD)
    assert cpu_peak(lambda: backward(network)) < 2.5 * layer


class Masked(nn.Module):
    """A residual function that notes whether its mask gets a gradient."""

    def __init__(self, notes):
        super().__init__()
        self.linear, self.notes = nn.Linear(3, 3), notes

    def forward(self, x, mask):
        self.notes.append(mask.requires_grad)
        return self.linear(x) * mask


@pytest.mark.parametrize("wanted", [False, True])
def test_keyword_tensors_get_a_gradient_in_every_layer_or_in_none(wanted):
    torch.manual_seed(0)
    notes = []
    network = Network(*(ReversibleBlock(Masked(notes), Masked(notes)) for _ in range(3))).double()
    x, mask = torch.randn(2, 4, 3, dtype=torch.float64), torch.rand(4, 3, dtype=torch.float64, requires_grad=wanted)

    def gradients():
        network.zero_grad()
        loss = sum(y.square().mean() for y in network(*x, mask=mask))
        notes.clear()
        return torch.autograd.grad(loss, [*network.parameters(), *([mask] if wanted else [])])

    found = gradients()
    assert notes == [wanted] * 6
    network.use_storage("store")
    torch.testing.assert_close(found, gradients(), rtol=1e-10, atol=1e-12)


class Split(ReversibleLayer):
    """Two streams of one."""

    def forward(self, x):
        return tuple(x.chunk(2, -1))

    def inverse(self, a, b):
        return torch.cat([a, b], -1)


def test_layers_that_change_the_number_of_streams():
    torch.manual_seed(0)
    block = ReversibleBlock(nn.Linear(3, 3), nn.Linear(3, 3))
    network, x = Network(Split(), block).double(), torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    found = []
    for storage in ("reconstruct", "store"):
        network.use_storage(storage)
        loss = sum(y.square().mean() for y in network(x))
        found.append(torch.autograd.grad(loss, [x, *network.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-12)


class Three(ReversibleLayer):
    """Changes all of three streams."""

    def __init__(self):
        super().__init__()
        self.f, self.g, self.h = (nn.Linear(3, 3) for _ in range(3))

    def forward(self, a, b, c):
        a = a + self.f(b)
        b = b + self.g(c)
        return a, b, c + self.h(a)

    def inverse(self, a, b, c):
        c = c - self.h(a)
        b = b - self.g(c)
        return a - self.f(b), b, c


class SplitInThree(ReversibleLayer):
    """Three streams of one."""

    def forward(self, x):
        return tuple(x.chunk(3, -1))

    def inverse(self, *streams):
        return torch.cat(streams, -1)


class JoinThree(ReversibleLayer):
    """One stream of three."""

    def forward(self, *streams):
        return torch.cat(streams, -1)

    def inverse(self, x):
        return tuple(x.chunk(3, -1))


@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize(
    ("layers", "streams"),
    [
        ([Three], 3),
        ([Three, Three], 3),
        ([SplitInThree, Three], 1),
        ([Three, JoinThree], 3),
        ([SplitInThree, Three, JoinThree], 1),
    ],
)
def test_layers_that_change_three_streams(layers, streams, wanted):
    torch.manual_seed(0)
    network = Network(*(layer() for layer in layers)).double()
    x = [torch.randn(4, 9 if streams == 1 else 3, dtype=torch.float64, requires_grad=wanted) for _ in range(streams)]
    found = []
    for storage in ("reconstruct", "store"):
        network.use_storage(storage)
        outputs = network(*x)
        loss = sum(y.square().sum() for y in (outputs if isinstance(outputs, tuple) else (outputs,)))
        found.append(torch.autograd.grad(loss, [*(x if wanted else []), *network.parameters()]))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


def streams_alive(shape):
    gc.collect()
    return sum(type(x) is torch.Tensor and x.shape == shape for x in gc.get_objects())


def test_reconstructed_inputs_are_freed_after_the_backward_pass():
    network = recorded_network([])
    network[:2].requires_grad_(False)
    before = streams_alive((4, 3, 5, 5))
    loss = loss_of(network)
    loss.backward()
    assert streams_alive((4, 3, 5, 5)) == before


def test_another_backward_pass_of_the_same_graph_in_a_hook():
    network = recorded_network([])
    parameters = list(network.parameters())
    loss = loss_of(network)
    expected = torch.autograd.grad(loss, parameters, retain_graph=True)
    calls, within = [], []

    def hook(gradient):
        calls.append(gradient)
        if len(calls) == 1:
            within.append(torch.autograd.grad(loss, parameters, retain_graph=True))

    network[1].f.function[0].weight.register_hook(hook)
    found = torch.autograd.grad(loss, parameters, retain_graph=True)
    for a, b, c in zip(expected, found, within[0], strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_backward_passes_of_one_graph_on_several_threads():
    """Without dropout: threads share the random state."""
    torch.manual_seed(0)
    network = Network(*(ReversibleBlock(nn.Linear(5, 5), nn.Linear(5, 5)) for _ in range(LAYERS))).double()
    parameters = list(network.parameters())
    loss = loss_of(network)
    expected = torch.autograd.grad(loss, parameters, retain_graph=True)
    barrier = Barrier(3)

    def repeat(_):
        barrier.wait(10)
        return [torch.autograd.grad(loss, parameters, retain_graph=True) for _ in range(5)]

    with ThreadPoolExecutor(3) as pool:
        for found in pool.map(repeat, range(3)):
            for gradients in found:
                assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


def test_a_backward_pass_cannot_begin_inside_a_segment():
    network = recorded_network([])
    loss = loss_of(network)
    node = loss.grad_fn
    while "NodeFunction" not in type(node).__name__:
        node = node.next_functions[0][0]
    below = next(n for n, _ in node.next_functions if "NodeFunction" in type(n).__name__)
    with pytest.raises(RuntimeError, match="began inside a segment of reversible layers"):
        torch.autograd.grad(
            GradientEdge(below, 0), network[0].f.function[0].weight, torch.ones(4, 3, 5, 5, dtype=torch.float64)
        )


def test_weights_of_a_lower_layer_that_changed_are_noticed_before_any_gradient_is_written():
    network = recorded_network([])
    loss = loss_of(network)
    with torch.no_grad():
        network[0].f.function[0].weight += 1
    with pytest.raises(RuntimeError, match="changed between forward and backward"):
        loss.backward()
    assert all(p.grad is None for p in network.parameters())
