"""Storages of layers: every mixture has the gradients of plain autograd."""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from helpers.networks import batches, mixed_network, reversible_network
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy

import petra
from petra.memory.step_cost import cpu_peak
from petra.reversible import randomness
from petra.reversible import storage as storages
from petra.reversible.backprop import plain_autograd
from petra.reversible.storage import STORAGES, budget_of, expand_storages, shorten_storages, storage_of

EAGER = ["store", "selective", "recompute", "offload"]
REVERSIBLE = [False, True, True, False, True, False]
"""The reversible layers of `mixed_network`."""


def step(network, data, **kwargs):
    """Return gradients and running statistics after the gradients of all batches."""
    for seed, (x, y) in enumerate(data):
        torch.manual_seed(seed)  # of dropout
        cross_entropy(network(x, **kwargs), y).backward()
    return [p.grad for p in network.parameters()], dict(network.named_buffers())


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def bytes_saved(network, x):
    """Return the bytes that autograd keeps for the backward pass, each tensor once."""
    held = {}

    def pack(tensor):
        held[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        kept.append(tensor)
        return tensor

    kept = []
    with saved_tensors_hooks(pack, lambda x: x):
        network(x)
    weights = {p.untyped_storage()._cdata for p in (*network.parameters(), *network.buffers(), x)}
    return sum(size for key, size in held.items() if key not in weights)


@given(st.data())
@settings(max_examples=20)
def test_every_mixture_has_the_gradients_of_plain_autograd(data):
    """With batch normalisation, whose statistics change once, and dropout, which draws the same numbers again."""
    names = [data.draw(st.sampled_from([*EAGER, "reconstruct"] if r else EAGER)) for r in REVERSIBLE]
    torch.manual_seed(0)
    network = mixed_network().double()
    plain, images = copy.deepcopy(network), list(batches(2, dtype=torch.float64))
    with plain_autograd():
        expected = step(plain, images)
    assert_close(step(network.use_storage(*names), images), expected)
    assert [storage_of(layer) for layer in network] == names


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, shift):
        return torch.tanh(self.linear(x) + shift)


class Join(nn.Module):
    def forward(self, x, y):
        return x * y


def shifted_network(layers=3):
    torch.manual_seed(0)
    return petra.Network(*(petra.ReversibleBlock(Shifted(), Shifted()) for _ in range(layers)), Join()).double()


