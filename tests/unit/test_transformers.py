"""Rev-ViT, Rev-RoBERTa and the reversible GPT: compared with plain autograd and their plain versions; masks."""

import copy
from contextlib import nullcontext
from functools import cache

import pytest
import torch
from helpers.trainers import make
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

from petra import ReversibleBlock, models, pareprop, plain_autograd
from petra.models.attention import AttentionBranch, MLPBranch
from petra.models.transformer_parts import DropPath, PlainBlock
from petra.schedule import Kind

SIZES = {  # parameters, millions published, layers
    "vit-s": (22_050_664, 22.05, 14),
    "vit-b": (86_567_656, 86.57, 14),
    "vit-l": (304_326_632, 304.3, 26),
    "vit-h": (632_045_800, 632.0, 34),
    "roberta-base": (124_646_402, 125, 14),
    "roberta-large": (355_360_770, 355, 26),
    "roberta-small": (16_225_282, None, 6),
    "gpt": (10_942_464, None, 8),
    "gpt-25m": (24_407_488, None, 9),
    "gpt-125m": (135_287_040, None, 14),
    "gpt-350m": (370_724_864, None, 26),
}
TINY = {"width": 8, "heads": 2, "depth": 2}
PAD = 1


def tiny(kind, **arguments):
    """A small network of a kind: "vit", "roberta" or "gpt"."""
    if kind == "vit":
        extra = {"num_classes": 3, "in_channels": 2, "image_size": 4, "patch": 2}
    elif kind == "roberta":
        extra = {"num_classes": 3, "vocab_size": 11, "seq_len": 6}
    else:
        extra = {"vocab_size": 11, "seq_len": 6}
    torch.manual_seed(0)
    return getattr(models, kind)(**{**TINY, **extra, "mlp_ratio": 2, **arguments}).double()


def enlarge(network):
    """Weights large enough for every part to matter, biases and norms included."""
    generator = torch.Generator().manual_seed(5)
    for p in network.parameters():
        p.data += 0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return network


