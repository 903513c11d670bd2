"""Reversible layers and networks: inverse and gradients compared with plain autograd, errors, `check_invertible`."""

import copy
from contextlib import nullcontext

import pytest
import torch
from helpers.networks import batches, mixed_network, residual, reversible_network
from torch import nn

from petra import Network, ReversibleBlock, ReversibleLayer, ReversibleResidual, check_invertible, plain_autograd
from petra.reversible.gradients import trainable
from petra.reversible.module_state import frozen_statistics, held_tensors, submodules
from petra.reversible.randomness import forked


class Shear(ReversibleLayer):
    """A custom reversible layer with batch norm and dropout inside."""

    def __init__(self, width):
        super().__init__()
        self.f = residual(width)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, a, b):
        return (a + self.f(b)) * self.scale, b

    def inverse(self, a, b):
        return a / self.scale - self.f(b), b


BLOCKS = {
    "one residual": lambda: [ReversibleResidual(residual(3))],
    "two residuals": lambda: [ReversibleBlock(residual(3), residual(3))],
    "custom layer": lambda: [Shear(3)],
    "segment": lambda: [
        ReversibleResidual(residual(3)),
        ReversibleBlock(residual(3), residual(3)),
        Shear(3),
        ReversibleResidual(residual(3)),
    ],
}


def streams(dtype=torch.float64, requires_grad=True):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 3, 5, 5, generator=generator, dtype=dtype).requires_grad_(requires_grad) for _ in range(2)]


def gradients(network, inputs, dtype=torch.float64):
    torch.manual_seed(3)
    outputs = network(*inputs)
    loss = sum((y * torch.linspace(-1, 1, y.numel(), dtype=dtype).view_as(y)).sum() for y in outputs)
    return torch.autograd.grad(loss, [*inputs, *network.parameters()])