@pytest.mark.parametrize("name", [*EAGER, "store:0.5"])
def test_keyword_arguments_get_their_gradients(name, monkeypatch):
    on_aot(monkeypatch)
    network = shifted_network()
    inputs = [torch.randn(5, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    found = []
    for names in (["reconstruct"] * 3, [name] * 3, ["reconstruct", name, "reconstruct"]):
        network.use_storage(*names, "store")
        network.zero_grad()
        loss = network(inputs[0], inputs[1], shift=inputs[2]).sum()
        found.append(torch.autograd.grad(loss, [*inputs, *network.parameters()]))
    assert_close(found[1], found[0])
    assert_close(found[2], found[0])


def residual():
    return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.GELU(), nn.GELU(), nn.Conv2d(4, 4, 3, padding=1))


class Twice(nn.Module):
    def forward(self, x):
        return x * 1, x * 2


def test_storages_need_less_and_less():
    network = petra.Network(Twice(), *(petra.ReversibleBlock(residual(), residual()) for _ in range(4)), Join())
    x, found = torch.randn(2, 4, 32, 32), []
    for name in ("store", "selective", "recompute", "reconstruct"):
        network.use_storage(name)
        found.append(cpu_peak(lambda: network(x).sum().backward()))
        network.zero_grad()
    assert found == sorted(set(found), reverse=True)


def on_aot(monkeypatch):
    """Let the compiler choose what is computed again, but generate no code."""
    compiler = partial(torch.compile, backend="aot_eager_decomp_partition")
    monkeypatch.setattr(storages.torch, "compile", compiler)
    storages._compiled.cache_clear()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of the compiler
def test_budgets_of_compiled_layers(monkeypatch):
    """Gradients of plain autograd with every budget, in one network as well; a small budget keeps less."""
    on_aot(monkeypatch)
    torch.manual_seed(0)
    blocks = (petra.ReversibleBlock(residual(), residual()) for _ in range(2))
    network = petra.Network(Twice(), *blocks, Join(), nn.Flatten(), nn.Linear(256, 4)).double()
    x, y = torch.randn(2, 4, 8, 8, dtype=torch.float64), torch.tensor([0, 3])
    with plain_autograd():
        expected = step(copy.deepcopy(network), [(x, y)])
    kept = {}
    for names in (["store:0"] * 2, ["store:1"] * 2, ["store:1", "store:0.3"], ["store:0.3", "reconstruct"]):
        network.zero_grad()
        network.use_storage("store", *names, "store", "store", "store:1")
        assert_close(step(network, [(x, y)]), expected)
        kept[tuple(names)] = bytes_saved(network, x)
    assert kept["store:0", "store:0"] < kept["store:1", "store:0.3"] < kept["store:1", "store:1"]


def test_storages_are_one_for_each_layer_or_one_for_all_reversible_layers():
    network = mixed_network().use_storage("selective")
    assert [storage_of(layer) for layer in network] == [None, "selective", "selective", None, "selective", None]
    with pytest.raises(ValueError, match="2 storages for 6 layers: give one for each"):
        network.use_storage("store", "store")
    with pytest.raises(ValueError, match=r"layer 0 \(Split\) is not reversible"):
        network.use_storage(*["reconstruct"] * 6)
    assert [storage_of(layer) for layer in network][1] == "selective"  # nothing has changed


@pytest.mark.parametrize("name", ["keep", "store:", "store:2", "store:-1", "store:nan", "recompute:0.5", "store:B"])
def test_unknown_storages(name):
    with pytest.raises(ValueError, match=f"storage is '{name}': give one of reconstruct, store, store:B, selective"):
        mixed_network().use_storage(name)
    with pytest.raises(ValueError, match="storage is"):
        expand_storages([f"3*{name}"])


@given(st.lists(st.sampled_from([*EAGER, "reconstruct", "store:0.25"]), max_size=9))
def test_equal_neighbours_are_written_together(names):
    short = shorten_storages(names)
    assert expand_storages(short) == names
    assert len(short) <= max(len(names), 0)
    assert expand_storages([part.replace("*", " * ") for part in short]) == names


@pytest.mark.parametrize("text", ["*store", "0*store", "x*store", "1.5*store"])
def test_numbers_of_layers_are_positive(text):
    with pytest.raises(ValueError, match=r"should begin with a number of layers, as in '12\*store'"):
        expand_storages([text])


def test_budgets():
    assert [budget_of(name) for name in ("store", "store:0", "store:0.5", "store:1")] == [None, 0.0, 0.5, 1.0]
    assert all(budget_of(name) is None for name in STORAGES if name != "store:B")


@pytest.mark.parametrize("name", ["reconstruct", "recompute", "selective"])
@pytest.mark.parametrize("rate", [0.0, 0.2])
def test_what_is_evaluated_again_in_a_capture_must_not_draw_random_numbers(name, rate, monkeypatch):
    torch.manual_seed(0)
    network, ((x, y),) = reversible_network(3, dropout=rate).double(), batches(1, dtype=torch.float64)
    network.use_storage("store", *[name] * 3, "store")
    with monkeypatch.context() as patch:
        for module in (randomness, storages):
            patch.setattr(module, "capturing", lambda device: True)
        with pytest.raises(RuntimeError, match="Make a few steps before the capture"):
            network(x)
    expected, _ = step(network, [(x, y)])
    network.zero_grad()
    for module in (randomness, storages):
        monkeypatch.setattr(module, "capturing", lambda device: True)
    if rate > 0:
        with pytest.raises(RuntimeError, match="draw random numbers"):
            network(x)
    else:
        assert_close(step(network, [(x, y)])[0], expected)


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 2), st.booleans()), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
)
def test_offloaded_tensors_keep_padding_and_repeated_values(dimensions, random):
    full = torch.randn([size + padding for size, padding, _ in dimensions])
    x = full[tuple(slice(size) for size, _, _ in dimensions)]
    for dimension, (size, _, repeated) in enumerate(dimensions):
        if repeated:
            x = x.narrow(dimension, 0, 1).expand(*x.shape[:dimension], size, *x.shape[dimension + 1 :])
    order = random.sample(range(x.ndim), x.ndim)
    x = x.permute(order)
    values = storages._distinct(x)
    assert values.numel() == len(set(addresses(x)))
    found = storages._with_layout(torch.empty_like(values).copy_(values), x.shape, x.stride())
    assert found.equal(x)
    if full.numel() <= 2 * values.numel():  # less padding than values
        assert [s for s, n in zip(found.stride(), x.shape, strict=True) if n > 1] == [
            s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1
        ]


def addresses(x):
    """Return the place of every element."""
    return [sum(i * s for i, s in zip(index, x.stride(), strict=True)) for index in np.ndindex(*x.shape)]


def test_offloaded_tensors_whose_elements_share_memory_become_plain():
    x = torch.arange(9.0).as_strided((3, 2), (2, 4))
    assert storages._with_layout(x.clone(), x.shape, x.stride()).equal(x)
