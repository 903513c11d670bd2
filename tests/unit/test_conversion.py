"""Conversion to reversible networks, with stand-ins for other libraries; see also test_conversion_libraries.py."""

import copy
import pickle

import pytest
import torch
from helpers.library_blocks import (
    Block,
    Encoder,
    Gains,
    GPT2Block,
    Own,
    Plain,
    Swin,
    SwinTransformerBlock,
    SwinTransformerV2Block,
    split,
)
from torch import nn

import petra
from petra import make_reversible, plain_autograd


def randomised(network):
    """Move all parameters away from their initial values, so that none is one or zero."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return network


def torch_encoder(depth, norm_first):
    layer = nn.TransformerEncoderLayer(4, 2, 8, 0.2, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, depth, enable_nested_tensor=not norm_first)


PADDING = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
MASK = torch.zeros(6, 6, dtype=torch.float64).masked_fill(torch.ones(6, 6).triu(1) > 0, -torch.inf)

NETWORKS = {
    "torch pre-norm": (lambda depth: torch_encoder(depth, True), {"src_key_padding_mask": PADDING}),
    "torch post-norm": (lambda depth: torch_encoder(depth, False), {"src_key_padding_mask": PADDING}),
    "ViT": (lambda depth: Plain(Block() for _ in range(depth)), {"mask": ~PADDING[:, None]}),
    "Swin": (Swin, {}),
    "Swin v2": (lambda depth: Swin(depth, SwinTransformerV2Block), {}),
    "GPT-2": (lambda depth: Encoder(GPT2Block() for _ in range(depth)), {"attention_mask": MASK}),
    "own": (Gains, {}),
}


def build(name, depth):
    make, named = NETWORKS[name]
    x = torch.randn(2, 2, 3, 4) if name.startswith("Swin") else torch.randn(2, 6, 4)
    return randomised(make(depth)).double(), x.double().requires_grad_(), named


def gradients(network, x, named):
    torch.manual_seed(3)
    y = network(x, **named)
    loss = (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum()
    return torch.autograd.grad(loss, [x, *network.parameters()], allow_unused=True)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_equal_plain_autograd(name, depth, training):
    network, x, named = build(name, depth)
    network = make_reversible(network, split).train(training)
    reversible = gradients(network, x, named)
    with plain_autograd():
        expected = gradients(network, x, named)
    for a, b in zip(reversible, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NETWORKS)
def test_weights_are_shared_and_keep_their_names(name):
    network, x, named = build(name, 3)
    network.eval()
    before = network(x, **named)
    before_types = {path: type(m) for path, m in network.named_modules()}
    converted = make_reversible(network, split)
    assert [n for n, _ in converted.named_parameters()] == [n for n, _ in network.named_parameters()]
    assert all(a is b for a, b in zip(converted.parameters(), network.parameters(), strict=True))
    assert all(a is b for a, b in zip(converted.buffers(), network.buffers(), strict=True))
    converted.load_state_dict(network.state_dict())
    network.load_state_dict(converted.state_dict())
    # the given network is not changed
    assert {path: type(m) for path, m in network.named_modules()} == before_types
    assert not set(network.modules()) & set(converted.modules())
    assert torch.equal(network(x, **named), before)
    assert not converted.training
    converted.train()
    assert not network.training


@pytest.mark.parametrize("name", ["torch pre-norm", "ViT", "GPT-2", "own"])
def test_a_single_block_computes_the_same(name):
    network, x, named = build(name, 1)
    network.eval()
    converted = make_reversible(network, split)
    torch.testing.assert_close(converted(x, **named), network(x, **named), rtol=1e-12, atol=1e-12)


def test_two_blocks_compute_the_documented_function():
    network, x, _ = build("ViT", 2)
    converted = make_reversible(network.eval())
    (f1, g1), (f2, g2) = ((residual_f(b), residual_g(b)) for b in network.blocks)
    a = x + f1(x)
    b = x + g1(a)
    c = a + f2(b)
    torch.testing.assert_close(converted(x), x + f1(x) + g1(a) + f2(b) + g2(c), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(converted(x), network(x), rtol=1e-3)


def residual_f(block):
    return lambda x: block.ls1(block.attn(block.norm1(x)))


def residual_g(block):
    return lambda x: block.ls2(block.mlp(block.norm2(x)))


def test_post_norm_blocks_compute_the_documented_function():
    network, x, _ = build("torch post-norm", 2)
    converted = make_reversible(network.eval())
    one, two = network.layers
    x1 = x + one._sa_block(x, None, None)
    x2 = x + one._ff_block(one.norm1(x1))
    x1 = x1 + two._sa_block(one.norm2(x2), None, None)
    x2 = x2 + two._ff_block(two.norm1(x1))
    torch.testing.assert_close(converted(x), two.norm2(x1 + x2 - x), rtol=1e-12, atol=1e-12)


def test_deep_post_norm_networks_in_float32():
    """The streams keep their magnitude, so inputs can be reconstructed."""
    network = make_reversible(randomised(torch_encoder(24, False))).eval()
    x = torch.randn(2, 6, 4, requires_grad=True)
    reversible = gradients(network, x, {})
    with plain_autograd():
        expected = gradients(network, x, {})
    for a, b in zip(reversible, expected, strict=True):
        assert (a - b).norm() <= 1e-4 * b.norm() + 1e-6


def test_masks_reach_every_block_every_time():
    converted = make_reversible(Plain(Block() for _ in range(3)))
    attentions = [m for m in converted.modules() if type(m).__name__ == "Attention"]
    x = torch.randn(2, 6, 4)
    for mask in (~PADDING[:, None], PADDING[:, None], None):
        for attention in attentions:
            attention.masks.clear()
        converted(x, mask).sum().backward()
        for attention in attentions:
            assert len(attention.masks) == 2  # forward and backward
            for seen in attention.masks:
                assert seen is mask if mask is None else torch.equal(seen, mask)


def test_a_mask_that_an_attention_does_not_take_is_not_dropped():
    network = Plain([Block()])
    network.blocks[0].attn = nn.Linear(4, 4)
    converted = make_reversible(_call_without_mask(network))
    converted.blocks[0](torch.randn(1, 2, 4))
    with pytest.raises(ValueError, match="attn_mask was given to a block, but its Linear does not take it"):
        converted(torch.randn(1, 2, 4), torch.ones(2, 2))


def _call_without_mask(network):
    """A version of the block that ignores its mask."""

    class Block(type(network.blocks[0])):
        def forward(self, x, attn_mask=None):
            x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
            return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))

    Block.__module__ = "timm.models.stand_in"
    network.blocks[0].__class__ = Block
    return network


def saved_tensors(network, x):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        network(x)
    return len(saved)


@pytest.mark.parametrize("name", ["torch pre-norm", "torch post-norm", "ViT", "own"])
def test_memory_does_not_grow_with_the_number_of_blocks(name):
    few, many = (make_reversible(build(name, depth)[0], split) for depth in (2, 9))
    x = build(name, 1)[1]
    assert saved_tensors(few, x) == saved_tensors(many, x) < 8
    with plain_autograd():
        assert saved_tensors(many, x) > 3 * saved_tensors(few, x) > 30


def test_containers_with_blocks_and_other_modules():
    torch.manual_seed(0)
    blocks = [Own() for _ in range(5)]
    network = nn.Sequential(nn.Linear(3, 4), *blocks[:2], nn.ReLU(), *blocks[2:], nn.Sequential(Own(), nn.Linear(4, 2)))
    converted = make_reversible(network, split)
    assert list(converted.state_dict()) == list(network.state_dict())
    report = petra.conversion_report(converted)
    assert [(s.path, s.names) for s in report.segments] == [("", ("1", "2")), ("", ("4", "5", "6")), ("7", ("0",))]
    assert len(converted) == 5
    assert [type(member).__name__ for member in converted] == [
        "Linear",
        "ConvertedSegment",
        "ReLU",
        "ConvertedSegment",
        "ReversibleBlocks",
    ]
    x = torch.randn(2, 3)
    converted.eval()
    expected = network[0](x)
    for lo, hi in ((1, 3), (4, 7)):
        expected = make_reversible(network[lo:hi], split).eval()(expected)
        expected = network[3](expected) if lo == 1 else expected
    torch.testing.assert_close(converted(x), network[7](expected))


def test_a_container_that_is_used_twice_is_converted_once():
    network = nn.Module()
    network.a = network.b = nn.ModuleList([Own()])
    converted = make_reversible(network, split)
    assert converted.a is converted.b
    assert len(converted.a.segments) == 1


def test_a_block_that_occurs_several_times_gets_the_sum_of_gradients():
    block = randomised(Own()).double()
    converted = make_reversible(nn.Sequential(block, block, block), split).eval()
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    reversible = gradients(converted, x, {})
    with plain_autograd():
        expected = gradients(converted, x, {})
    torch.testing.assert_close(reversible, expected, rtol=1e-9, atol=1e-9)


def test_nothing_to_convert():
    with pytest.raises(ValueError, match=r"Sequential has no blocks .* It has Linear, ReLU, Sequential.*split=lambda"):
        make_reversible(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    with pytest.raises(ValueError, match=r"in an nn.Sequential or nn.ModuleList"):
        make_reversible(Block())  # alone, not in a container


def test_a_class_of_the_same_name_is_not_enough():
    """Submodules, library and computation must be those of the known block."""

    Empty = type("Block", (Plain,), {"__module__": "timm.models.later"})
    with pytest.raises(ValueError, match="no blocks"):
        make_reversible(nn.Sequential(Empty([Own()])))
    Other = type("SwinTransformerBlock", (SwinTransformerV2Block,), {"__module__": "timm.models.later"})
    with pytest.raises(ValueError, match="computes something else with them"):
        make_reversible(nn.Sequential(randomised(Other())))
    Elsewhere = type("SwinTransformerBlock", (SwinTransformerBlock,), {"__module__": "somewhere"})
    with pytest.raises(ValueError, match="no blocks"):
        make_reversible(nn.Sequential(Elsewhere()))


def test_blocks_that_cannot_be_evaluated():
    block = Block()
    block.attn = nn.Linear(5, 4)
    with pytest.raises(ValueError, match=r"Block fails on an input of shape \(2, 3, 4\), torch.float32 on cpu"):
        make_reversible(nn.Sequential(block))


def test_conversion_does_not_change_modes_and_random_state():
    network = nn.Sequential(Block(), Block()).eval()
    network[0].mlp.train()
    state = torch.get_rng_state()
    converted = make_reversible(network)
    assert torch.equal(state, torch.get_rng_state())
    assert [m.training for m in converted.modules()] == [m.training for m in network.modules()]


def test_unsupported_arguments():
    converted = make_reversible(Encoder(GPT2Block() for _ in range(2)))
    x, cache = torch.randn(2, 6, 4), []
    with pytest.raises(ValueError, match=r"past_key_values was given .* with gradients enabled.*use_cache=False"):
        converted(x, cache=cache)
    assert cache == []
    with torch.no_grad():
        converted(x, cache=cache)
    assert len(cache) == 2  # each block appended once
    with pytest.raises(ValueError, match=r"given to a reversible GPT2Block, but .* no attention maps"):
        converted(x, output_attentions=True)
    with pytest.raises(ValueError, match=r"encoder_hidden_states was given .* cross-attention"):
        converted(x, encoder_hidden_states=x)
    converted(x, output_attentions=False, encoder_hidden_states=None)


def test_cross_attention_is_not_converted():
    block = GPT2Block()
    block.crossattention = nn.Linear(4, 4)
    with pytest.raises(ValueError, match="no blocks"):
        make_reversible(Encoder([block]))


def test_split_must_use_submodules_of_the_block():
    with pytest.raises(ValueError, match="Linear, which split made from Own, has parameters or buffers that the block"):
        make_reversible(nn.Sequential(Own()), lambda block: (nn.Linear(4, 4), block.two))
    with pytest.raises(
        ValueError, match=r"split returns \(Linear, None\) for Own: return two .* only f for a block x \+ f"
    ):
        make_reversible(nn.Sequential(Own()), lambda block: (block.two, None))
    with pytest.raises(ValueError, match=r"for Own: return two nn.Modules"):
        make_reversible(nn.Sequential(Own()), lambda block: (torch.tanh, torch.tanh))


class Single(nn.Module):
    """A block with one residual function, as in most convolutional networks."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.Tanh())

    def forward(self, x):
        return x + self.body(x)


