"""Codecs: values, bytes, and numbers that are not finite."""

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from petra.pipeline import codecs
from petra.pipeline.codecs import BLOCK, CODECS, find_codec, find_codecs
from petra.pipeline.message_format import MessageFormat

SHAPES = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 200)),
    st.tuples(st.integers(0, 3), st.integers(1, 40)),
    st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(1, 20)),
    st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(1, 5), st.integers(1, 5)),
)


def reference(x, codec):
    """The same rounding value by value, in float64 after the float32 division that both have in common."""
    flat, found = x.reshape(-1).tolist(), []
    for start in range(0, len(flat), BLOCK):
        block = flat[start : start + BLOCK]
        largest = max(abs(v) for v in block) if all(math.isfinite(v) for v in block) else math.nan
        scale = float(torch.tensor(largest) / codec.max_value)
        for v in block:
            ratio = float(torch.tensor(v) / (scale if scale > 0 else 1.0))
            if math.isnan(scale):
                found.append(math.nan)
            elif codec.name == "int8":
                found.append(round(ratio) * scale)  # half to even
            else:
                ratio = max(-codec.max_value, min(codec.max_value, ratio))
                exponent = max(math.frexp(ratio)[1] - 1, -6) if ratio else -6
                found.append(round(ratio / 2.0 ** (exponent - 3)) * 2.0 ** (exponent - 3) * scale)
    return torch.tensor(found, dtype=torch.float64).view(x.shape)


@pytest.mark.parametrize("name", ["int8", "fp8"])
@given(SHAPES, st.integers(0, 2**31), st.sampled_from([1e-30, 1e-3, 1.0, 1e30]), st.booleans())
@example((3, 64), 0, 1.0, False)
def test_values_are_those_of_a_slow_reference(name, shape, seed, size, last):
    codec = CODECS[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size
    x[x.abs() < 0.2 * size] = 0
    images = last and x.ndim == 4
    if images:
        x = x.contiguous(memory_format=torch.channels_last)
    (rounded,) = MessageFormat(codec, codec, images).streams.pack((x,))
    assert rounded.dtype == torch.float32
    assert rounded.shape == x.shape
    ordered, expected = (t.permute(0, 2, 3, 1) if images else t for t in (rounded, x))
    torch.testing.assert_close(ordered.double(), reference(expected, codec), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", CODECS)
@given(SHAPES, st.integers(0, 2**31), st.booleans())
def test_what_is_sent_arrives_as_in_one_process(name, shape, seed, last):
    codec, images = CODECS[name], last and len(shape) == 4
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(3, dtype=torch.bool)
    (x,) = MessageFormat(codec, codec, images).lay_out((x,))
    packed = codec.pack((x, None, mask))
    encoded = codec.encode((x, None, mask))
    for packed_part, part in zip(packed, encoded, strict=True):
        template = None if packed_part is None else packed_part.to("meta")
        described = codec.encoded_template(template)
        assert (part is None) == (described is None)
        if part is None:
            continue
        assert (part.shape, part.dtype) == (described.shape, described.dtype)
        arrived = codec.decode(part.clone(memory_format=torch.preserve_format), template, images)
        assert torch.equal(arrived, packed_part)
        assert arrived.stride() == packed_part.stride()
        assert arrived.dtype == packed_part.dtype


@pytest.mark.parametrize(("name", "most"), [("float32", 4.0), ("bf16", 2.0), ("int8", 1.07), ("fp8", 1.07)])
def test_bytes_per_value(name, most):
    x = torch.randn(4, 32, 64)
    (sent,) = CODECS[name].encode((x,))
    assert sent.numel() * sent.element_size() <= most * x.numel()


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_stay_so(name, bad):
    x = torch.randn(5, 64)
    x[2, 7] = bad
    (rounded,) = CODECS[name].pack((x,))
    assert not rounded[2, 7].isfinite()
    others = [0, 1, 3, 4]
    assert rounded[others].isfinite().all()


def test_extreme_values():
    for name in ("int8", "fp8"):
        tiny = torch.tensor([1e-45, 2.7e-43, -1.9e-43, 0.0])
        huge = torch.tensor([3.4e38, -3.4e38, 1.0, 0.0])
        for x in (tiny, huge, torch.zeros(70), torch.full((70,), -2.0)):
            (rounded,) = CODECS[name].pack((x,))
            assert rounded.isfinite().all()
            assert (rounded - x).abs().max() <= 0.07 * x.abs().max() + 4e-43


def test_int8_is_more_accurate_than_fp8():
    torch.manual_seed(0)
    x = torch.randn(64, 64)
    error = {name: float((codec.pack((x,))[0] - x).norm() / x.norm()) for name, codec in CODECS.items()}
    assert error["float32"] < error["bf16"] < error["int8"] < error["fp8"] < 0.03
    assert error["int8"] < 0.007


def test_rounding_twice_is_rounding_once():
    """So a stage that returns the streams it received returns them with the bits that its neighbour rounded to."""
    torch.manual_seed(0)
    for codec in CODECS.values():
        (once,) = codec.pack((torch.randn(30, 64),))
        once = codec.unpack((once,))[0]
        (twice,) = codec.unpack(codec.pack((once,)))
        torch.testing.assert_close(twice, once, rtol=1e-6, atol=0)


def test_names():
    assert [c.name for c in find_codecs("streams=bf16,gradients=int8")] == ["bf16", "int8"]
    assert [c.name for c in find_codecs("gradients=fp8")] == ["float32", "fp8"]
    assert [c.name for c in find_codecs(torch.bfloat16)] == ["bf16", "bf16"]
    for text in ("float32", "bf16", "int8", "streams=bf16,gradients=int8"):
        assert str(MessageFormat.of(text)) == text
    assert str(MessageFormat.of("gradients=int8, streams=int8")) == "int8"
    assert MessageFormat.of(torch.float16).dtype == torch.float16
    assert MessageFormat.of("streams=bf16").dtype is None


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ("int4", "there is no codec named 'int4': "),
        ("streams=int4", "there is no codec named 'int4': "),
        ("stream=int8", "comm_dtype is 'stream=int8': write it like streams=bf16,gradients=int8"),
        ("streams=int8,streams=bf16", "write it like streams=bf16,gradients=int8"),
        ("", "there is no codec named ''"),
        (torch.int8, r"comm_dtype is torch\.int8: give a name like 'int8'"),
        (torch.float8_e4m3fn, r"comm_dtype is torch\.float8_e4m3fn: give a name like 'int8'"),
        (3, "comm_dtype is 3: give a name like 'int8'"),
    ],
)
def test_what_is_no_codec(given_, message):
    with pytest.raises(ValueError, match=message):
        find_codecs(given_)


def test_a_pytorch_without_fp8(monkeypatch):
    monkeypatch.delitem(codecs.CODECS, "fp8")
    with pytest.raises(ValueError, match=r"this PyTorch has no torch\.float8_e4m3fn"):
        find_codec("fp8")
