"""Reversible segments on a GPU: overlapped on two CUDA streams, and captured as graphs; skipped without a GPU."""

import copy
from itertools import count

import pytest
import torch
from helpers.networks import residual
from torch import nn

from petra import FixedPointCoupling, Network, ReversibleBlock, ReversibleResidual, models, pareprop, plain_autograd
from petra.reversible import reverse_pass

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.slow]


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)


def mixed(depth, dropout=0.3, width=6):
    torch.manual_seed(0)
    make = lambda: residual(width, dropout=dropout)  # noqa: E731
    layers = [ReversibleBlock(make(), make()) if i % 2 else ReversibleResidual(make()) for i in range(depth)]
    return Network(*layers).cuda().double()


def inputs(width=6, size=16, dtype=torch.float64):
    generator = torch.Generator("cuda").manual_seed(1)
    make = lambda: torch.randn(16, width, size, size, device="cuda", dtype=dtype, generator=generator)  # noqa: E731
    return [make().requires_grad_() for _ in range(2)]


def gradients(network, x, context=None, steps=1):
    """Return the gradients of inputs and parameters after some passes, and the running statistics."""
    for _ in range(steps):
        for tensor in (*x, *network.parameters()):
            tensor.grad = None
        torch.manual_seed(5)
        if context is None:
            outputs = network(*x)
        else:
            with context():
                outputs = network(*x)
        sum((y * y).sum() for y in outputs).backward()
    return [t.grad.clone() for t in (*x, *network.parameters())] + [b.clone() for b in network.buffers()]


@pytest.mark.parametrize("caught_up", [False, True, None], ids=["busy", "caught up", "alternating"])
@pytest.mark.parametrize("depth", range(1, 8))
def test_overlapped_gradients_are_those_of_reversible_backprop(depth, caught_up, monkeypatch):
    """Whether or not the GPU keeps up with the host."""
    turns = count()
    answer = (lambda event: next(turns) % 4 < 2) if caught_up is None else lambda event: caught_up
    monkeypatch.setattr(torch.cuda.Event, "query", answer)
    monkeypatch.setattr(reverse_pass, "_CAUGHT_UP", {})
    network, x = mixed(depth), inputs()
    expected = gradients(copy.deepcopy(network), x)
    for a, b in zip(gradients(copy.deepcopy(network), x, pareprop, 1), expected, strict=True):
        assert a.equal(b)
    for a, b in zip(gradients(network, x, plain_autograd), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_overlapping_stays_correct_while_memory_is_reused():
    """Large enough that the two CUDA streams overlap; the allocator reuses freed memory at once."""
    network, x = mixed(12, dropout=0.0, width=32), inputs(32, 64)
    expected = gradients(copy.deepcopy(network).eval(), x)
    network.eval()
    for _ in range(20):
        for a, b in zip(gradients(network, x, pareprop), expected, strict=True):
            assert a.equal(b)


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("depth", range(1, 8))
def test_captured_segments_give_the_same_gradients(depth, overlapped):
    network, x = mixed(depth, dropout=0.0), inputs()
    context = pareprop if overlapped else None
    twin = copy.deepcopy(network).use_cuda_graphs()
    for steps in (1, 3):
        for a, b in zip(gradients(twin, x, context, steps), gradients(network, x, context, steps), strict=True):
            assert a.equal(b)


def test_captured_passes_may_be_interleaved():
    network = mixed(3, dropout=0.0)
    twin = copy.deepcopy(network).use_cuda_graphs()
    first, second = inputs(), [x.detach() * 2 for x in inputs()]

    def both(net):
        losses = [sum((y * y).sum() for y in net(*x)) for x in (first, second, first)]
        return torch.autograd.grad(losses[0] - 2 * losses[1] + 3 * losses[2], [*first, *net.parameters()])

    for a, b in zip(both(twin), both(network), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    with torch.no_grad():  # weights may change their values
        for p, q in zip(network.parameters(), twin.parameters(), strict=True):
            p.mul_(1.1)
            q.mul_(1.1)
    for a, b in zip(both(twin), both(network), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_random_functions_cannot_be_captured():
    with pytest.raises(ValueError, match="draws random numbers"):
        mixed(2).use_cuda_graphs()(*inputs())


@pytest.mark.parametrize("autocast", [False, True])
def test_fixed_point_couplings_are_exact_to_the_bit(autocast):
    torch.manual_seed(0)
    make = lambda: nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))  # noqa: E731
    blocks = [ReversibleBlock(make(), make(), FixedPointCoupling).cuda() for _ in range(1000)]
    streams = [torch.round(torch.randn(32, 64, device="cuda") * 2**14) / 2**14 for _ in range(2)]
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        outputs = streams
        for block in blocks:
            outputs = block(*outputs)
        for block in reversed(blocks):
            outputs = block.inverse(*outputs)
    assert all(a.equal(b) for a, b in zip(outputs, streams, strict=True))


@pytest.mark.filterwarnings("ignore")
def test_compiled_functions_and_capture_under_autocast():
    torch.manual_seed(0)
    network = models.create("rev-vit-s", image_size=32, patch=8, depth=3, num_classes=10).cuda()
    twin = copy.deepcopy(network).compile_functions().use_cuda_graphs()
    x = torch.randn(8, 3, 32, 32, device="cuda")
    found = []
    for net in (network, twin):
        for _ in range(2):
            net.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = net(x).float().square().mean()
            loss.backward()
        found.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
    assert nn.functional.cosine_similarity(*found, dim=0) > 0.999
