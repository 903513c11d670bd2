"""Layers that only move values: their inverse is exact to the bit, and gradients move in the same way."""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from petra import Network, ReversibleResidual, check_invertible, plain_autograd
from petra.reversible import InjectiveStem, InvertibleDownsampling

sizes = st.integers(1, 4)


def images(*shape, seed=0):
    """Random bits, including NaNs, infinities and signed zeros."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64).int().view(torch.float32)


def same_bits(a, b):
    return a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))


@given(factor=sizes, batch=sizes, channels=sizes, height=sizes, width=sizes)
def test_downsampling_inverts_bit_for_bit(factor, batch, channels, height, width):
    layer = InvertibleDownsampling(factor)
    xs = [images(batch, channels, factor * height, factor * width, seed=i) for i in range(2)]
    ys = layer(*xs)
    assert len(ys) == 2
    for x, y in zip(xs, ys, strict=True):
        assert y.shape == (batch, channels * factor**2, height, width)
        for c in range(channels):  # tile by tile: pixel (i, j) of the tiles is one channel
            for i in range(factor):
                for j in range(factor):
                    tile = x[:, c, i::factor, j::factor].contiguous()
                    assert same_bits(y[:, (c * factor + i) * factor + j].contiguous(), tile)
    assert all(same_bits(x, back) for x, back in zip(xs, layer.inverse(*ys), strict=True))


@given(factor=sizes, batch=sizes, inputs=sizes, more=sizes, height=sizes, width=sizes)
def test_the_injective_stem_inverts_bit_for_bit(factor, batch, inputs, more, height, width):
    channels = -(-inputs * factor**2 // 2) + more - 1
    layer = InjectiveStem(inputs, channels, factor)
    x = images(batch, inputs, factor * height, factor * width)
    ys = layer(x)
    assert [y.shape for y in ys] == [(batch, channels, height, width)] * 2
    (back,) = layer.inverse(*ys)
    assert same_bits(x, back.contiguous())
    both = torch.cat(ys, dim=1)
    tiles, _ = InvertibleDownsampling(factor)(x, x)
    assert same_bits(both[:, : inputs * factor**2].contiguous(), tiles)
    assert not both[:, inputs * factor**2 :].any()


LAYERS = {
    "downsampling": (InvertibleDownsampling(), [(3, 2, 4, 6), (3, 2, 4, 6)]),
    "downsampling by three": (InvertibleDownsampling(3), [(3, 2, 6, 3), (3, 1, 3, 9)]),
    "stem": (InjectiveStem(3, 5), [(3, 3, 4, 4)]),
    "stem that reaches into the second": (InjectiveStem(3, 2), [(3, 3, 4, 4)]),
    "stem that fills both streams": (InjectiveStem(3, 6, factor=2), [(2, 3, 4, 4)]),
}


@pytest.mark.parametrize(("layer", "shapes"), LAYERS.values(), ids=LAYERS.keys())
def test_gradients_move_with_the_values(layer, shapes):
    xs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    report = check_invertible(layer, *xs, tolerance=0.0)
    assert report, report
    assert report.bit_exact


SINGLE = {name: pair for name, pair in LAYERS.items() if len(pair[0].couplings()) == 1}


@pytest.mark.parametrize(("layer", "shapes"), SINGLE.values(), ids=SINGLE.keys())
def test_gradients_where_the_loss_uses_one_output_or_none(layer, shapes):
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    outputs = layer(*inputs)
    (coupling,) = layer.couplings()
    for used in range(len(outputs)):
        weights = torch.randn_like(outputs[used])
        expected = torch.autograd.grad(outputs[used], inputs, weights, retain_graph=True, materialize_grads=True)
        gradients = tuple(weights if i == used else None for i in range(len(outputs)))
        _, found, parameters = coupling.reverse(outputs, gradients)
        assert not parameters
        for x, a, b in zip(inputs, found, expected, strict=True):
            assert torch.equal(torch.zeros_like(x) if a is None else a, b)
    assert coupling.reverse(outputs, (None,) * len(outputs)).gradients == (None,) * len(inputs)


@pytest.mark.parametrize("by_name", [False, True])
def test_companions_pass_unchanged_and_get_gradients(by_name):
    """From one stream to two and on, with a mask and a scale as companions."""

    class Scaled(nn.Module):
        def forward(self, x, mask, scale):
            return torch.where(mask[:, None, None, None], x.tanh() * scale, 0)

    network = Network(InjectiveStem(2, 4, factor=2), InvertibleDownsampling(), ReversibleResidual(Scaled()))
    found = []
    for context in (nullcontext(), plain_autograd()):
        x = torch.randn(3, 2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
        mask, scale = torch.tensor([True, False, True]), torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
        with context:
            outputs = network(x, mask=mask, scale=scale) if by_name else network(x, mask, scale)
        assert len(outputs) == (2 if by_name else 4)
        (outputs[0].square().sum() + outputs[1].sum()).backward()
        found.append((outputs[0], x.grad, scale.grad))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    # the layers outside a network
    stem, down = network[0], network[1]
    y = stem(x, mask=mask) if by_name else stem(x, mask)
    z = down(*y[:2], mask=mask) if by_name else down(*y)
    assert len(y) == len(z) == (2 if by_name else 3)
    assert by_name or z[2] is mask
    back = stem.inverse(*down.inverse(*z))
    assert torch.equal(back[0], x)
    assert by_name or back[1] is mask


def test_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"shape \(1, 2, 4, 5\) cannot be cut into tiles of 2×2"):
        InvertibleDownsampling()(torch.zeros(1, 2, 4, 4), torch.zeros(1, 2, 4, 5))
    with pytest.raises(ValueError, match="factor is 0"):
        InvertibleDownsampling(0)
    with pytest.raises(ValueError, match="do not fit into two streams of 23 channels: give 24 channels or more"):
        InjectiveStem(3, 23, factor=4)
    with pytest.raises(ValueError, match=r"takes images of 3 channels, not shape \(1, 2, 4, 4\)"):
        InjectiveStem(3, 4)(torch.zeros(1, 2, 4, 4))