@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS.keys())
def test_gradients_equal_plain_autograd(blocks):
    torch.manual_seed(0)
    network = Network(*blocks()).double()
    plain = copy.deepcopy(network)
    inputs = streams()
    reversible = gradients(network, inputs)
    with plain_autograd():
        expected = gradients(plain, inputs)
    for a, b in zip(reversible, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    # batch norm counted the batch once, in the forward pass
    for (name, a), b in zip(network.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS.keys())
def test_inverse(blocks):
    layers = nn.ModuleList(blocks()).double().eval()
    inputs = streams(requires_grad=False)
    outputs = inputs
    for layer in layers:
        outputs = layer(*outputs)
    for layer in reversed(layers):
        outputs = layer.inverse(*outputs)
    for a, b in zip(outputs, inputs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_other_parameters_of_a_block_get_no_gradient():
    block = ReversibleBlock(residual(3), residual(3)).double()
    block.unused = nn.Linear(2, 2)
    sum(y.sum() for y in Network(block)(*streams())).backward()
    assert all((p.grad is None) == name.startswith("unused") for name, p in block.named_parameters())


class Counted(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x)


def test_each_residual_function_is_evaluated_once_forward_and_once_backward():
    functions = [Counted(residual(3)) for _ in range(3)]
    network = Network(ReversibleResidual(functions[0]), ReversibleBlock(functions[1], functions[2])).double()
    outputs = network(*streams())
    assert [f.calls for f in functions] == [1, 1, 1]
    sum(y.sum() for y in outputs).backward()
    assert [f.calls for f in functions] == [2, 2, 2]


def test_a_segment_stores_its_outputs_only():
    saved = []
    network = reversible_network(6)
    stem, segment, head = network[:1], network[1:-1], network[-1:]
    streams = stem(torch.randn(3, 2, 4, 4))

    def pack(tensor):
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        outputs = segment(*streams)
    assert len(saved) == 2
    head(*outputs).sum().backward()


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize("used", [0, 1])
def test_unreached_parameters_have_no_gradient(blocks, used):
    """None instead of zero, with which momentum and weight decay would change them."""
    torch.manual_seed(0)
    network = Network(*BLOCKS[blocks]()).double().eval()
    x = torch.randn(2, 2, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    found = []
    for context in (nullcontext, plain_autograd):
        network.zero_grad()
        with context():
            outputs = network(*x)
        outputs[used].sum().backward()
        found.append({name: p.grad for name, p in network.named_parameters()})
    reached = [{name for name, gradient in one.items() if gradient is not None} for one in found]
    assert reached[0] == reached[1]
    torch.testing.assert_close(*({name: one[name] for name in reached[0]} for one in found))


def test_random_state_afterwards_is_that_of_plain_autograd():
    network = Network(ReversibleBlock(residual(3), residual(3))).double()
    torch.manual_seed(5)
    network(*streams())[0].sum().backward()
    after = torch.rand(3)
    torch.manual_seed(5)
    with plain_autograd():
        network(*streams())[0].sum().backward()
    assert torch.equal(after, torch.rand(3))


def test_parts_without_gradient():
    """Frozen parameters, an input that requires no gradient, an output that the loss does not use."""
    network = Network(ReversibleBlock(residual(3), residual(3)), ReversibleResidual(residual(3))).double()
    network[0].f.requires_grad_(False)
    plain = copy.deepcopy(network)
    a, b = streams(requires_grad=False)
    found = {}
    for name, net in (("reversible", network), ("plain", plain)):
        torch.manual_seed(2)
        if name == "plain":
            with plain_autograd():
                y = net(a, b)[0]
        else:
            y = net(a, b)[0]
        y.square().sum().backward()
        found[name] = [p.grad for p in net.parameters()]
    for x, y in zip(found["reversible"], found["plain"], strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


def test_shared_residual_function():
    torch.manual_seed(0)
    f = nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Tanh())
    network = Network(ReversibleBlock(f, f), ReversibleResidual(f)).double()
    inputs = streams()
    reversible = gradients(network, inputs)
    with plain_autograd():
        expected = gradients(network, inputs)
    for a, b in zip(reversible, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    assert int(f[1].num_batches_tracked) == 6  # three evaluations in each of the two passes


def test_weights_changed_between_forward_and_backward_raise():
    network = Network(ReversibleResidual(residual(3)))
    loss = sum(y.sum() for y in network(*streams(torch.float32)))
    with torch.no_grad():
        network[0].f[0].weight.add_(1)
    with pytest.raises(RuntimeError, match="changed between forward and backward"):
        loss.backward()


def test_state_is_restored_after_an_error():
    norm = nn.BatchNorm2d(3)
    state = torch.get_rng_state()

    def fail():
        with forked(torch.device("cpu")), frozen_statistics([norm]):
            torch.rand(3)
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        fail()
    assert norm.running_mean is not None
    assert torch.equal(state, torch.get_rng_state())


def test_a_custom_layer_may_return_one_tensor_and_keeps_float32_under_autocast():
    class Turn(ReversibleLayer):
        def __init__(self):
            super().__init__()
            self.register_buffer("matrix", torch.eye(4).roll(1, 0))

        def forward(self, x):
            return x @ self.matrix

        def inverse(self, y):
            return y @ self.matrix.t()

    network = Network(nn.Linear(4, 4), Turn(), nn.Linear(4, 4))
    assert network(torch.randn(1, 4)).shape == (1, 4)
    assert check_invertible(Turn(), torch.randn(3, 4))
    with torch.autocast("cpu", torch.bfloat16):
        assert network[1:2](torch.randn(2, 4, requires_grad=True)).dtype == torch.float32


def test_blocks_take_two_streams():
    with pytest.raises(ValueError, match="takes two streams, not 1"):
        ReversibleResidual(nn.Identity())(torch.zeros(2))


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_trace_of_a_network_computes_the_same_with_the_same_gradients():
    """`torch.jit.trace` cannot record autograd functions, so it records the functions of the couplings."""
    network, inputs = Network(*BLOCKS["segment"]()).double().eval(), streams()
    traced = torch.jit.trace(network, tuple(inputs))
    for own, of_trace in zip(gradients(network, inputs), gradients(traced, inputs), strict=True):
        torch.testing.assert_close(own, of_trace, rtol=1e-10, atol=1e-10)


def test_meta():
    with torch.device("meta"):
        network = reversible_network(3)
        network(torch.empty(2, 2, 4, 4)).sum().backward()
    assert all(p.grad.is_meta for p in network.parameters())


def test_autocast_of_the_forward_holds_in_the_recomputation():
    seen = []

    class Look(nn.Module):
        def forward(self, x):
            seen.append(torch.is_autocast_enabled("cpu"))
            return torch.mm(x, x.t())

    network = Network(ReversibleResidual(Look()))
    x = torch.randn(4, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = network(x, x)
    assert y[0].dtype == torch.float32
    (y[0].sum()).backward()
    assert seen == [True, True]


def test_streams_stay_in_float32_under_autocast():
    network = mixed_network()
    x, _ = next(batches(1))
    seen = []
    network[2].register_forward_hook(lambda *_: None)
    network[3].register_forward_pre_hook(lambda module, inputs: seen.extend(t.dtype for t in inputs))
    with torch.autocast("cpu", torch.bfloat16):
        network(x)
    assert seen == [torch.float32, torch.float32]


def test_in_place_functions_raise():
    network = Network(ReversibleResidual(nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(3, 3, 1))))
    with torch.no_grad(), pytest.raises(ValueError, match=r"changes its input in place.*nn\.ReLU"):
        network(*streams(torch.float32, requires_grad=False))


def test_functions_that_change_the_shape_raise():
    network = Network(ReversibleResidual(nn.Conv2d(3, 3, 3)))
    with pytest.raises(ValueError, match=r"returns shape \(4, 3, 3, 3\) for a stream of shape \(4, 3, 5, 5\)"):
        network(*streams(torch.float32))


def test_streams_of_different_shapes_raise():
    network = Network(ReversibleResidual(nn.Identity()))
    with pytest.raises(ValueError, match=r"Identity returns shape \(3, 8\) for a stream of shape \(4, 8\)"):
        network(torch.randn(3, 8), torch.randn(4, 8))


def test_functions_that_return_several_tensors_raise():
    network = Network(ReversibleResidual(nn.LSTM(8, 8)))
    with pytest.raises(ValueError, match="LSTM returns tuple, but a residual function must return one tensor"):
        network(torch.randn(4, 8), torch.randn(4, 8))


def test_functions_that_are_not_modules_raise():
    hidden = nn.Linear(8, 8)
    for make in (ReversibleResidual, lambda f: ReversibleBlock(nn.Identity(), f)):
        with pytest.raises(ValueError, match=r"is not an nn\.Module: give residual functions as modules"):
            make(lambda x: hidden(x).tanh())


def test_outputs_modified_in_place_raise():
    network = Network(ReversibleResidual(residual(3, dropout=0.0)))
    y, z = network(*streams(torch.float32))
    loss = y.sum() + z.sum()
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class TestCheck:
    def test_good_layers(self):
        for make in BLOCKS.values():
            report = check_invertible(make(), *streams(requires_grad=False), tolerance=1e-10)
            assert report, report
            assert "inverts" in str(report)
            assert report.reconstruction_error < 1e-12
            assert report.gradient_error < 1e-12

    def test_pass_through_alone_is_bit_exact(self):
        class Swap(ReversibleLayer):
            def forward(self, a, b):
                return b, a

            inverse = forward

        report = check_invertible(Swap(), *streams(requires_grad=False))
        assert report.bit_exact
        assert "bit for bit" in str(report)

    def test_wrong_inverse(self):
        class Wrong(Shear):
            def inverse(self, a, b):
                return a / self.scale + self.f(b), b

        report = check_invertible(Wrong(3), *streams(requires_grad=False))
        assert not report
        assert "does NOT invert" in str(report)

    def test_nan_does_not_pass(self):
        class Broken(Shear):
            def inverse(self, a, b):
                return a * torch.nan, b

        assert not check_invertible(Broken(3), *streams(requires_grad=False))

        class BrokenElsewhere(Shear):
            def inverse(self, a, b):
                return a / self.scale - self.f(b), b * torch.nan

        assert not check_invertible(BrokenElsewhere(3), *streams(requires_grad=False))

    def test_leaves_everything_as_it_was(self):
        layer = ReversibleResidual(residual(3)).double()
        before, state = copy.deepcopy(layer.state_dict()), torch.get_rng_state()
        check_invertible(layer, *streams(requires_grad=False))
        assert torch.equal(state, torch.get_rng_state())
        assert all(torch.equal(a, b) for a, b in zip(before.values(), layer.state_dict().values(), strict=True))

    def test_ordinary_modules_raise(self):
        with pytest.raises(ValueError, match="Conv2d is not a reversible layer"):
            check_invertible(nn.Conv2d(3, 3, 1), *streams(requires_grad=False))


def test_submodules_and_tensors_are_those_that_torch_finds():
    shared = nn.Linear(2, 2)
    shared.bias.requires_grad_(False)
    first, second = nn.Sequential(shared, nn.BatchNorm1d(2), nn.Sequential(shared)), nn.ModuleDict({"a": shared})
    second["tied"] = nn.Linear(2, 2, bias=False)
    second["tied"].weight = shared.weight
    second.register_module("none", None)
    second.register_buffer("nothing", None)
    modules = [first, residual(3), second, shared]
    expected = list(dict.fromkeys(m for module in modules for m in module.modules()))
    assert submodules(modules) == expected
    parameters = list(dict.fromkeys(p for module in modules for p in module.parameters()))
    assert list(map(id, trainable(modules))) == [id(p) for p in parameters if p.requires_grad]
    buffers = (b for module in modules for b in module.buffers())
    assert {*map(id, held_tensors(modules))} == {*map(id, parameters), *map(id, buffers)}
