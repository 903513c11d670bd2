"""The options of GPT, each compared with plain formulas; its presets; networks of all options in pipelines."""

import copy
import math
from contextlib import nullcontext

import pytest
import torch
from helpers.decoder_reference import Reference, rotated
from helpers.trainers import make
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from petra import Network, check_invertible, models, pareprop, plain_autograd
from petra.models.gpt import can_cache
from petra.models.rotary import rotate
from petra.pipeline import partition
from petra.runs.model_arguments import check_options
from petra.trainer import cross_entropy

SHAPE = {"width": 24, "heads": 4, "depth": 2, "vocab_size": 11, "seq_len": 7, "mlp_ratio": 2}
MODERN = {"norm": "rmsnorm", "positions": "rotary", "mlp": "swiglu", "qk_norm": True, "bias": False}
EVERYTHING = {**MODERN, "kv_heads": 2, "embedding_norm": True, "residual_scale": 0.5}
EACH = [
    {},
    {"norm": "rmsnorm"},
    {"positions": "rotary"},
    {"mlp": "swiglu"},
    {"kv_heads": 2},
    {"kv_heads": 1},
    {"qk_norm": True},
    {"bias": False},
    {"embedding_norm": True},
    {"residual_scale": 0.3},
    MODERN,
    EVERYTHING,
]
OPTIONS = st.fixed_dictionaries(
    {
        "norm": st.sampled_from(["layernorm", "rmsnorm"]),
        "positions": st.sampled_from(["learned", "rotary"]),
        "mlp": st.sampled_from(["gelu", "swiglu"]),
        "kv_heads": st.sampled_from([0, 1, 2, 4]),
        "qk_norm": st.booleans(),
        "bias": st.booleans(),
        "embedding_norm": st.booleans(),
        "residual_scale": st.sampled_from([1.0, 0.25]),
    }
)


def decoder(reversible=True, **options):
    """A small network in float64, with weights large enough for every part to matter."""
    torch.manual_seed(0)
    network = models.gpt(**{**SHAPE, "reversible": reversible, **options}).double()
    for p in network.parameters():
        p.data += 0.3 * torch.randn_like(p)
    return network


