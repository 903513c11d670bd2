"""Fused batch norm with an addition and ReLU, compared with float64, and the cases that fall back to PyTorch.

The kernels run on a GPU, or on a CPU in Triton's interpreter: TRITON_INTERPRET=1, with Triton and a NumPy below 2.4.
"""

import copy
import os
from importlib.util import find_spec
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import batch_norm

from petra import models
from petra.kernels import batch_norm_relu as norm_module
from petra.kernels import fused_norm
from petra.kernels.batch_norm_relu import batch_norm_relu, tiling
from petra.kernels.conv_norm import ConvNorm, conv_norm_relu
from petra.kernels.fused_norm import norm_relu
from petra.reversible.module_state import frozen_statistics

LAST = torch.channels_last
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_kernels = pytest.mark.skipif(
    find_spec("triton") is None or not (torch.cuda.is_available() or INTERPRETED),
    reason="needs Triton and a GPU, or Triton and TRITON_INTERPRET=1",
)
pytestmark = [  # Triton's interpreter warns about its use of NumPy and about values that are not stored
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered"),
]
SMALL = {
    "TILE": 128,
    "MIN_BLOCK_C": 8,
    "MAX_BLOCK_C": 16,
    "MAX_PARTS": 4,
    "PROGRAMS": 6,
}  # a few programs of a few tiles each
WIDE = {"TILE": 4096, "MIN_BLOCK_C": 1024, "MAX_PARTS": 4, "PROGRAMS": 8}
REAL = {"TILE": norm_module.TILE}


def rounding(dtype):
    """The relative error of one rounding; the interpreter truncates to bfloat16."""
    truncates = INTERPRETED and dtype is torch.bfloat16
    return max(torch.finfo(dtype).eps * (1 if truncates else 0.5), 1e-5)


def images(n, c, h, w, dtype=torch.float32, mean=0.0, seed=0):
    torch.manual_seed(seed)
    x = torch.randn(n, c, h, w) * (0.5 + torch.rand(c, 1, 1)) + torch.randn(c, 1, 1) + mean
    return x.to(DEVICE, dtype).contiguous(memory_format=LAST).requires_grad_()


def norm_of(c):
    norm = nn.BatchNorm2d(c, momentum=0.3, eps=1e-3).to(DEVICE)
    for tensor in (norm.weight, norm.bias, norm.running_mean):
        nn.init.normal_(tensor)
    return norm


def fused(norm, x, relu=True, offset=None, added=None):
    buffers = norm.running_mean, norm.running_var, norm.num_batches_tracked
    return batch_norm_relu(x, norm.weight, norm.bias, buffers, norm.momentum, norm.eps, relu, offset, added)


def check(x, norm, relu, dy, offset=None, loose=1e-5, added=None):
    """Compare output, gradients and running statistics with float64.

    Near ReLU's kink, rounding decides the gradient: the expected one uses the signs of the actual outputs.
    """
    twin = copy.deepcopy(norm).double()
    exact = x.detach().double().requires_grad_()
    expected = twin(exact if offset is None else exact + offset.double()[:, None, None])
    expected = expected if added is None else added.detach().double() + expected
    y = fused(norm, x, relu, offset, added)
    assert y.dtype == x.dtype
    assert y.stride() == x.stride()
    limit = expected.relu() if relu else expected
    torch.testing.assert_close(y.double(), limit, rtol=rounding(x.dtype), atol=loose)
    torch.testing.assert_close(norm.state_dict(), twin.state_dict(), rtol=1e-5, atol=1e-5, check_dtype=False)
    y.backward(dy)
    expected.backward(dy.double() * (y > 0) if relu else dy.double())
    steepness = twin.weight.abs() / (exact.var((0, 2, 3), correction=0) + norm.eps).sqrt()
    size = (steepness.max() * dy.abs().max()).item()  # the size of terms that may cancel
    assert added is None or added.grad.equal(dy * (y > 0))
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=rounding(x.dtype), atol=loose * size)
    for name in ("weight", "bias"):
        found, wanted = getattr(norm, name).grad, getattr(twin, name).grad
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=loose * (1 + wanted.abs().max().item()))


