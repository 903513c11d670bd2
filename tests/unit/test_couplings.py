"""Affine and fixed-point couplings, companions, keyword arguments, overlapped reverse passes."""

import copy

import pytest
import torch
from helpers.networks import residual
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from petra import (
    AffineCoupling,
    FixedPointCoupling,
    Network,
    ReversibleBlock,
    ReversibleLayer,
    ReversibleResidual,
    Trainer,
    check_invertible,
    pareprop,
    plain_autograd,
)
from petra.reversible import reversible_segment


def pair(*shape, dtype=torch.float64, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_() for _ in range(2)]


def compare(network, inputs, wanted=(), **named):
    """Check that reversible, overlapped and plain passes give the same gradients."""
    found = []
    for context in (plain_autograd(), pareprop(), None):
        twin = copy.deepcopy(network)
        parameters = [p for p in twin.parameters() if p.requires_grad]
        torch.manual_seed(7)
        if context is None:
            outputs = twin(*inputs, **named)
        else:
            with context:
                outputs = twin(*inputs, **named)
        floats = [y for y in outputs if y.is_floating_point() and y.requires_grad]
        loss = sum((y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum() for y in floats)
        found.append(torch.autograd.grad(loss, [*inputs[:2], *wanted, *parameters]))
    for other in found[1:]:
        for a, b in zip(other, found[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    return found[0]


class Masked(nn.Module):
    """A residual function with a mask, which records whether it received one."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.3)
        self.seen = []

    def forward(self, x, mask=None, scale=1.0, deep=None):
        self.seen.append(mask is not None)
        y = self.dropout(torch.tanh(self.linear(x))) * scale
        if deep is not None:
            y = y + x * deep["bias"][0]
        return y if mask is None else y * mask


def masked(depth, width=4):
    torch.manual_seed(0)
    return Network(*(ReversibleBlock(Masked(width), Masked(width)) for _ in range(depth))).double()


@pytest.mark.parametrize("depth", range(1, 8))
def test_masks_reach_every_function_every_time(depth):
    network = masked(depth)
    mask = torch.rand(3, 1) > 0.5
    compare(network, [*pair(3, 4), mask])
    for _ in range(2):
        outputs = network(*pair(3, 4), mask)
        assert outputs[2].equal(mask)
        (outputs[0] + outputs[1]).sum().backward()
    functions = [m for m in network.modules() if isinstance(m, Masked)]
    assert all(f.seen == [True] * 4 for f in functions)  # forward and backward, twice


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_keyword_arguments_reach_every_function(depth):
    network = masked(depth)
    bias = torch.full((4,), 0.5, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(3, 1, dtype=torch.float64, requires_grad=True)
    given = {"mask": mask, "scale": 0.7, "deep": {"bias": [bias]}}
    found = compare(network, pair(3, 4), wanted=(bias, mask), **given)
    assert found[2].abs().min() > 0
    assert found[3].abs().min() > 0
    outputs = network(*pair(3, 4), **given)
    assert len(outputs) == 2


def test_a_mask_without_gradient_is_not_differentiated():
    seen = []

    class Look(nn.Module):
        def forward(self, x, mask):
            seen.append(mask.requires_grad)
            return x * mask

    network = Network(ReversibleResidual(Look()))
    network(*pair(3, 4), mask=torch.rand(3, 4, dtype=torch.float64))[0].sum().backward()
    assert seen == [False, False]


def test_keyword_arguments_of_single_layers():
    block = ReversibleBlock(Masked(4), Masked(4)).double().eval()
    x = pair(3, 4)
    mask = torch.rand(3, 1, dtype=torch.float64)
    y = block(*x, mask=mask)
    torch.testing.assert_close(block(*x, mask), (*y, mask))
    torch.testing.assert_close(list(block.inverse(*y, mask=mask)), x)


def test_companions_of_trained_stages():
    """A mask and a differentiable companion travel between stages; without learning PETRA equals backprop."""

    class Stem(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x), x, (x[:, :1] > 0), self.linear(x).sigmoid()

    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, mask, gate):
            return self.linear(x * gate) * mask

    class Head(nn.Module):
        def forward(self, a, b, mask, gate):
            return a + b

    def gradients(method):
        torch.manual_seed(0)
        layers = [
            Stem(),
            ReversibleResidual(Gated()),
            ReversibleBlock(Gated(), Gated()),
            ReversibleResidual(Gated()),
            Head(),
        ]
        trainer = Trainer(
            Network(*layers).double(),
            loss=nn.functional.mse_loss,
            optimizer=lambda p: torch.optim.SGD(p, 0.0),
            method=method,
            stages=[1, 1, 2, 1],
        )
        seen = {}
        trainer.executor.observers.append(
            lambda tick, action, stage: (
                seen.update({(action.microbatch, stage.index): stage.gradients()})
                if action.kind.name == "BACKWARD"
                else None
            )
        )
        generator = torch.Generator().manual_seed(2)
        for _ in range(8):
            trainer.step(*(torch.randn(3, 4, dtype=torch.float64, generator=generator) for _ in range(2)))
        trainer.drain()
        return seen

    found, expected = gradients("petra"), gradients("backprop")
    assert found.keys() == expected.keys()
    assert len(found) == 32
    for key, values in expected.items():
        for a, b in zip(found[key], values, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


class ScaleAndShift(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = residual(width)
        self.ends = nn.Conv2d(width, 2 * width, 1)

    def forward(self, x):
        log_scale, shift = self.ends(self.body(x)).chunk(2, dim=1)
        return torch.tanh(log_scale), shift


@pytest.mark.parametrize("depth", range(1, 8))
def test_affine(depth):
    torch.manual_seed(0)
    blocks = [
        ReversibleBlock(ScaleAndShift(3), ScaleAndShift(3), AffineCoupling)
        if i % 2
        else ReversibleResidual(ScaleAndShift(3), AffineCoupling)
        for i in range(depth)
    ]
    network = Network(*blocks).double()
    compare(network, pair(4, 3, 5, 5))
    assert check_invertible(blocks, *(x.detach() for x in pair(4, 3, 5, 5)), tolerance=1e-8)


def test_the_gradient_of_the_stream_that_is_passed_on_may_be_the_only_one():
    (coupling,) = ReversibleResidual(nn.Linear(3, 3)).couplings()
    x, y, gradient = torch.randn(3, 2, 3)
    found = coupling.reverse(coupling.forward((x, y)), (None, gradient))
    assert found.gradients[0].equal(gradient)
    assert found.gradients[1] is None
    assert not found.parameters


def test_the_check_needs_streams():
    with pytest.raises(ValueError, match="no streams are given: pass one tensor"):
        check_invertible(ReversibleResidual(nn.Identity()))


def test_affine_functions_return_two_tensors():
    with pytest.raises(ValueError, match="must return two tensors: return the logarithm of a scale and a shift"):
        ReversibleResidual(nn.Identity(), AffineCoupling)(*pair(2, 3))


def test_affine_blocks_invert_under_autocast():
    """Scales and shifts are bfloat16, but must be applied in float32: a scale in bfloat16 has no exact inverse."""
    torch.manual_seed(0)
    blocks = [ReversibleBlock(ScaleAndShift(3), ScaleAndShift(3), AffineCoupling).eval() for _ in range(4)]
    with torch.autocast("cpu", torch.bfloat16):
        assert check_invertible(blocks, *(x.detach() for x in pair(4, 3, 5, 5, dtype=torch.float32)), tolerance=2e-3)


def fixed_point_blocks(depth, width=6):
    torch.manual_seed(0)
    make = lambda: nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))  # noqa: E731
    return [ReversibleBlock(make(), make(), FixedPointCoupling) for _ in range(depth)]


def on_grid(x, bits=14):
    return torch.round(x * 2**bits) / 2**bits


def there_and_back(blocks, streams):
    with torch.no_grad():
        outputs = streams
        for block in blocks:
            outputs = block(*outputs)
        back = outputs
        for block in reversed(blocks):
            back = block.inverse(*back)
    return outputs, back


@pytest.mark.slow
@pytest.mark.parametrize("autocast", [False, True])
def test_a_thousand_fixed_point_blocks_are_exact_to_the_bit(autocast):
    blocks = fixed_point_blocks(1000)
    streams = [on_grid(x.detach()) for x in pair(5, 6, dtype=torch.float32)]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        outputs, back = there_and_back(blocks, streams)
    assert outputs[0].dtype == torch.float32
    assert not outputs[0].equal(streams[0])
    assert outputs[0].abs().max() < 512
    assert all(a.equal(b) for a, b in zip(back, streams, strict=True))


@given(
    st.floats(-2000, 2000, width=32), st.floats(-2000, 2000, width=32), st.sampled_from([torch.float32, torch.float64])
)
@settings(deadline=None)
def test_fixed_point_is_exact_even_beyond_the_range(x, r, dtype):
    class Constant(nn.Module):
        def forward(self, source):
            return torch.full_like(source, r)

    block = ReversibleBlock(Constant(), Constant(), FixedPointCoupling)
    streams = [on_grid(torch.tensor([x / 4 - 1e-3], dtype=dtype)), torch.tensor([-512.0], dtype=dtype)]
    _, back = there_and_back([block] * 5, streams)
    assert all(a.equal(b) for a, b in zip(back, streams, strict=True))


def test_the_fixed_point_coupling_adds():
    """Within the range it is the additive coupling, rounded; gradients ignore the rounding."""
    (block,) = fixed_point_blocks(1)
    plain = ReversibleBlock(block.f, block.g)
    x = pair(5, 6, dtype=torch.float32)
    for a, b in zip(block(*x), plain(*x), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=2**-12)
        assert a.equal(on_grid(a))
    compare(Network(*fixed_point_blocks(3)).double(), pair(5, 6))


def test_fixed_point_streams_in_low_precision_raise():
    with pytest.raises(ValueError, match="fixed-point coupling needs float32 or float64"):
        fixed_point_blocks(1)[0].bfloat16()(*torch.zeros(2, 3, 6, dtype=torch.bfloat16))


def test_overlapping_on_a_cpu_is_ordinary_reversible_backprop():
    layers = [ReversibleResidual(residual(3)) for _ in range(3)]
    network = Network(*layers).double()
    found = compare(network, pair(4, 3, 5, 5))
    assert len(found) == 2 + len(list(network.parameters()))
    with pareprop():
        outputs = reversible_segment(layers, tuple(pair(4, 3, 5, 5)))
    saved = outputs[0].grad_fn.saved_tensors
    assert len(saved) == 2  # the outputs, whatever the depth


def test_keyword_arguments_reach_custom_layers():
    class Shift(ReversibleLayer):
        def __init__(self):
            super().__init__()
            self.by = nn.Parameter(torch.tensor(0.5))

        def forward(self, a, b, mask=None, scale=1.0):
            return b + self.by * scale * mask, a

        def inverse(self, a, b, mask=None, scale=1.0):
            return b, a - self.by * scale * mask

    mask = torch.rand(3, 1, dtype=torch.float64, requires_grad=True)
    network = Network(Shift(), ReversibleBlock(Masked(4), Masked(4)), Shift(), ReversibleResidual(Masked(4))).double()
    compare(network, pair(3, 4), wanted=(mask,), mask=mask, scale=0.7)


def test_keyword_arguments_reach_networks_inside_a_network():
    inner = Network(Network(), ReversibleBlock(Masked(4), Masked(4)))
    for network in (Network(ReversibleBlock(Masked(4), Masked(4)), inner), Network(inner)):
        x = pair(3, 4)
        y = network.double()(*x, mask=torch.zeros(3, 1, dtype=torch.float64))
        assert torch.equal(y[0], x[0])
        assert torch.equal(y[1], x[1])


def test_keyword_arguments_without_reversible_layers_raise():
    with pytest.raises(ValueError, match="mask, scale given by name, but only functions of reversible layers"):
        Network(nn.Identity())(torch.ones(2), mask=None, scale=1)


def test_the_check_takes_masks_and_keyword_arguments():
    blocks = [ReversibleBlock(Masked(4), Masked(4)) for _ in range(2)]
    x = [t.detach() for t in pair(3, 4)]
    mask = torch.rand(3, 1) > 0.5
    assert check_invertible(blocks, *x, mask, tolerance=1e-9)
    assert check_invertible(blocks, *x, tolerance=1e-9, mask=mask, scale=0.5)


def test_fixed_point_streams_are_rounded_on_entry_and_show_infinities():
    (block,) = fixed_point_blocks(1)
    x = torch.tensor([[0.3, 600.0, -600.0, -0.0, 2.0**-20, 1.0]])
    y = block.inverse(*block(x, torch.zeros(1, 6)))[0]
    assert y.tolist() == [[round(0.3 * 2**14) / 2**14, 512 - 2**-14, -512.0, 0.0, 0.0, 1.0]]
    assert not torch.signbit(y[0, 3])
    x[0, 0] = float("inf")
    assert block(x, torch.zeros(1, 6))[0].isnan().any()