@pytest.mark.parametrize("coupling", ["additive", "bdia", "midpoint"])
def test_split_may_return_one_residual_function(coupling):
    def body(block):
        return split(block) if isinstance(block, Own) else block.body if isinstance(block, Single) else None

    torch.manual_seed(0)
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    single = randomised(nn.Sequential(Single())).double().eval()
    converted = make_reversible(single, body, coupling=coupling)
    torch.testing.assert_close(converted(x), single(x), rtol=1e-12, atol=1e-12)
    f1, f2 = randomised(nn.ModuleList([Single(), Single()])).double()
    if coupling == "additive":  # consecutive blocks take turns as f and g
        three = make_reversible(nn.Sequential(f1, f2, f1), body)
        assert [type(layer).__name__ for layer in three.segments[0].layers] == ["ReversibleResidual"] * 3
        first = x + f1.body(x)
        expected = first + f2.body(first) + f1.body(x + f2.body(first))
        torch.testing.assert_close(three(x), expected, rtol=1e-12, atol=1e-12)
    mixed = make_reversible(randomised(nn.Sequential(f1, Own(), f2)).double().eval(), body, coupling=coupling)
    mixed.train(coupling == "bdia")
    reversible = gradients(mixed, x, {})
    with plain_autograd():
        expected = gradients(mixed, x, {})
    torch.testing.assert_close(reversible, expected, rtol=1e-9, atol=1e-9)