@needs_kernels
@settings(max_examples=12)
@given(
    st.integers(1, 4),
    st.sampled_from([2, 3, 16, 20]),
    st.integers(1, 5),
    st.integers(2, 5),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.sampled_from(["norm", "relu", "add"]),
    st.booleans(),
    st.booleans(),
)
def test_same_as_float64(n, c, h, w, dtype, then, shifted, last):
    x, norm = images(n, c, h, w, dtype), norm_of(c)
    dy = torch.randn(n, c, h, w, device=DEVICE).to(dtype)
    with patch.multiple(norm_module, **SMALL):
        check(
            x,
            norm,
            then != "norm",
            dy.contiguous(memory_format=LAST) if last else dy,
            torch.randn(c, device=DEVICE) if shifted else None,
            added=images(n, c, h, w, dtype, seed=1) if then == "add" else None,
        )


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "tiles"),
    [((9, 16, 8, 8), SMALL), ((6, 100, 9, 7), REAL), ((12, 32, 9, 9), REAL), ((5, 2048, 2, 2), WIDE)],
    ids=lambda x: str(x) if isinstance(x, tuple) else "",
)
@pytest.mark.parametrize("then", ["relu", "add"])
def test_larger_images(shape, tiles, dtype, then):
    added = images(*shape, dtype, seed=1) if then == "add" else None
    with patch.multiple(norm_module, **tiles):
        check(images(*shape, dtype), norm_of(shape[1]), True, torch.randn(shape, device=DEVICE).to(dtype), added=added)


@needs_kernels
@pytest.mark.parametrize("tiles", [SMALL, REAL], ids=["parts", "one part"])
def test_a_large_mean_costs_no_precision(tiles):
    """Its rounding to float32 is at most 6e-5; a difference of squares would have an error of 0.1 or more."""
    with patch.multiple(norm_module, **tiles):
        x, norm = images(4, 4, 9, 9, mean=1e3), norm_of(4)
        check(x, norm, False, torch.randn_like(x), loose=2e-4)
    assert (norm.running_var - 0.7 * 1 - 0.3 * x.detach().double().var((0, 2, 3))).abs().max() < 1e-6


@needs_kernels
def test_the_same_bits_again():
    def run():
        x, norm = images(6, 16, 8, 8), norm_of(16)
        y = fused(norm, x)
        y.backward(torch.sin(torch.arange(y.numel(), device=DEVICE)).view_as(y))
        return y, x.grad, norm.weight.grad, norm.bias.grad, norm.running_mean, norm.running_var

    with patch.multiple(norm_module, **SMALL):
        assert all(a.equal(b) for a, b in zip(run(), run(), strict=True))


@needs_kernels
def test_outputs_that_underflow_have_no_gradient():
    """As with a ReLU of rounded outputs."""
    x, norm = images(2, 4, 3, 3, torch.float16), norm_of(4)
    nn.init.constant_(norm.weight, 1e-9)
    nn.init.zeros_(norm.bias)
    y = fused(norm, x)
    y.backward(torch.ones_like(y))
    assert (y == 0).all()
    assert (norm.bias.grad == 0).all()
    assert (x.grad == 0).all()


@needs_kernels
def test_nan_is_passed_on():
    x, norm = images(2, 4, 3, 3), norm_of(4)
    with torch.no_grad():
        x[0, 1, 2, 2] = float("nan")
        y = fused(norm, x)
    assert y[:, 1].isnan().all()
    assert not y[:, [0, 2, 3]].isnan().any()


@needs_kernels
def test_tensors_saved_for_backward():
    x, norm, saved = images(2, 4, 3, 3), norm_of(4), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = fused(norm, x)
        assert sorted(t.numel() for t in saved) == [4, 4, 8, x.numel()]
        assert y.data_ptr() not in {t.data_ptr() for t in saved}
        with torch.no_grad():
            assert fused(norm, x).grad_fn is None
        assert len(saved) == 4


