"""Layers that only move values: bit for bit there and back, gradients moved alike."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from petra import check_invertible
from petra.reversible import InjectiveStem, InvertibleDownsampling

sizes = st.integers(1, 4)


def images(*shape, seed=0):
    """Random bits, so NaNs, infinities and signed zeros too."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64).int().view(torch.float32)


def same_bits(a, b):
    return a.shape == b.shape and torch.equal(a.view(torch.int32), b.view(torch.int32))


@given(factor=sizes, batch=sizes, channels=sizes, height=sizes, width=sizes, streams=st.integers(1, 2))
def test_downsampling_inverts_bit_for_bit(factor, batch, channels, height, width, streams):
    layer = InvertibleDownsampling(factor)
    xs = [images(batch, channels, factor * height, factor * width, seed=i) for i in range(streams)]
    ys = layer(*xs)
    assert len(ys) == streams
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
    (tiles,) = InvertibleDownsampling(factor)(x)
    assert same_bits(both[:, : inputs * factor**2].contiguous(), tiles)
    assert not both[:, inputs * factor**2 :].any()


LAYERS = {
    "downsampling": (InvertibleDownsampling(), [(3, 2, 4, 6), (3, 2, 4, 6)]),
    "of one stream": (InvertibleDownsampling(3), [(3, 2, 6, 3)]),
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
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert coupling.reverse(outputs, (None,) * len(outputs)).gradients == (None,) * len(inputs)


def test_further_streams_pass_unchanged():
    x, mask = torch.randn(2, 3, 4, 4), torch.tensor([True, False])
    for layer, streams in ((InvertibleDownsampling(), (x, x, mask)), (InjectiveStem(3, 4), (x, mask))):
        outputs = layer(*streams)
        assert len(outputs) == 3
        assert outputs[2] is mask
        (coupling,) = layer.couplings()
        inputs, gradients, _ = coupling.reverse(outputs, (outputs[0], outputs[1], None))
        assert torch.equal(inputs[-1], mask)
        assert gradients[-1] is None
        assert all(torch.equal(a, b) for a, b in zip(inputs, streams, strict=True))
        assert torch.equal(gradients[0], x)


def test_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"shape \(1, 2, 4, 5\) cannot be cut into tiles of 2×2"):
        InvertibleDownsampling()(torch.zeros(1, 2, 4, 4), torch.zeros(1, 2, 4, 5))
    with pytest.raises(ValueError, match="factor is 0"):
        InvertibleDownsampling(0)
    with pytest.raises(ValueError, match="do not fit into two streams of 23 channels: give 24 channels or more"):
        InjectiveStem(3, 23, factor=4)
    with pytest.raises(ValueError, match=r"takes images of 3 channels, not shape \(1, 2, 4, 4\)"):
        InjectiveStem(3, 4)(torch.zeros(1, 2, 4, 4))