def test_modules_that_split_adds_follow_the_mode_of_the_block():
    converted = make_reversible(nn.Sequential(Own(), Own()), split)
    x = torch.randn(3, 4)
    assert not torch.equal(converted(x), converted(x))  # dropout
    converted.eval()
    assert torch.equal(converted(x), converted(x))


def test_submodules_may_be_replaced_after_the_conversion():
    """Adapter libraries do this."""
    converted = make_reversible(Plain(Block() for _ in range(2)))
    block = converted.get_submodule("blocks.1")
    block.mlp = nn.Linear(4, 4)
    converted(torch.randn(2, 6, 4)).sum().backward()
    assert block.mlp.weight.grad is not None


@pytest.mark.parametrize("name", ["torch pre-norm", "torch post-norm", "own"])
def test_copies_and_pickles(name):
    network, x, named = build(name, 2)
    converted = make_reversible(network, split).eval()
    expected = converted(x, **named)
    for twin in (copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))):
        assert torch.equal(twin(x, **named), expected)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.add_(0.1)
        assert not torch.equal(twin(x, **named), expected)  # it uses its own weights
    assert torch.equal(converted(x, **named), expected)


@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "weights"])
def test_low_precision(autocast):
    """Streams are float32 whatever the dtype of the blocks, so that blocks are evaluated again at the same inputs."""
    network = make_reversible(randomised(Plain(Block() for _ in range(8)))).eval()
    network.to(torch.float32 if autocast else torch.bfloat16)
    x = torch.randn(2, 6, 4).bfloat16().requires_grad_()

    def found():
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = network(x)
        assert y.dtype == torch.bfloat16
        return torch.autograd.grad(y.float().square().sum(), [x, *network.parameters()])

    reversible = found()
    with plain_autograd():
        expected = found()
    for a, b in zip(reversible, expected, strict=True):
        assert (a - b).float().norm() <= 0.03 * b.float().norm()