@needs_kernels
def test_tensors_saved_for_backward_with_an_addition():
    """The output is saved, which is the next layer's input, but not `added`, even if only that requires a gradient."""
    x, added, norm, saved = images(2, 4, 3, 3), images(2, 4, 3, 3, seed=1), norm_of(4), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        y = fused(norm, x, added=added)
    assert {x.data_ptr(), y.data_ptr()} < set(saved)
    assert added.data_ptr() not in saved
    norm.requires_grad_(False)
    fused(norm, x.detach(), added=added).backward(torch.ones_like(y))
    assert added.grad.equal((y > 0).float())


def trained(network, steps=2):
    """Train for some steps and return the last outputs and the state dict."""
    for seed in range(steps):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(6, 3, 8, 8, generator=generator).to(DEVICE).contiguous(memory_format=LAST)
        network.zero_grad()
        outputs = network(x)
        outputs.square().sum().backward()
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.sub_(parameter.grad, alpha=1e-3)
    return outputs.detach(), network.state_dict()


@needs_kernels
@pytest.mark.parametrize("name", ["revnet18", "resnet18", "revnet50", "revnet38", "irevnet18"])
def test_networks(name, monkeypatch):
    """Reversible ones evaluate their functions twice, the second time without running statistics."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(fused_norm, "_on_gpu", lambda x: True)
    calls = []
    monkeypatch.setattr(fused_norm, "batch_norm_relu", lambda *a: calls.append(a) or batch_norm_relu(*a))
    torch.manual_seed(0)
    network = models.create(name, width=4, depths=(1, 2)).to(DEVICE, memory_format=LAST)
    for module in network.modules():
        if isinstance(module, nn.Conv2d) and module.bias is not None:
            nn.init.normal_(module.bias)
    reference = copy.deepcopy(network)
    found = trained(network)
    assert len(calls) >= 12
    assert sum(call[-1] is not None for call in calls) == (6 if name.startswith("resnet") else 0)
    monkeypatch.setattr(fused_norm, "ENABLED", False)
    expected = trained(reference)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert all(int(v) == 2 for k, v in network.state_dict().items() if k.endswith("num_batches_tracked"))


@given(st.integers(2, 2**18), st.integers(2, 4096))
def test_every_row_and_channel_is_in_one_program(m, c):
    t = tiling(m, c)
    assert (t.column_blocks - 1) * t.block_c < c <= t.column_blocks * t.block_c
    for programs, rows in ((t.parts, t.part_rows), (t.row_blocks, t.rows)):
        assert rows % t.block_m == 0
        assert (programs - 1) * rows < m <= programs * rows
        assert programs * t.column_blocks <= max(norm_module.PROGRAMS, t.column_blocks)
    assert t.parts <= norm_module.MAX_PARTS
    assert t.block_m & (t.block_m - 1) == t.block_c & (t.block_c - 1) == 0


# The choice between kernels and PyTorch, with a stand-in that only records its calls.


@pytest.fixture
def called(monkeypatch):
    """The calls of the kernels, on a simulated GPU."""
    calls = []

    def stand_in(x, weight, bias, statistics, momentum, eps, relu, offset, added):
        calls.append((statistics, relu, offset))
        y = batch_norm(x, None, None, weight, bias, True, momentum, eps)
        y = y if added is None else y + added
        return y.relu() if relu else y

    monkeypatch.setattr(fused_norm, "_on_gpu", lambda x: True)
    monkeypatch.setattr(fused_norm, "_has_triton", lambda: True)
    monkeypatch.setattr(fused_norm, "batch_norm_relu", stand_in)
    return calls


def here(n=2, c=4, h=3, w=3, dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(n, c, h, w).to(dtype).contiguous(memory_format=LAST)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("relu", [None, nn.ReLU(), nn.ReLU(inplace=True)], ids=["none", "relu", "inplace"])
def test_kernels_are_used(dtype, relu, called):
    norm = nn.BatchNorm2d(4)
    norm_relu(norm, here(dtype=dtype), relu)
    ((statistics, with_relu, offset),) = called
    assert all(a is b for a, b in zip(statistics, norm.buffers(), strict=True))
    assert with_relu is (relu is not None)
    assert offset is None


def test_frozen_statistics_are_left_alone(called):
    norms = nn.BatchNorm2d(4), untracked(), nn.BatchNorm2d(4)
    norms[2].track_running_stats = False
    with frozen_statistics(norms[:1]):
        for norm in norms:
            norm_relu(norm, here())
    assert [statistics for statistics, *_ in called] == [(None, None, None)] * 3


class Derived(nn.BatchNorm2d):
    pass


def compiling(patch):
    patch.setattr(torch.compiler, "is_compiling", lambda: True)


def turned_off(patch):
    patch.setattr(fused_norm, "ENABLED", False)


def without_triton(patch):
    patch.setattr(fused_norm, "_has_triton", lambda: False)


def without_gpu(patch):
    patch.setattr(fused_norm, "_on_gpu", lambda x: x.is_cuda)


def untracked():
    return nn.BatchNorm2d(4, track_running_stats=False)


OTHERS = {
    "evaluation": (lambda: nn.BatchNorm2d(4).eval(), here),
    "cumulative average": (lambda: nn.BatchNorm2d(4, momentum=None), here),
    "no weight": (lambda: nn.BatchNorm2d(4, affine=False), here),
    "another class": (lambda: Derived(4), here),
    "float64": (lambda: nn.BatchNorm2d(4).double(), lambda: here(dtype=torch.float64)),
    "weight in bfloat16": (lambda: untracked().bfloat16(), lambda: here(dtype=torch.bfloat16)),
    "channels first": (lambda: nn.BatchNorm2d(4), lambda: here().contiguous()),
    "half of the channels": (lambda: nn.BatchNorm2d(4), lambda: here(c=8)[:, :4]),
    "one channel": (lambda: nn.BatchNorm2d(1), lambda: here(c=1)),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_cases_use_pytorch(case, called):
    make, data = OTHERS[case]
    norm, x = make(), data()
    twin = copy.deepcopy(norm)
    y = norm_relu(norm, x, nn.ReLU(inplace=True))
    assert called == []
    assert y.equal(torch.relu(twin(x)))
    assert all(a.equal(b) for a, b in zip(norm.buffers(), twin.buffers(), strict=True))


ADDED = {
    "another dtype": lambda: here().bfloat16(),
    "a value for each channel": lambda: torch.randn(4, 1, 1),
    "channels first": lambda: here().contiguous(),
}


@pytest.mark.parametrize("case", ADDED)
def test_other_additions_use_pytorch(case, called):
    norm, x, added = nn.BatchNorm2d(4), here(), ADDED[case]()
    twin = copy.deepcopy(norm)
    assert norm_relu(norm, x, nn.ReLU(), added=added).equal(torch.relu(added + twin(x)))
    assert norm_relu(norm, x, added=here()).equal(here() + twin(x))
    assert called == []


@pytest.mark.parametrize("change", [compiling, turned_off, without_triton, without_gpu])
def test_kernels_that_are_not_available_are_not_used(change, called, monkeypatch):
    change(monkeypatch)
    norm, x = nn.BatchNorm2d(4), here()
    assert norm_relu(norm, x, nn.ReLU()).equal(torch.relu(copy.deepcopy(norm)(x)))
    assert called == []


def test_errors_are_those_of_pytorch(called):
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        norm_relu(nn.BatchNorm2d(4), here(1, 4, 1, 1))
    with pytest.raises(RuntimeError, match="running_mean should contain"):
        norm_relu(nn.BatchNorm2d(5), here())
    with pytest.raises(RuntimeError, match="datatype"):
        norm_relu(nn.BatchNorm2d(4), here(dtype=torch.float64))
    assert called == []


@pytest.mark.parametrize("which", ["norm", "relu", "all"])
def test_hooks_are_called(which, called):
    norm, relu, seen = nn.BatchNorm2d(4), nn.ReLU(), []
    hook = lambda module, *_: seen.append(module)  # noqa: E731
    if which == "all":
        handle = nn.modules.module.register_module_forward_hook(hook)
    else:
        handle = {"norm": norm, "relu": relu}[which].register_forward_pre_hook(hook)
    norm_relu(norm, here(), relu)
    handle.remove()
    assert seen == {"norm": [norm], "relu": [relu], "all": [norm, relu]}[which]
    assert called == []
    norm_relu(norm, here(), relu)
    assert len(called) == 1


def test_the_bias_of_a_convolution_reaches_the_running_mean(called):
    conv, norm, relu = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU()
    conv_norm_relu(conv, norm, here(), relu)
    assert called[0][1:] == (True, conv.bias)
    assert (norm.running_mean == 0).all()  # the kernels update it


@pytest.mark.parametrize(
    ("layout", "calls"),
    [("cnr", [True]), ("cn", [False]), ("nrc", [True]), ("nrcnrc", [True, True]), ("rcnr", [True]), ("ncr", [False])],
)
def test_consecutive_layers_are_fused(layout, calls, called):
    make = {"c": lambda: nn.Conv2d(4, 4, 1), "n": lambda: nn.BatchNorm2d(4), "r": nn.ReLU}
    layers = [make[letter]() for letter in layout]
    twin = copy.deepcopy(nn.Sequential(*layers))
    found = ConvNorm(*layers)(here())
    assert [relu for _, relu, _ in called] == calls
    torch.testing.assert_close(found, twin(here()))


@pytest.mark.parametrize(("layout", "calls"), [("cnrcn", [True, True]), ("cnrc", [True]), ("nrn", [True, False])])
def test_an_addition_is_fused_with_the_last_norm(layout, calls, called):
    make = {"c": lambda: nn.Conv2d(4, 4, 1), "n": lambda: nn.BatchNorm2d(4), "r": nn.ReLU}
    layers, seen = ConvNorm(*(make[letter]() for letter in layout)), []
    twin = copy.deepcopy(nn.Sequential(*layers))
    found = layers.add_relu(here(), here(), nn.ReLU())
    assert [relu for _, relu, _ in called] == calls
    expected = twin(here())
    torch.testing.assert_close(found, torch.relu(here() + expected))
    layers.register_forward_hook(lambda module, inputs, output: seen.append(output))
    layers.add_relu(here(), here(), nn.ReLU())
    torch.testing.assert_close(seen, [expected])  # not the sum


@pytest.mark.slow
def test_blocks_can_be_compiled():
    block = models.create("resnet18", width=4, depths=(1,))[1]
    twin = copy.deepcopy(block)
    torch.compiler.reset()  # other tests compile layers of this class, and the limit is eight versions
    compiled = torch.compile(block, backend="eager", fullgraph=True)
    assert compiled(here()).equal(torch.relu(here() + nn.Sequential(*twin.f)(here())))


def test_names_of_weights():
    assert list(models.create("revnet38", width=4, depths=(1,)).state_dict())[6:14] == [
        "group1_unit0.f.conv1.weight",
        "group1_unit0.f.bn2.weight",
        "group1_unit0.f.bn2.bias",
        "group1_unit0.f.bn2.running_mean",
        "group1_unit0.f.bn2.running_var",
        "group1_unit0.f.bn2.num_batches_tracked",
        "group1_unit0.f.conv2.weight",
        "group1_unit0.g.bn1.weight",
    ]


def test_functions_can_be_compiled():
    f = models.create("revnet38", width=4, depths=(1,))[1].f
    twin = copy.deepcopy(f)
    torch.compiler.reset()  # other tests compile layers of this class, and the limit is eight versions
    compiled = torch.compile(f, backend="eager", fullgraph=True)
    assert compiled(here(c=2)).equal(twin(here(c=2)))