def texts(size=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(11, (size, 7), generator=generator), torch.randint(11, (size, 7), generator=generator)


def assert_is_the_reference(reversible, options):
    network = decoder(reversible, **options)
    reference = Reference(network.state_dict(), heads=4, reversible=reversible, depth=2, **options)
    tokens, _ = texts(2)
    found = network(tokens)
    for row, text in zip(found, tokens, strict=True):
        torch.testing.assert_close(row, reference(text), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("reversible", [True, False])
@pytest.mark.parametrize("options", EACH, ids=str)
def test_every_option_is_its_formula(reversible, options):
    assert_is_the_reference(reversible, options)


@settings(max_examples=15, deadline=None)
@given(OPTIONS, st.booleans())
def test_options_combine(options, reversible):
    assert_is_the_reference(reversible, options)


@given(st.integers(0, 9), st.integers(1, 5), st.sampled_from([2, 4, 8]))
def test_rotation_is_a_product_of_complex_numbers_from_any_position(start, tokens, d):
    x = torch.randn(2, start + tokens, d, dtype=torch.float64)
    for row, found in zip(x, rotate(x[:, start:], start), strict=True):
        torch.testing.assert_close(found, rotated(row)[start:], rtol=1e-12, atol=1e-12)


def test_rotated_products_depend_on_the_difference_of_positions_only():
    q, k = torch.randn(2, 1, 8, dtype=torch.float64)
    found = [(rotate(q, p + 3) * rotate(k, p)).sum() for p in (0, 5, 900)]
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found[0], found[2], rtol=1e-10, atol=1e-10)
    assert rotate(torch.ones(1, 3, 4, dtype=torch.bfloat16)).dtype == torch.float32  # angles are not rounded


@pytest.mark.parametrize("options", EACH, ids=str)
def test_twins_have_the_same_weights_under_the_same_names(options):
    a, b = (decoder(reversible, **options).state_dict() for reversible in (True, False))
    assert list(a) == list(b)
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("reversible", [True, False])
@pytest.mark.parametrize("options", [MODERN, EVERYTHING], ids=["modern", "everything"])
@given(place=st.integers(0, 6))
def test_later_tokens_do_not_influence_earlier_logits(reversible, options, place):
    network = decoder(reversible, **options).eval()
    text, _ = texts()
    other = text.clone()
    other[:, place] = (other[:, place] + 1) % 11
    a, b = network(text), network(other)
    torch.testing.assert_close(a[:, :place], b[:, :place], rtol=1e-12, atol=1e-12)
    assert ((a - b)[:, place:].abs().amax(-1) > 1e-6).all()


@pytest.mark.parametrize("options", EACH, ids=str)
def test_blocks_invert_and_reversible_gradients_are_exact(options):
    network = decoder(**options, dropout=0.1)
    tokens, targets = texts()
    streams = tuple(x.detach() for x in network.eval().stem(tokens))
    for block in network[1:-1]:
        outputs = block(*streams)
        for a, b in zip(block.inverse(*outputs), streams, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        assert check_invertible(block, *streams)
        streams = tuple(x.detach() for x in outputs)
    network.train()
    found = []
    for way in (plain_autograd, nullcontext, pareprop):
        torch.manual_seed(3)
        with way():
            loss = cross_entropy(network(tokens), targets)
        found.append((loss, *torch.autograd.grad(loss, list(network.parameters()))))
    for expected, *others in zip(*found, strict=True):
        for other in others:
            torch.testing.assert_close(other, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", ["petra", "reversible", "delayed"])
@pytest.mark.parametrize("reversible", [True, False])
def test_without_learning_every_stage_has_the_gradients_of_backprop(method, reversible):
    network = decoder(reversible, **EVERYTHING)
    options = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.0), "loss": cross_entropy, "accumulate": 2}
    found = []
    for how, stages in ((method, 4), ("backprop", 1)):
        trainer = make(copy.deepcopy(network), method=how, stages=stages, **options)
        for i in range(2):
            trainer.step(*texts(seed=i))
        trainer.drain()
        found.append([p.grad for p in trainer.network.parameters()])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("reversible", [True, False])
@pytest.mark.parametrize("options", [{"positions": "rotary"}, {"qk_norm": True}, EVERYTHING], ids=str)
def test_autocast(reversible, options):
    torch.manual_seed(0)
    network = models.gpt(**SHAPE, **options, reversible=reversible)
    tokens, targets = texts()
    with torch.no_grad():
        expected = network(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        streams = network[:-1](tokens)
        assert {x.dtype for x in (streams if reversible else (streams,))} == {torch.float32}
        logits = network(tokens)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, rtol=0.05, atol=0.01)
    cross_entropy(logits, targets).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())