def test_padding_without_gradients():
    """Where nn.TransformerEncoder would switch to nested tensors."""
    network, x, named = build("torch post-norm", 2)
    converted = make_reversible(network.eval())
    with_graph = converted(x, **named)
    with torch.no_grad():
        torch.testing.assert_close(converted(x, **named)[~PADDING], with_graph[~PADDING])


def test_meta():
    with torch.device("meta"):
        converted = make_reversible(Plain(Block() for _ in range(2)))
        assert converted(torch.empty(2, 6, 4)).shape == (2, 6, 4)


def test_report():
    converted = make_reversible(torch_encoder(3, False))
    assert str(petra.conversion_report(converted)) == (
        "1 reversible segment(s), 100% of 516 parameters\n"
        "  layers[0…2]: 3 × TransformerEncoderLayer, post-norm, now pre-norm, 516 parameters\n"
        "The weights are the same, but the network computes a different function: fine-tune it."
    )
    one = petra.conversion_report(make_reversible(nn.Sequential(Own(), nn.Linear(4, 10)), split))
    assert "the network[0]: 1 × Own, 40 parameters" in str(one)
    assert "44% of 90" in str(one)
    assert "each segment has only one block" in str(one)
    nothing = petra.conversion_report(nn.Linear(2, 2))
    assert nothing.segments == ()
    assert str(nothing).startswith("no converted segments")
    assert "reversible: 0, 1, 2" in repr(converted)


def test_an_index_out_of_range_explains_that_there_are_fewer_members():
    rev = make_reversible(torch_encoder(3, norm_first=True))
    with pytest.raises(IndexError, match="3 modules became 1 members"):
        rev.layers[1]
