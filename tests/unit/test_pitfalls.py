"""Problems that users of other reversible libraries report: each has its test here."""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from helpers import fork_server
from helpers.networks import residual
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from petra import (
    AdditiveCoupling,
    AffineCoupling,
    Network,
    ReversibleBlock,
    ReversibleResidual,
    models,
    pareprop,
    plain_autograd,
)


def network(depth=3, width=4, dropout=0.2):
    torch.manual_seed(0)
    blocks = [ReversibleBlock(residual(width, dropout=dropout), residual(width, dropout=dropout)) for _ in range(depth)]
    return Network(Split(width), *blocks, Join(width)).double()


class Split(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(3, 2 * width, 1)

    def forward(self, x):
        return self.conv(x).chunk(2, dim=1)


class Join(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Linear(2 * width, 3)

    def forward(self, a, b):
        return self.fc(torch.cat([a, b], 1).mean((2, 3)))


def data(count=4):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(count, 3, 5, 5, generator=generator, dtype=torch.float64)


def gradients(net, x, plain=False):
    torch.manual_seed(3)
    if plain:
        with plain_autograd():
            y = net(x)
    else:
        y = net(x)
    y.square().sum().backward()
    return {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("training", [True, False])
def test_backward_in_evaluation_mode(training):
    net = network().train(training)
    net(data())  # running statistics other than the initial ones
    twin = copy.deepcopy(net)
    assert_same(gradients(net, data()), gradients(twin, data(), plain=True))
    for a, b in zip(net.buffers(), twin.buffers(), strict=True):
        assert a.equal(b)


def test_gradients_accumulate_over_batches():
    net = network()
    twin = copy.deepcopy(net)
    for x in (data(4), data(3), data(5)):
        found, expected = gradients(net, x), gradients(twin, x, plain=True)
    assert_same(found, expected)


@pytest.mark.parametrize("frozen", ["all but one", "lowest", "topmost"])
def test_frozen_parameters(frozen):
    net = network()
    chosen = {"all but one": net[1:-1], "lowest": net[:2], "topmost": net[-2:]}[frozen]
    chosen.requires_grad_(False)
    if frozen == "all but one":
        net[2].f[0].weight.requires_grad_(True)
    twin = copy.deepcopy(net)
    found = gradients(net, data())
    assert_same(found, gradients(twin, data(), plain=True))
    assert len(found) == sum(p.requires_grad for p in net.parameters())


def test_the_scale_of_a_gradient_scaler_passes_through():
    net = network()
    expected = gradients(copy.deepcopy(net), data())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    torch.manual_seed(3)
    scaler.scale(net(data()).square().sum()).backward()
    scaler.unscale_(optimizer)
    assert_same({name: p.grad for name, p in net.named_parameters()}, expected)


def test_in_place_neighbours():
    """Above a segment they raise; below it they work as under plain autograd, because it saves only its outputs."""
    below = Network(nn.Sequential(Split(4), Both(nn.ReLU(inplace=True))), *network()[1:]).double()
    twin = copy.deepcopy(below)
    assert_same(gradients(below, data()), gradients(twin, data(), plain=True))
    above = Network(*network()[:-1], Both(nn.ReLU(inplace=True)), Join(4)).double()
    with pytest.raises(RuntimeError, match=r"in-?place"):
        gradients(above, data())


class Both(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *streams):
        streams = tuple(x * 1 for x in streams[0]) if isinstance(streams[0], tuple) else streams
        return tuple(self.function(x) for x in streams)


@pytest.mark.parametrize("method", ["reversible", "pareprop"])
def test_memory_does_not_grow_with_depth(method):
    """Autograd saves only the outputs of a segment, whatever its depth."""

    def saved(depth):
        sizes = []
        net = Network(*(ReversibleBlock(residual(4), residual(4)) for _ in range(depth)))
        x = torch.randn(2, 4, 5, 5, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
            if method == "pareprop":
                with pareprop():
                    net(x, x * 1)
            else:
                net(x, x * 1)
        return sum(sizes)

    assert saved(1) == saved(4) == saved(16) == 2 * 2 * 4 * 5 * 5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_residual_functions(backend):
    net = network(dropout=0.0)
    expected = gradients(copy.deepcopy(net), data())
    net.compile_functions(backend=backend)
    assert list(net.state_dict()) == list(network().state_dict())
    assert_same(gradients(net, data()), expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_layers_of_one_class_are_compiled_for_their_own_shapes():
    """Otherwise the compiler makes sizes dynamic as soon as a second layer has other sizes."""
    sizes = []

    def backend(graph, inputs):
        sizes.extend(i if isinstance(i, int | torch.SymInt) else tuple(i.shape) for i in inputs)
        return graph.forward

    net = models.create("resnet18", depths=(1, 1, 1), width=4).compile_functions(backend=backend)
    net(torch.randn(2, 3, 8, 8)).sum().backward()
    assert sizes
    assert all(type(size) is int for shape in sizes for size in (shape if isinstance(shape, tuple) else (shape,)))


def test_a_hook_of_a_parameter_fires_once():
    net = network()
    fired = []
    for name, p in net.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: fired.append(name))
    gradients(net, data())
    assert sorted(fired) == sorted(name for name, _ in net.named_parameters())


@pytest.mark.parametrize("context", [nullcontext, pareprop])
def test_a_hook_on_a_gradient_changes_it_once(context):
    net = network()
    net[2].f = net[1].f  # shared, so that its gradient is a sum
    fired = []
    for p in net[1].parameters():
        p.register_hook(lambda g: fired.append(0) or g * 0.1)
    twin = copy.deepcopy(net)
    for p in twin[1].parameters():
        p.register_hook(lambda g: g * 0.1)
    with context():
        found = gradients(net, data())
    assert_same(found, gradients(twin, data(), plain=True))
    assert len(fired) == len(list(net[1].parameters()))


def test_hooks_survive_a_backward_pass_that_fails():
    net = network()
    fired = []
    net[1].f[0].weight.register_hook(lambda g: fired.append(0))
    loss = net(data()).sum()
    net[1].f.append(nn.Flatten())
    with pytest.raises(ValueError, match="must return the shape"):
        loss.backward()
    del net[1].f[-1]
    gradients(net, data())
    assert len(fired) == 1


def _sharded(rank, expected):
    """Sharded parameters, gathered by the root for the whole network."""
    from torch.distributed.fsdp import fully_shard

    net = network(dropout=0.0).eval()
    fully_shard(net)
    net(data(8).chunk(2)[rank]).square().sum().backward()
    for name, p in net.named_parameters():
        torch.testing.assert_close(2 * p.grad.full_tensor(), expected[name], rtol=1e-9, atol=1e-9)


def _data_parallel(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    net = network(dropout=0.0).eval()  # the mean over halves is the mean over all
    expected = gradients(copy.deepcopy(net), data(8), plain=True)
    wrapped = DistributedDataParallel(net)
    for _ in range(2):  # "marked ready twice" would occur in a second pass
        wrapped.zero_grad()
        wrapped(data(8).chunk(2)[rank]).square().sum().backward()
    for name, p in net.named_parameters():
        torch.testing.assert_close(2 * p.grad, expected[name], rtol=1e-9, atol=1e-9)
    if torch.__version__ >= (2, 7):  # sharding does not work on a CPU before
        _sharded(rank, expected)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_data_parallel_wrappers(tmp_path):
    fork_server.context()
    torch.multiprocessing.start_processes(_data_parallel, (str(tmp_path),), nprocs=2, start_method="forkserver")


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_the_forward_pass_holds_in_the_backward_pass(training):
    """Validation between forward and backward does not change gradients."""
    net = network().train(training)
    twin = copy.deepcopy(net)
    found = []
    for each, plain in ((net, False), (twin, True)):
        torch.manual_seed(3)
        if plain:
            with plain_autograd():
                loss = each(data()).square().sum()
        else:
            loss = each(data()).square().sum()
        each.train(not training)
        loss.backward()
        assert all(m.training != training for m in each.modules())
        found.append({name: p.grad for name, p in each.named_parameters()})
    assert_same(*found)


@pytest.mark.parametrize("what", ["frozen weight", "statistics in evaluation mode"])
def test_changes_of_weights_or_statistics_before_backward_raise(what):
    net = network().eval()
    net[1].f.requires_grad_(False)
    loss = net(data()).sum()
    with torch.no_grad():
        (net[1].f[0].weight if what == "frozen weight" else net[2].f[1].running_mean).add_(1)
    with pytest.raises(RuntimeError, match="changed between forward and backward"):
        loss.backward()


def test_running_statistics_may_change_in_training_mode():
    net = network()
    losses = [net(data()).sum() for _ in range(2)]
    sum(losses).backward()


def test_functional_call_with_other_parameters_raises():
    net = network()
    others = {name: (p.detach() * 1.1).requires_grad_() for name, p in net.named_parameters()}
    loss = torch.func.functional_call(net, others, (data(),)).sum()
    with pytest.raises(RuntimeError, match="different parameters or buffers in the backward pass"):
        loss.backward()
    with plain_autograd():
        torch.func.functional_call(net, others, (data(),)).sum().backward()
    assert all(p.grad is not None for p in others.values())


def test_functional_call_raises_if_only_the_input_requires_a_gradient():
    net = network()
    others = {name: p.detach() * 1.1 for name, p in net.named_parameters()}
    loss = torch.func.functional_call(net, others, (data().requires_grad_(),)).sum()
    with pytest.raises(RuntimeError, match="different parameters or buffers in the backward pass"):
        loss.backward()


def test_buffers_that_are_replaced_in_every_evaluation_raise():
    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x):
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return self.fc(x - self.mean)

    x = torch.randn(2, 4)
    y = Network(ReversibleResidual(Centred()))(x, x)
    with pytest.raises(RuntimeError, match="changes one of its buffers in every evaluation"):
        y[0].sum().backward()


def test_functions_with_a_state_raise():
    f = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    x = torch.randn(2, 4, requires_grad=True)
    y = Network(ReversibleResidual(f))(x, x)
    with pytest.raises(RuntimeError, match="changes one of its buffers in every evaluation"):
        y[0].sum().backward()


@pytest.mark.parametrize("coupling", [AdditiveCoupling, AffineCoupling])
def test_complex_streams(coupling):
    class Turn(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 3, dtype=torch.complex128))

        def forward(self, x):
            y = x @ self.weight
            return y if coupling is AdditiveCoupling else (torch.tanh(y), y)

    torch.manual_seed(0)
    net = Network(*(ReversibleResidual(Turn(), coupling) for _ in range(3)))
    x = torch.randn(2, 3, dtype=torch.complex128, requires_grad=True)
    found = []
    for plain in (False, True):
        if plain:
            with plain_autograd():
                y = net(x, x * 2)
        else:
            y = net(x, x * 2)
        found.append(torch.autograd.grad((y[0] * y[1]).abs().sum(), [x, *net.parameters()]))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_checkpointing_around_a_network():
    net = network()
    expected = gradients(copy.deepcopy(net), data())
    torch.manual_seed(3)
    x = data().requires_grad_()
    torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False).square().sum().backward()
    assert_same({name: p.grad for name, p in net.named_parameters()}, expected)


def test_half_precision_inputs_under_autocast_become_float32_streams():
    x = torch.randn(2, 4, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(y.dtype == torch.float32 for y in Network(ReversibleResidual(nn.Linear(4, 4)))(x, x))


def test_cast_weights_do_not_accumulate_in_a_deep_segment():
    kept = []

    class Function(nn.Linear):
        def forward(self, x):
            kept.append((torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()))
            return super().forward(x)

    x = torch.randn(2, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = Network(*(ReversibleResidual(Function(4, 4)) for _ in range(3)))(x, x)
        assert torch.is_autocast_cache_enabled()
    torch.autograd.grad(sum(y).sum(), x)
    assert kept == [(True, False)] * 6


def test_parametrizations_that_are_cached_get_gradients():
    torch.manual_seed(0)
    net = Network(*(ReversibleResidual(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))) for _ in range(2)))
    net = net.double()
    x = torch.randn(3, 4, dtype=torch.float64)
    found = []
    for context in (plain_autograd(), nullcontext()):
        net.zero_grad()
        with context, parametrize.cached():
            y = net(x, x)
            (y[0].sin() + y[1]).sum().backward()
        found.append({name: p.grad for name, p in net.named_parameters()})
    assert_same(*found)