def test_a_network_of_half_precision():
    network = models.gpt(**SHAPE, **EVERYTHING).bfloat16()
    assert network(texts()[0]).dtype == torch.bfloat16


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of PyTorch's compiler, about itself
@pytest.mark.parametrize("reversible", [True, False])
def test_compiled_layers_compute_the_same(reversible):
    network = decoder(reversible, **EVERYTHING, chunked_loss=True, depth=1)
    compiled = copy.deepcopy(network).compile_functions(backend="aot_eager", fullgraph=True)
    tokens, targets = texts()
    for net in (network, compiled):
        cross_entropy(net(tokens), targets).backward()
    for a, b in zip(network.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        torch.testing.assert_close(compiled.eval()(tokens), network.eval()(tokens), rtol=1e-10, atol=1e-10)


# --- sizes ---


@pytest.mark.parametrize(("width", "ratio"), [(448, 4), (512, 4), (768, 4), (1024, 4), (24, 2), (2, 0.5)])
def test_swiglu_has_about_as_many_parameters_as_gelu(width, ratio):
    with torch.device("meta"):
        gelu, swiglu = (
            models.gpt(width=width, heads=1, mlp_ratio=ratio, mlp=mlp, depth=1) for mlp in ("gelu", "swiglu")
        )
    a, b = (sum(p.numel() for p in network.block0.g.parameters()) for network in (gelu, swiglu))
    assert abs(a / b - 1) < (0.05 if width > 2 else 0.5)
    assert width < 200 or swiglu.block0.g.down.in_features % 64 == 0


@pytest.mark.parametrize("name", ["gpt-25m", "gpt-125m", "gpt-350m"])
def test_presets_are_modern(name):
    for prefix in ("rev-", ""):
        arguments = models.find(prefix + name).arguments
        assert {key: arguments[key] for key in MODERN} == MODERN
        with torch.device("meta"):
            network = models.create(prefix + name)
        assert not any("bias" in key or "positions" in key for key in network.state_dict())
        assert network.block0.f.kv_heads == network.block0.f.heads
        assert network.block0.f.channels == 64


def test_eight_stages_of_the_small_preset_are_balanced():
    with torch.device("meta"):
        network = models.create("rev-gpt-25m")
    products = [sum(m.weight.numel() for m in x.modules() if isinstance(m, nn.Linear)) for x in network]
    costs = [sum(products[i] for i in cut) for cut in partition(len(network), 8)]
    assert max(costs) < 1.6 * min(costs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"norm": "batchnorm"}, "norm is 'batchnorm': choose from layernorm, rmsnorm"),
        ({"positions": "rope"}, "positions is 'rope': choose from learned, rotary"),
        ({"mlp": "relu"}, "mlp is 'relu': choose from gelu, swiglu"),
        ({"kv_heads": 4}, "kv_heads is 4: give a number that divides heads 6, or 0 for all heads"),
        ({"kv_heads": -1}, "kv_heads is -1: give a number that divides heads 6"),
        ({"kv_heads": 1.5}, "kv_heads is 1.5: give a number that divides heads 6"),
        ({"kv_heads": 12}, "kv_heads is 12: give a number that divides heads 6"),
        ({"mlp_ratio": math.nan}, "mlp_ratio is nan, which is not a finite number: give about 4"),
        ({"mlp_ratio": math.inf}, "mlp_ratio is inf, which is not a finite number: give about 4"),
        ({"residual_scale": 0.0}, "residual_scale is 0.0: give a number above 0"),
        ({"width": 30, "positions": "rotary"}, "width 30 and heads 6 give 5 channels per head, but rotary positions"),
    ],
)
def test_bad_values(arguments, message):
    with pytest.raises(ValueError, match=message), torch.device("meta"):
        models.create("rev-gpt", **arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"norm": 3}, "norm is 3, but rev-gpt takes a string: give one like layernorm"),
        ({"qk_norm": 1}, "qk_norm is 1, but rev-gpt takes true or false: give one like False"),
        ({"kv_heads": True}, "kv_heads is True, but rev-gpt takes a whole number"),
        ({"residual_scale": "small"}, "residual_scale is 'small', but rev-gpt takes a number"),
    ],
)
def test_values_of_the_wrong_kind_on_the_command_line(options, message):
    with pytest.raises(ValueError, match=message):
        check_options("rev-gpt", options)


def test_only_networks_of_causal_attention_can_cache():
    assert can_cache(decoder())
    assert can_cache(decoder(reversible=False))
    assert not can_cache(models.create("rev-roberta-small", width=8, heads=2, depth=1, vocab_size=11))
    assert not can_cache(Network(decoder().stem, nn.Identity(), decoder().head))
    assert not can_cache(nn.Linear(1, 1))
