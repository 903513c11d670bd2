"""AdamW with moments in bfloat16: bit for bit a plain version, unbiased, resumable, in any layout and batch."""

import copy
import io

import pytest
import torch
from helpers.plain_adamw_bf16 import PlainAdamWBF16, random_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from petra.optim import AdamWBF16, adamw_bf16
from petra.optim.stochastic_rounding import block_bits, position_bits, round_to_bfloat16

SHAPES = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=4)
MISSING = st.sets(st.tuples(st.integers(0, 7), st.integers(0, 3)), max_size=6)
MOMENTS = ("exp_avg", "exp_avg_sq")


def exact_gradients(shapes, steps, missing=()):
    """With betas of 1/2 and 3/4, float32 holds the moments of these exactly before they are rounded."""
    generator = torch.Generator().manual_seed(0)
    for t in range(steps):
        found = [torch.randint(-8, 9, shape, generator=generator) / 4 for shape in shapes]
        yield [None if (t, i) in missing else x for i, x in enumerate(found)]


def set_gradients(parameters, found):
    for parameter, gradient in zip(parameters, found, strict=True):
        parameter.grad = None if gradient is None else gradient.to(parameter.dtype, copy=True)


def parameters_of(shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def train(optimizer, parameters, data):
    for found in data:
        set_gradients(parameters, found)
        optimizer.step()


@settings(max_examples=80, deadline=None)
@given(
    shapes=SHAPES,
    steps=st.integers(1, 8),
    missing=MISSING,
    sizes=st.sampled_from([(1, 1), (3, 1), (16, 4), (12, 12), (2**21, 5), (2**21, 2**16)]),
    seed=st.sampled_from([0, 7, 2**32 - 1]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_moments_are_those_of_the_plain_one_bit_for_bit(shapes, steps, missing, sizes, seed, dtype):
    """For any number of values that are updated at a time, and any number of positions with bits of their own."""
    segment, block = sizes
    parameters = parameters_of(shapes, dtype)
    options = {"lr": 0.03, "betas": (0.5, 0.75), "eps": 1e-3}
    plain = [PlainAdamWBF16(p.flatten().tolist(), **options, decay=0.1, seed=seed, block=block) for p in parameters]
    optimizer = AdamWBF16(parameters, **options, weight_decay=0.1, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(adamw_bf16.SEGMENTS, "cpu", segment)
        patch.setattr(adamw_bf16, "BLOCK", block)
        train(optimizer, parameters, exact_gradients(shapes, steps, missing))
    for found in exact_gradients(shapes, steps, missing):
        for one, gradient in zip(plain, found, strict=True):
            if gradient is not None:
                one.step(gradient.flatten().tolist())
    for parameter, one in zip(parameters, plain, strict=True):
        torch.testing.assert_close(
            parameter.detach().flatten().double(), torch.tensor(one.weights, dtype=torch.float64), rtol=1e-5, atol=1e-5
        )
        state = optimizer.state[parameter]
        if one.updates:
            assert [state[key].dtype for key in MOMENTS] == 2 * [torch.bfloat16]
            assert state["exp_avg"].flatten().tolist() == one.first
            assert state["exp_avg_sq"].flatten().tolist() == one.second
            assert (state["step"].dtype, state["step"].item()) == (torch.float32, one.updates)


def test_random_bits_of_large_parameters():
    keys, positions = block_bits(torch.tensor([0.0, 5.0, 2.0**24]), 3, 11), position_bits(2**16, torch.device("cpu"))
    assert keys.dtype == positions.dtype == torch.int32
    for owner, update in enumerate((0, 5, 2**24)):
        for block in range(3):
            for position in (0, 1, 77, 2**15, 2**16 - 1):
                found = (keys[:, owner, block] ^ positions[position]).tolist()
                assert tuple(found) == random_bits(update, block * 2**16 + position, 11)


@pytest.mark.parametrize("value", [1.0, 1.001, -3.14159, 1e-20, -7e30, 1e-39, 65535.99])
def test_rounding_keeps_the_mean(value):
    """Over all random bits, exactly, and never beyond the neighbours."""
    x = torch.tensor(value)
    found = round_to_bfloat16(x.repeat(2**16), torch.arange(2**16, dtype=torch.int32))
    assert found.equal(found.bfloat16().float())
    assert found.double().mean() == x.double()
    spacing = found.max() - found.min()
    assert spacing == 0 or (found.min() < x < found.max() and spacing <= 2**-7 * max(abs(x), 2**-126))


def test_random_bits_are_uniform_and_independent():
    steps = torch.arange(2**16).float()
    keys = block_bits(steps, 2, 0)
    positions = position_bits(2**16, torch.device("cpu"))
    samples = {
        "first moment": keys[0, :, 0],
        "second moment": keys[1, :, 0],
        "next block": keys[0, :, 1],
        "next seed": block_bits(steps, 1, 1)[0, :, 0],
        "positions": positions,
        "next update": keys[0, :, 0].roll(1),
        "next position": positions.roll(1),
    }
    for name, values in samples.items():
        assert values.min() >= 0
        assert values.max() < 2**16
        counts = torch.bincount(values >> 8, minlength=256)  # 256 each
        assert ((counts - 256) ** 2 / 256).sum() < 256 + 6 * (2 * 256) ** 0.5, name
    centred = torch.stack(list(samples.values())).double() / 2**16 - 0.5
    correlations = centred @ centred.T / 2**16 * 12 - torch.eye(len(samples))
    assert correlations.abs().max() < 0.03


def test_numbers_without_neighbours_stay():
    generator = torch.Generator().manual_seed(0)
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 1.5, -(2.0**-133)])
    bits = torch.randint(2**16, (1000, 1), generator=generator, dtype=torch.int32)
    found = round_to_bfloat16(special.repeat(1000, 1), bits)
    assert found.view(torch.int32).equal(special.repeat(1000, 1).view(torch.int32))
    nans = torch.tensor([0x7FFFFFFF, 0x7FC00000, -0x400000], dtype=torch.int32).view(
        torch.float32
    )  # of a GPU, of a CPU
    assert round_to_bfloat16(nans.repeat(1000, 1), bits).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_second_moment_falls_where_rounding_to_the_nearest_keeps_it(dtype):
    parameter = nn.Parameter(torch.zeros(2000, dtype=dtype))
    optimizer = AdamWBF16([parameter], 0.0, betas=(0.9, 0.999))
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    second = optimizer.state[parameter]["exp_avg_sq"]
    second.fill_(1.0)
    assert (second * 0.999).equal(second)
    for gradient, expected in ((0.0, 0.999**400), (1.5, 2.25 - 1.25 * 0.999**400)):
        second.fill_(1.0)
        parameter.grad = torch.full_like(parameter, gradient)
        for _ in range(400):
            optimizer.step()
        assert second.float().mean().item() == pytest.approx(expected, rel=5e-3)


def test_many_updates_are_about_those_of_float32():
    """With gradients of many sizes, the mean difference of weights is small against their way."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(3000, generator=generator)
    scale = 10 ** torch.linspace(-6, 2, 3000)
    found = []
    for make in (AdamWBF16, torch.optim.AdamW):
        parameter = nn.Parameter(start.clone())
        optimizer = make([parameter], 1e-2, betas=(0.9, 0.999), weight_decay=0.1)
        generator.manual_seed(1)
        for _ in range(300):
            parameter.grad = (torch.randn(3000, generator=generator) + 0.5) * scale
            optimizer.step()
        found.append(parameter.detach())
    difference, way = found[0] - found[1], (found[1] - start).abs().mean()
    assert difference.abs().mean() < 5e-3 * way
    assert difference.mean().abs() < 3e-4 * way


def test_memory_is_half_of_that_of_float32():
    parameters = parameters_of([(64, 32), (32,), ()])
    optimizer = AdamWBF16(parameters)
    train(optimizer, parameters, exact_gradients([p.shape for p in parameters], 1))
    held = [x for state in optimizer.state.values() for x in state.values()]
    assert sum(x.untyped_storage().nbytes() for x in held) == sum(4 * p.numel() + 4 for p in parameters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_state_is_loaded_without_another_rounding(dtype):
    shapes = [(4, 3), (5,)]
    parameters = parameters_of(shapes, dtype)
    optimizer, data = AdamWBF16(parameters, 0.01, seed=3), list(exact_gradients(shapes, 9))
    train(optimizer, parameters, data[:4])
    file = io.BytesIO()
    torch.save([[p.detach() for p in parameters], optimizer.state_dict()], file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    copies = [nn.Parameter(w) for w in weights]
    resumed = AdamWBF16(copies)
    resumed.load_state_dict(state)
    for a, b in zip(parameters, copies, strict=True):
        assert {key: x.dtype for key, x in resumed.state[b].items()} == {
            **dict.fromkeys(MOMENTS, torch.bfloat16),
            "step": torch.float32,
        }
        assert all(x.equal(resumed.state[b][key]) for key, x in optimizer.state[a].items())
    assert resumed.state[copies[0]]["exp_avg"].data_ptr() != state["state"][0]["exp_avg"].data_ptr()
    train(optimizer, parameters, data[4:])
    train(resumed, copies, data[4:])
    assert all(a.equal(b) for a, b in zip(parameters, copies, strict=True))


def test_a_state_without_updates_of_some_parameters_can_be_loaded():
    parameters = parameters_of([(2, 2), (3,)])
    optimizer = AdamWBF16(parameters)
    train(optimizer, parameters, [[torch.ones(2, 2), None]])
    resumed = AdamWBF16(parameters_of([(2, 2), (3,)]))
    resumed.load_state_dict(optimizer.state_dict())
    assert [len(resumed.state.get(p, {})) for p in resumed.param_groups[0]["params"]] == [3, 0]


def test_the_state_of_a_float32_optimizer_is_rounded():
    (parameter,) = parameters = parameters_of([(4, 3)])
    theirs = torch.optim.AdamW(parameters, 0.01)
    train(theirs, parameters, exact_gradients([(4, 3)], 3))
    ours = AdamWBF16(parameters, 0.01)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for key in MOMENTS:
        assert ours.state[parameter][key].equal(theirs.state[parameter][key].bfloat16())


@pytest.mark.parametrize("segment", [6, 2**21])
def test_parameters_together_are_those_apart(segment, monkeypatch):
    monkeypatch.setitem(adamw_bf16.SEGMENTS, "cpu", segment)
    monkeypatch.setattr(adamw_bf16, "BLOCK", 6)
    shapes, found = [(4, 4), (4,), (2, 3), (4, 4), (7,)], []
    for together in (True, False):
        parameters = parameters_of(shapes)
        for members in [range(5)] if together else [[i] for i in range(5)]:
            own = [parameters[i] for i in members]
            train(AdamWBF16(own, 0.01), own, ([g[i] for i in members] for g in exact_gradients(shapes, 6)))
        found.append(parameters)
    assert all(a.equal(b) for a, b in zip(*found, strict=True))


def test_any_layout_of_weights_and_gradients():
    shape = (4, 3, 2, 2)
    images = {"memory_format": torch.channels_last}

    def result(layout, of_gradient):
        parameter = nn.Parameter(layout(parameters_of([shape])[0].detach()))
        strides = parameter.stride()
        optimizer = AdamWBF16([parameter], 0.01)
        for (found,) in exact_gradients([shape], 4):
            parameter.grad = of_gradient(found)
            optimizer.step()
        assert parameter.stride() == strides
        state = optimizer.state[parameter]
        return parameter.detach().contiguous(), *(state[key].contiguous() for key in MOMENTS)

    def same(a, b):
        return all(x.equal(y) for x, y in zip(a, b, strict=True))

    def sparse(x):
        return torch.stack([x, x.new_full(x.shape, torch.nan)], -1)[..., 0]

    plain = result(torch.Tensor.contiguous, torch.Tensor.contiguous)
    assert same(plain, result(torch.Tensor.contiguous, lambda x: x.contiguous(**images)))
    assert same(plain, result(sparse, torch.Tensor.contiguous))
    last = result(lambda x: x.contiguous(**images), torch.Tensor.contiguous)
    assert same(last, result(lambda x: x.contiguous(**images), lambda x: x.contiguous(**images)))
    torch.testing.assert_close(plain[0], last[0], rtol=0, atol=1e-3)  # bits are by the order of memory


def test_weights_that_change_their_layout_keep_their_moments():
    parameter = parameters_of([(4, 3, 2, 2)])[0]
    other = nn.Parameter(parameter.detach().clone())
    optimizers = [AdamWBF16([parameter], 0.0), AdamWBF16([other], 0.0)]
    for number, (found,) in enumerate(exact_gradients([(4, 3, 2, 2)], 2)):
        parameter.grad, other.grad = found, found.clone()
        if number:
            other.data = other.data.contiguous(memory_format=torch.channels_last)
            other.grad = found.contiguous(memory_format=torch.channels_last)
        for optimizer in optimizers:
            optimizer.step()
    for key in MOMENTS:  # rounded with other bits
        a, b = optimizers[0].state[parameter][key], optimizers[1].state[other][key]
        torch.testing.assert_close(a, b, rtol=2**-6, atol=0)


def test_weights_in_bfloat16_are_updated_in_float32():
    start = torch.tensor([1.0, 100.0, -3.0]).bfloat16()
    gradient = torch.tensor([1.0, -2.0, 0.5]).bfloat16()
    parameter = nn.Parameter(start.clone())
    parameter.grad = gradient
    AdamWBF16([parameter], 0.1, weight_decay=0.1).step()
    wide = nn.Parameter(start.float())
    wide.grad = gradient.float()
    torch.optim.AdamW([wide], 0.1, weight_decay=0.1).step()
    assert parameter.detach().equal(wide.detach().bfloat16())


def test_groups_have_their_own_settings():
    shapes = [(3, 4), (6,)]
    parameters = parameters_of(shapes)
    groups = [
        {"params": parameters[:1], "lr": 0.1, "weight_decay": 0.3, "seed": 5},
        {"params": parameters[1:], "betas": (0.5, 0.75)},
    ]
    train(AdamWBF16(groups, 0.02, weight_decay=0.0), parameters, exact_gradients(shapes, 5))
    apart = parameters_of(shapes)
    train(AdamWBF16(apart[:1], 0.1, weight_decay=0.3, seed=5), apart[:1], ([g[0]] for g in exact_gradients(shapes, 5)))
    rest = ([g[1]] for g in exact_gradients(shapes, 5))
    train(AdamWBF16(apart[1:], 0.02, (0.5, 0.75), weight_decay=0.0), apart[1:], rest)
    assert all(a.equal(b) for a, b in zip(parameters, apart, strict=True))


@pytest.mark.parametrize("seed", [-1, 1.5, "1"])
def test_seeds_are_whole_numbers(seed):
    with pytest.raises(ValueError, match=f"seed is {seed!r}: give a whole number, 0 or more"):
        AdamWBF16([nn.Parameter(torch.zeros(2))], seed=seed)


def test_directions_are_computed_in_the_dtype_of_the_weights():
    parameters = parameters_of([(4, 3), (5,), (2,)])
    optimizer = AdamWBF16(parameters, 0.01, betas=(0.9, 0.99), eps=1e-3)
    train(optimizer, parameters, exact_gradients([(4, 3), (5,), (2,)], 3, {(t, 2) for t in range(3)}))
    found = optimizer.directions(optimizer.param_groups[0])
    assert found.keys() == set(parameters[:2])
    for parameter, direction in found.items():
        first, second = (optimizer.state[parameter][key].double() for key in MOMENTS)
        expected = first / (1 - 0.9**3) / ((second / (1 - 0.99**3)).sqrt() + 1e-3)
        assert direction.dtype == torch.float32
        torch.testing.assert_close(direction.double(), expected, rtol=1e-5, atol=1e-6)