def inputs(kind, size=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if kind == "vit":
        return torch.randn(size, 2, 4, 4, generator=generator, dtype=torch.float64)
    tokens = torch.randint(2, 11, (size, 6), generator=generator)
    if kind == "roberta":
        for i in range(size):
            tokens[i, 6 - i % 4 :] = PAD
    return tokens


def mean_loss(outputs, targets):
    return cross_entropy(outputs.flatten(0, -2), targets.flatten())


def targets(kind, size=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(11, (size, 6), generator=generator) if kind == "gpt" else torch.arange(size) % 3


KINDS = ["vit", "roberta", "gpt"]


@pytest.mark.parametrize("prefix", ["", "rev-"])
@pytest.mark.parametrize(("name", "size"), SIZES.items())
def test_parameters_and_layers(prefix, name, size):
    with torch.device("meta"):
        network = models.create(prefix + name)
    parameters = sum(p.numel() for p in network.parameters())
    assert (parameters, len(network)) == (size[0], size[2])
    assert models.find(prefix + name).parameters == parameters
    assert size[1] is None or abs(parameters / 1e6 / size[1] - 1) < 0.01
    kinds = {type(layer) for layer in network[1:-1]}
    assert kinds == {ReversibleBlock if prefix else PlainBlock}


def test_all_names_are_tested():
    ours = {models.vit, models.roberta, models.gpt}
    names = {entry.name for entry in models.entries() if entry.build in ours}
    assert names == {prefix + name for name in SIZES for prefix in ("", "rev-")}


@pytest.mark.parametrize("name", SIZES)
def test_twins_have_the_same_weights_under_the_same_names(name):
    with torch.device("meta"):
        a, b = (models.create(prefix + name).state_dict() for prefix in ("", "rev-"))
    assert {k: v.shape for k, v in a.items()} == {k: v.shape for k, v in b.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_weights_of_the_plain_network_load_and_the_first_block_reads_the_same_input(kind):
    reversible, plain = enlarge(tiny(kind, depth=1)).eval(), tiny(kind, depth=1, reversible=False).eval()
    plain.load_state_dict(reversible.state_dict())
    x = inputs(kind)
    x1, x2, *mask = reversible.stem(x)
    y, *_ = plain.stem(x)
    assert torch.equal(x1, y)
    assert torch.equal(x2, y)
    y1 = y + plain.block0.f(y, *mask)
    y2 = y + plain.block0.g(y1)
    assert torch.equal(plain.block0(y, *mask)[0], y1 + plain.block0.g(y1))
    logits = reversible.head(y1, y2, *mask)
    assert torch.equal(reversible(x), logits)
    torch.testing.assert_close(logits, plain.head((y1 + y2) / 2, *mask), rtol=1e-12, atol=1e-12)


def gradients(network, kind, way, device):
    torch.manual_seed(3)
    with way():
        outputs = network(inputs(kind).to(device))
    loss = mean_loss(outputs, targets(kind).to(device))
    return loss, *torch.autograd.grad(loss, [p for p in network.parameters() if p.requires_grad])


@pytest.mark.parametrize("depth", range(1, 8))
@pytest.mark.parametrize("kind", KINDS)
def test_reversible_gradients_are_exact(kind, depth, device):
    network = enlarge(tiny(kind, depth=depth, dropout=0.2, drop_path=0.3)).to(device)
    for i, p in enumerate(network.parameters()):
        p.requires_grad_(i % 5 != 1)
    expected = gradients(network, kind, plain_autograd, device)
    for way in (nullcontext, pareprop):
        for a, b in zip(gradients(network, kind, way, device), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("reversible", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_without_learning_petra_gives_the_gradients_of_backprop(kind, reversible):
    network = enlarge(tiny(kind, depth=3, dropout=0.2, drop_path=0.3, reversible=reversible))
    options = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.0), "loss": mean_loss, "seed": 3}
    found, expected = {}, {}
    for method, stages, into in (("petra", 3, found), ("backprop", 1, expected)):
        trainer = make(copy.deepcopy(network), method=method, stages=stages, **options)

        def keep(tick, action, stage, trainer=trainer, into=into):
            if action.kind is Kind.UPDATE:
                names = {p: name for name, p in trainer.network.named_parameters()}
                into.update({(names[p], action.microbatch): p.grad.clone() for p in stage.parameters})

        trainer.executor.observers.append(keep)
        for i in range(4):
            trainer.step(inputs(kind, seed=i), targets(kind, seed=i))
        trainer.drain()
    assert len(found) == 4 * len(network.state_dict())
    assert found.keys() == expected.keys()
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, expected[key], rtol=1e-9, atol=1e-9)


@cache
def readers(reversible):
    """The same classifier three times: unchanged, with another embedding of padding, and without a mask."""
    network = enlarge(tiny("roberta", reversible=reversible, seq_len=12)).eval()
    other = copy.deepcopy(network)
    other.stem.tokens.weight.data[PAD] += 1
    without = tiny("roberta", reversible=reversible, seq_len=12, pad=None).eval()
    without.load_state_dict(network.state_dict())
    return network, other, without


@pytest.mark.parametrize("reversible", [True, False])
@given(seq_len=st.integers(1, 5), between=st.integers(0, 3), after=st.integers(0, 3))
def test_padding_does_not_influence_the_logits(reversible, seq_len, between, after):
    """Padding anywhere but at the first position, which the head reads."""
    network, other, without = readers(reversible)
    text = inputs("gpt", size=2)[:, :seq_len]
    between, after = (torch.full((2, n), PAD) for n in (between, after))
    padded = torch.cat([text[:, :1], between, text[:, 1:], after], 1)
    expected = without(text)
    assert len(without.stem(text)) == (2 if reversible else 1)
    for reader in (network, other):
        torch.testing.assert_close(reader(padded), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("reversible", [True, False])
@given(place=st.integers(0, 5))
def test_later_tokens_do_not_influence_earlier_logits(reversible, place):
    network = enlarge(tiny("gpt", reversible=reversible)).eval()
    text = inputs("gpt")
    other = text.clone()
    other[:, place] = (other[:, place] + 1) % 11
    a, b = network(text), network(other)
    assert a.shape == (3, 6, 11)
    torch.testing.assert_close(a[:, :place], b[:, :place], rtol=1e-12, atol=1e-12)
    assert ((a - b)[:, place:].abs().amax(-1) > 1e-6).all()


def test_attention_is_what_the_equation_says():
    torch.manual_seed(0)
    attention = enlarge(AttentionBranch(6, 3).double())
    x = torch.randn(2, 4, 6, dtype=torch.float64)
    mask = torch.tensor([[True, True, True, False], [True, False, True, True]])[:, None, None]
    q, k, v = attention.qkv(attention.norm(x)).view(2, 4, 3, 3, 2).permute(2, 0, 3, 1, 4)
    weights = (q @ k.mT / 2**0.5).masked_fill(~mask, -torch.inf).softmax(-1)
    expected = attention.out((weights @ v).permute(0, 2, 1, 3).reshape(2, 4, 6))
    torch.testing.assert_close(attention(x, mask), expected, rtol=1e-10, atol=1e-10)


def test_mlp_is_what_the_equation_says():
    torch.manual_seed(0)
    mlp = enlarge(MLPBranch(6, 9).double())
    x = torch.randn(2, 4, 6, dtype=torch.float64)
    y = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    y = (y * mlp.norm.weight + mlp.norm.bias) @ mlp.up.weight.mT + mlp.up.bias
    y = y * (1 + torch.erf(y / 2**0.5)) / 2
    torch.testing.assert_close(mlp(x), y @ mlp.down.weight.mT + mlp.down.bias, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rates", [{"dropout": 0.5}, {"drop_path": 0.5}])
def test_dropout_is_for_training_only(rates):
    torch.manual_seed(0)
    x = torch.randn(20, 3, 8)
    for function in (AttentionBranch(8, 2, **rates), MLPBranch(8, 8, **rates)):
        y = function(x)
        assert (y == 0).any()
        if "drop_path" in rates:
            assert ((y == 0).all((1, 2)) | (y != 0).all((1, 2))).all()
        function.eval()
        assert (function(x) != 0).all()
        assert torch.equal(function(x), function(x))


def test_attention_drops_weights_too():
    attention = AttentionBranch(8, 2, dropout=0.5)
    attention.dropout = nn.Dropout(0.5).eval()
    x = torch.randn(2, 5, 8)
    assert not torch.equal(attention(x), attention(x))


@given(rate=st.floats(0.05, 0.95), ndim=st.integers(1, 4))
def test_drop_path_keeps_or_drops_whole_samples(rate, ndim):
    torch.manual_seed(0)
    x = torch.ones(2000, *range(1, ndim), dtype=torch.float64)
    y = DropPath(rate)(x)
    kept = y.flatten(1)[:, 0] != 0 if ndim > 1 else y != 0
    torch.testing.assert_close(y[kept], x[kept] / (1 - rate))
    assert (y[~kept] == 0).all()
    assert abs(kept.double().mean() - (1 - rate)) < 0.06
    torch.manual_seed(0)
    assert torch.equal(DropPath(rate)(x), y)
    assert DropPath(rate).eval()(x) is x


def test_drop_path_grows_with_depth_and_acts_in_both_functions():
    network = tiny("vit", depth=4, drop_path=0.3)
    for i in range(4):
        block = network[1 + i]
        assert block.f.drop_path.rate == block.g.drop_path.rate == pytest.approx(0.1 * i)


@pytest.mark.parametrize("kind", ["vit", "roberta"])
def test_classifiers_read_the_first_token_of_both_streams(kind):
    network = enlarge(tiny(kind)).eval()
    a, b, c, d = torch.randn(4, 3, 5, 8, dtype=torch.float64)
    mask = network.stem(inputs(kind))[2:]
    logits = network.head(a, b, *mask)
    assert not torch.equal(network.head(c, b, *mask), logits)
    assert not torch.equal(network.head(a, d, *mask), logits)
    c[:, 0], d[:, 0] = a[:, 0], b[:, 0]
    assert torch.equal(network.head(c, d, *mask), logits)


def test_initial_weights():
    network = models.gpt(width=64, depth=3, heads=2)
    for name, p in network.named_parameters():
        if "norm" in name:
            assert (p == (1 if name.endswith("weight") else 0)).all()
        elif name.endswith("bias"):
            assert (p == 0).all()
        else:
            deviation = 0.02 / (6**0.5 if name.endswith(("out.weight", "down.weight")) else 1)
            assert p.abs().max() <= 2 * deviation
            assert p.detach().std().item() == pytest.approx(0.88 * deviation, rel=0.05)
    image = models.vit(**TINY, image_size=32, patch=4).stem
    assert (image.token == 0).all()
    assert 0.016 < image.position.detach().std() < 0.019


@pytest.mark.parametrize("reversible", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_autocast(kind, reversible):
    network = tiny(kind, reversible=reversible, dropout=0.1).float()
    x = inputs(kind)
    x = x.float() if kind == "vit" else x
    with torch.autocast("cpu", torch.bfloat16):
        streams = network[:-1](x)
        floats = [y.dtype for y in streams if y.is_floating_point()] if isinstance(streams, tuple) else [streams.dtype]
        assert set(floats) == {torch.float32}
        loss = mean_loss(network(x).float(), targets(kind))
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())


@pytest.mark.parametrize("causal", [True, False])
def test_functions_compile_without_graph_breaks(causal):
    function = nn.ModuleList(
        [AttentionBranch(8, 2, dropout=0.1, drop_path=0.1, causal=causal), MLPBranch(8, 16, drop_path=0.1)]
    )
    x = torch.randn(2, 3, 8)
    mask = () if causal else (torch.ones(2, 1, 1, 3, dtype=torch.bool),)
    for f in function:
        compiled = torch.compile(f, backend="eager", fullgraph=True)
        torch.manual_seed(0)
        expected = f(x, *mask)
        torch.manual_seed(0)
        assert torch.equal(compiled(x, *mask), expected)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("rev-vit-s", {"depth": 0}, "depth is 0"),
        ("rev-vit-s", {"num_classes": 0}, "num_classes is 0"),
        ("rev-vit-s", {"image_size": (32, 16)}, r"image_size is \(32, 16\): give one integer, 1 or more"),
        ("rev-vit-s", {"heads": 7}, "width 384 is not a multiple of heads 7"),
        ("rev-vit-s", {"image_size": 32, "patch": 5}, "image_size 32 is not a multiple of patch 5"),
        ("rev-vit-s", {"mlp_ratio": 0}, "mlp_ratio is 0"),
        ("rev-swin-t", {"mlp_ratio": float("nan")}, "mlp_ratio is nan, which is not a finite number: give about 4"),
        ("rev-vit-s", {"drop_path": 1.0}, r"drop_path is 1\.0"),
        ("rev-gpt", {"dropout": -0.1}, r"dropout is -0\.1"),
        ("rev-gpt", {"vocab_size": 0}, "vocab_size is 0"),
        ("rev-roberta-small", {"pad": 50265}, "pad is 50265"),
        ("rev-roberta-small", {"seq_len": 0}, "seq_len is 0"),
    ],
)
def test_bad_arguments(name, arguments, message):
    with pytest.raises(ValueError, match=message), torch.device("meta"):
        models.create(name, **arguments)


def test_inputs_of_the_wrong_size():
    with pytest.raises(ValueError, match="images are 4×6, but the network was built for 4×4"):
        tiny("vit")(torch.zeros(1, 2, 4, 6, dtype=torch.float64))
    for kind in ("roberta", "gpt"):
        with pytest.raises(ValueError, match="texts are 7 tokens long, but the network has only 6 positions"):
            tiny(kind)(torch.full((1, 7), 2))
