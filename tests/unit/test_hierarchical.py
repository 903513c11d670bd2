"""Swin and MViT, plain and reversible."""

import copy

import pytest
import torch
from helpers.trainers import make
from torch import nn
from torch.nn.functional import conv2d, cross_entropy, gelu, layer_norm

from petra import Network, ReversibleBlock, check_invertible, models, pareprop, plain_autograd
from petra.models.hierarchy import MLP, Fusion
from petra.models.mvit import TransitionBlock
from petra.models.pooling_attention import PoolingAttention
from petra.models.swin import PatchMerging
from petra.models.transformer_parts import DropPath
from petra.models.window_attention import WindowAttention
from petra.schedule import Kind

SIZES = {  # ImageNet; published: 28.3M, 49.6M, 87.8M, 196.5M, 661M; 34.9M, 51.5M, 217.6M, 667M
    "swin-t": (28_288_354, 17, 28.3),
    "swin-s": (49_606_258, 29, 49.6),
    "swin-b": (87_768_224, 29, 87.8),
    "swin-l": (196_532_476, 29, 196.5),
    "swin-g": (657_678_306, 29, 661),
    "mvit-s": (34_870_216, 18, 34.9),
    "mvit-b": (51_472_744, 26, 51.5),
    "mvit-l": (217_992_952, 50, 217.6),
    "mvit-h": (666_879_720, 82, 667),
}
TINY = {
    # two resolutions, 8×8 in padded windows of 3, 4×4 too: shifted, masked and not
    "swin": {"width": 4, "heads": (1, 2), "window": 3, "image_size": 16, "patch": 2, "num_classes": 5},
    "mvit": {"width": 4, "heads": (1, 2), "image_size": 16, "patch": 2, "num_classes": 5, "mlp_ratio": 2},
}


def tiny(family, depths=(2, 2), *, plain=False, **options):
    torch.manual_seed(0)
    name = f"{'' if plain else 'rev-'}{family}-{'t' if family == 'swin' else 's'}"
    network = models.create(name, **{**TINY[family], "depths": depths, **options}).double()
    for parameter in network.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)  # large enough for every part to matter
    return network


def images(count=2, size=16, seed=1):
    return torch.randn(count, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), SIZES.items())
def test_parameters_and_layers(name, size):
    with torch.device("meta"):
        plain, reversible = models.create(name), models.create(f"rev-{name}")
        fused = models.create(f"rev-{name}", fuse="linear")
    shapes = {key: p.shape for key, p in plain.named_parameters()}
    assert (sum(p.numel() for p in plain.parameters()), len(plain)) == size[:2]
    assert models.find(name).parameters == models.find(f"rev-{name}").parameters == size[0]
    assert abs(size[0] / 1e6 / size[2] - 1) < 0.01
    assert {key: p.shape for key, p in reversible.named_parameters()} == shapes
    width = plain.stem.conv.out_channels
    more = {key: p.numel() for key, p in fused.named_parameters() if key not in shapes}
    assert all(".fuse." in key for key in more)
    # A layer 2C → C with bias where each resolution ends; C are the channels of the input.
    assert sum(more.values()) == sum(2 * c * c + c for c in (width, 2 * width, 4 * width))


def test_all_names_are_tested():
    names = {entry.name for entry in models.entries() if entry.build in (models.swin, models.mvit)}
    assert names == {*SIZES, *(f"rev-{name}" for name in SIZES)}


def test_blocks_that_keep_the_shape_are_reversible():
    def kinds(network):
        return "".join("R" if isinstance(layer, ReversibleBlock) else "." for layer in network)

    assert kinds(tiny("swin", (2, 3))) == ".RR.RRR."
    assert kinds(tiny("mvit", (2, 3))) == ".RR.RR."
    assert kinds(tiny("mvit", (2, 3), widen="mlp")) == ".R..RR."
    assert kinds(tiny("mvit", (1, 3), widen="mlp")) == "...RR."
    for family in TINY:
        assert "R" not in kinds(tiny(family, (2, 3), plain=True))


@pytest.mark.parametrize("widen", ["attention", "mlp"])
def test_streams_are_two_only_next_to_reversible_blocks(widen):
    network = tiny("mvit", (1, 2, 1), heads=(1, 1, 1), widen=widen)
    numbers = []
    for layer in network:
        layer.register_forward_pre_hook(lambda module, inputs: numbers.append(len(inputs)))
    with plain_autograd():
        network(images())
    kinds = [isinstance(layer, ReversibleBlock) for layer in network]
    # Blocks are not called as modules but through their couplings.
    expected = [1 + kinds[i - 1] for i in range(1, len(kinds)) if not kinds[i]]
    assert numbers == [1, *expected]
    assert network.stem.streams == 1 + kinds[1]


GROUPS = [(d, 1) for d in range(1, 8)] + [(1, d) for d in range(2, 8)]


def gradients(network, x):
    torch.manual_seed(3)
    x = x.clone().requires_grad_()
    wanted = [x, *(p for p in network.parameters() if p.requires_grad)]
    return torch.autograd.grad(network(x).square().sum(), wanted)


@pytest.mark.parametrize("depths", GROUPS, ids=str)
@pytest.mark.parametrize("family", TINY)
def test_reversible_gradients_equal_plain_autograd(family, depths, device):
    fuse = ("mean", "linear", "mlp")[sum(depths) % 3]
    options = {"widen": ("attention", "mlp")[depths[0] % 2]} if family == "mvit" else {}
    network = tiny(family, depths, fuse=fuse, dropout=0.2, drop_path=0.3, **options).to(device)
    for parameter in list(network.parameters())[3::7]:
        parameter.requires_grad_(False)
    x = images(3).to(device)
    found = gradients(network, x)
    with pareprop():
        overlapped = gradients(network, x)
    with plain_autograd():
        expected = gradients(network, x)
    for a, b, c in zip(found, overlapped, expected, strict=True):
        torch.testing.assert_close(a, c, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(b, c, rtol=1e-9, atol=1e-9)
    # Stochastic depth may leave a block out for all three samples, not more.
    assert sum(g.abs().max() > 1e-3 for g in expected) > 0.8 * len(expected)


@pytest.mark.parametrize("family", TINY)
def test_blocks_invert(family):
    network = tiny(family, (3, 1), dropout=0.2, drop_path=0.3).train()
    streams = torch.randn(2, 2, 8, 8, 4, dtype=torch.float64)
    report = check_invertible([layer for layer in network if isinstance(layer, ReversibleBlock)][:3], *streams)
    assert report.reconstruction_error < 1e-12, report
    assert report.gradient_error < 1e-12, report


@pytest.mark.parametrize("family", TINY)
def test_twins_share_weights_and_differ_in_wiring_alone(family):
    reversible, plain = tiny(family), tiny(family, plain=True)
    plain.load_state_dict(reversible.state_dict())
    x1, x2 = reversible.stem(images())
    (x,) = plain.stem(images())
    assert torch.equal(x1, x)
    assert torch.equal(x2, x)
    block, twin = reversible.group1_block1, plain.group1_block1
    y1 = x1 + block.f(x2)
    y2 = x2 + block.g(y1)
    assert all(torch.equal(a, b) for a, b in zip(block(x1, x2), (y1, y2), strict=True))
    assert torch.equal(twin(x)[0], y1 + block.g(y1))
    z1, z2 = torch.randn(2, 3, 4, 4, 8, dtype=torch.float64)
    assert torch.equal(reversible.head(z1, z2), plain.head((z1 + z2) / 2))
    expected = plain.head.fc(layer_norm(z1, (8,), eps=plain.head.norm.eps).mean((1, 2)))
    torch.testing.assert_close(plain.head(z1), expected, rtol=1e-12, atol=1e-12)


def test_every_other_block_is_shifted_by_half_a_window():
    with torch.device("meta"):
        network = models.create("rev-swin-t")
    attentions = [layer.f.body for layer in network if isinstance(layer, ReversibleBlock)]
    assert [a.shift for a in attentions] == [0, 3] * 5 + [0, 0]  # in the last group one window is all
    assert [a.size for a in attentions] == [56] * 2 + [28] * 2 + [14] * 6 + [7] * 2
    assert [a.heads for a in attentions] == [3] * 2 + [6] * 2 + [12] * 6 + [24] * 2


def test_strides_of_pooling():
    with torch.device("meta"):
        network = models.create("rev-mvit-s")
    attentions = [module for module in network.modules() if isinstance(module, PoolingAttention)]
    assert [a.key_stride for a in attentions] == [4] + [2] * 2 + [1] * 13
    assert [a.query_stride for a in attentions] == [1, 2, 1, 2, *[1] * 10, 2, 1]
    assert [a.keys for a in attentions] == [14, 28, 14, 28, *[14] * 10, 14, 7]
    assert [a.heads for a in attentions] == [1] + [2] * 2 + [4] * 11 + [8] * 2


@pytest.mark.parametrize("family", TINY)
def test_weights_begin_small_and_drawn(family):
    torch.manual_seed(0)
    network = models.create(
        "rev-swin-t" if family == "swin" else "rev-mvit-s", **{**TINY[family], "width": 32}, depths=(2, 2)
    )
    for name, parameter in network.named_parameters():
        if name.endswith("bias") and not name.startswith("stem.conv"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        elif not name.startswith("stem") and not name.endswith("pool"):
            assert 0.015 < parameter.std() < 0.025, name
        else:
            assert 0.01 < parameter.std() < 0.5, name


def attend(q, k, v, bias):
    return ((q @ k.T) * q.shape[-1] ** -0.5 + bias).softmax(-1) @ v


def window_reference(module, x):
    """Attention of each token to those in its window, with a grid of windows that is moved by the shift."""
    size, window, shift, heads = module.size, module.window, module.shift, module.heads
    table = module.table.view(2 * window - 1, 2 * window - 1, heads)
    groups = {}
    for i in range(size):
        for j in range(size):
            groups.setdefault(((i - shift) // window, (j - shift) // window), []).append((i, j))
    found = torch.zeros_like(x)
    for b in range(len(x)):
        q, k, v = module.qkv(x[b]).chunk(3, dim=-1)
        for group in groups.values():
            rows, columns = zip(*group, strict=True)
            for head in range(heads):
                own = slice(head * x.shape[-1] // heads, (head + 1) * x.shape[-1] // heads)
                bias = torch.stack(
                    [
                        torch.stack([table[i - m + window - 1, j - n + window - 1, head] for m, n in group])
                        for i, j in group
                    ]
                )
                found[b, rows, columns, own] = attend(
                    q[rows, columns, own], k[rows, columns, own], v[rows, columns, own], bias
                )
    return module.out(found)


@pytest.mark.parametrize("window", [1, 2, 3, 4])
@pytest.mark.parametrize("shifted", [False, True])
def test_window_attention_is_what_a_loop_over_windows_gives(window, shifted):
    torch.manual_seed(0)
    for size in range(1, 8):  # windows that divide the map, that need padding, that cover all of it
        module = WindowAttention(4, 2, size, window, window // 2 if shifted else 0).double()
        nn.init.normal_(module.table)  # large enough to matter
        x = torch.randn(2, size, size, 4, dtype=torch.float64)
        with torch.no_grad():
            torch.testing.assert_close(module(x), window_reference(module, x), rtol=1e-10, atol=1e-10)


def test_one_window_over_the_whole_map_is_not_shifted():
    module = WindowAttention(4, 1, 3, window=7, shift=3)
    assert (module.window, module.shift, module.windows, module.mask) == (3, 0, 1, None)
    assert WindowAttention(4, 1, 7, window=7, shift=3).shift == 0
    assert WindowAttention(4, 1, 8, window=7, shift=3).shift == 3


def pooling_reference(module, x):
    """Attention head by head and logit by logit, with distances in units of the finer grid."""
    heads, channels = module.heads, module.channels
    parts = module.qkv(x).unflatten(-1, (3, heads, channels))
    strides = (module.query_stride, module.key_stride, module.key_stride)
    found = []
    for head in range(heads):
        q, k, v = (
            layer_norm(
                conv2d(
                    parts[..., i, head, :].permute(0, 3, 1, 2),
                    module.pool[i, :, None],
                    stride=stride,
                    padding=1,
                    groups=channels,
                ).permute(0, 2, 3, 1),
                (channels,),
                module.norm_weight.view(3, channels)[i],
                module.norm_bias.view(3, channels)[i],
                eps=1e-6,
            )
            for i, stride in enumerate(strides)
        )
        queries, keys = q.shape[1], k.shape[1]
        unit = max(queries, keys)

        def vector(table, a, b, queries=queries, keys=keys, unit=unit):
            return table[int((a / queries - (b + 1) / keys + 1) * unit + 1e-9)]

        outputs = torch.zeros_like(q)
        for b in range(len(x)):
            for h in range(queries):
                for w in range(queries):
                    logits = k[b] @ q[b, h, w] * channels**-0.5
                    if module.key_positions is not None:
                        for m in range(keys):
                            for n in range(keys):
                                logits[m, n] += q[b, h, w] @ vector(module.rows, h, m)
                                logits[m, n] += q[b, h, w] @ vector(module.columns, w, n)
                    weights = logits.flatten().softmax(0)
                    outputs[b, h, w] = weights @ v[b].flatten(0, 1) + q[b, h, w]
        found.append(outputs)
    return module.out(torch.cat(found, dim=-1))


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("strides", [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (2, 4)], ids=str)
def test_pooling_attention_is_what_a_loop_over_queries_and_keys_gives(strides, heads):
    torch.manual_seed(0)
    for size, relative in ((1, True), (2, True), (4, True), (5, True), (5, False)):
        module = PoolingAttention(
            3, 6, heads, size, query_stride=strides[0], key_stride=strides[1], relative=relative
        ).double()
        for parameter in module.parameters():
            nn.init.normal_(parameter)
        x = torch.randn(2, size, size, 3, dtype=torch.float64)
        with torch.no_grad():
            torch.testing.assert_close(module(x), pooling_reference(module, x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("size", [4, 5])
def test_patches_are_merged_in_the_order_of_swin(size):
    torch.manual_seed(0)
    merging = PatchMerging(3, size, "mean", streams=2).double()
    x1, x2 = torch.randn(2, 2, size, size, 3, dtype=torch.float64)
    x = torch.zeros(2, 6, 6, 3, dtype=torch.float64)
    x[:, :size, :size] = (x1 + x2) / 2
    side = (size + 1) // 2
    expected = torch.zeros(2, side, side, 6, dtype=torch.float64)
    for i in range(side):
        for j in range(side):
            four = [x[:, 2 * i, 2 * j], x[:, 2 * i + 1, 2 * j], x[:, 2 * i, 2 * j + 1], x[:, 2 * i + 1, 2 * j + 1]]
            expected[:, i, j] = merging.reduce(merging.norm(torch.cat(four, dim=-1)))
    y1, y2 = merging(x1, x2)
    assert y1 is y2
    torch.testing.assert_close(y1, expected, rtol=1e-12, atol=1e-12)


def test_transition_blocks_pool_and_widen():
    network = tiny("mvit", (1, 1, 1), heads=(1, 1, 1), plain=True, widen="mlp")
    maps = {}
    for name, layer in network.named_children():
        layer.register_forward_hook(lambda module, inputs, output, name=name: maps.update({name: output}))
    network(images())
    shapes = {name: tuple(y[0].shape[1:]) for name, y in maps.items() if isinstance(y, tuple)}
    assert shapes == {
        "stem": (8, 8, 4),
        "group1_block0": (8, 8, 8),
        "group2_block0": (4, 4, 16),
        "group3_block0": (2, 2, 16),
    }
    assert all(isinstance(network[i], TransitionBlock) for i in (1, 2, 3))


def test_transition_blocks_are_ordinary_blocks_on_the_mean():
    network = tiny("mvit", (1, 2))
    block = network.group2_block0
    x1, x2 = torch.randn(2, 2, 8, 8, 4, dtype=torch.float64)
    n = block.norm1((x1 + x2) / 2)
    skip = block.project1(n)
    highest = torch.stack(
        [
            torch.stack(
                [skip[:, max(2 * i - 1, 0) : 2 * i + 2, max(2 * j - 1, 0) : 2 * j + 2].amax((1, 2)) for j in range(4)],
                1,
            )
            for i in range(4)
        ],
        1,
    )
    x = highest + block.attention(n)
    expected = x + block.mlp(block.norm2(x))
    y1, y2 = block(x1, x2)
    assert y1 is y2
    torch.testing.assert_close(y1, expected, rtol=1e-12, atol=1e-12)
    # Stochastic depth takes both of its residual functions.
    block.attention.register_forward_hook(lambda *_: calls.append("attention"))
    block.mlp.register_forward_hook(lambda *_: calls.append("mlp"))
    block.drop_path.register_forward_hook(lambda module, inputs, output: calls.append("drop") or 0 * output)
    calls = []
    assert torch.equal(block(x1, x2)[0], highest)
    assert calls == ["attention", "drop", "mlp", "drop"]


def test_mlp():
    torch.manual_seed(0)
    mlp, x = MLP(3, 400, 500, dropout=0.5), torch.randn(2, 3)
    assert abs((mlp(x) == 0).float().mean() - 0.5) < 0.1
    hidden = []
    mlp.down.register_forward_pre_hook(lambda module, inputs: hidden.append(inputs[0]))
    mlp(x)
    assert abs((hidden[0] == 0).float().mean() - 0.5) < 0.1
    mlp.eval()
    torch.testing.assert_close(mlp(x), mlp.down(gelu(mlp.up(x))))


def test_fusing():
    x1, x2 = torch.randn(2, 2, 3, 3, 4)
    assert torch.equal(Fusion(4, "mean")(x1, x2), (x1 + x2) / 2)
    assert Fusion(4, "mean")(x1) is x1
    linear = Fusion(4, "linear")
    linear.initialise_as_mean()
    nn.init.zeros_(linear.project.bias)
    torch.testing.assert_close(linear(x1, x2), (x1 + x2) / 2)
    network = models.create("rev-swin-t", **TINY["swin"], depths=(1, 1), fuse="linear")
    assert torch.equal(network.group2_merging.fuse.project.weight[:, :4], torch.eye(4) / 2)
    assert Fusion(4, "mlp")(x1, x2).shape == x1.shape


def test_stochastic_depth_leaves_out_whole_samples_and_keeps_the_expectation():
    torch.manual_seed(0)
    drop = DropPath(0.25)
    x = torch.ones(4000, 2, 2, 3)
    y = drop(x).flatten(1)
    assert all(torch.equal(y[:, 0], y[:, i]) for i in range(y.shape[1]))
    assert set(y.unique().tolist()) == {0.0, torch.tensor(4 / 3).item()}
    assert abs(y.mean() - 1) < 0.05
    assert drop.eval()(x) is x
    rates = [
        1 - float(layer.f.drop_path.keep)
        for layer in tiny("swin", (2, 3), drop_path=0.2)
        if isinstance(layer, ReversibleBlock)
    ]
    assert rates == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])


@pytest.mark.parametrize("family", TINY)
def test_dropout_and_stochastic_depth_reach_every_block(family):
    for option in ("dropout", "drop_path"):
        network = tiny(family, **{option: 0.5})
        x = torch.randn(64, 8, 8, 4, dtype=torch.float64)
        for f in (network.group1_block1.f, network.group1_block1.g):
            assert not torch.equal(f(x), f(x)), option
            f.eval()
            assert torch.equal(f(x), f(x))


def batches(count):
    generator = torch.Generator().manual_seed(0)
    for i in range(count):
        n = 2 if i == 5 else 3
        yield (
            torch.randn(n, 3, 16, 16, generator=generator, dtype=torch.float64),
            torch.randint(5, (n,), generator=generator),
        )


@pytest.mark.parametrize("family", TINY)
def test_petra_trains_them_on_stages(family):
    network = tiny(family, (2, 2), dropout=0.1, drop_path=0.1)
    before = copy.deepcopy(network.state_dict())
    trainer = make(network, method="petra", stages=3)
    losses = [result.loss for x, y in batches(6) for result in trainer.step(x, y)]
    losses += [result.loss for result in trainer.drain()]
    assert len(losses) == 6
    assert torch.isfinite(torch.tensor([float(loss) for loss in losses])).all()
    assert all(not torch.equal(before[name], value) for name, value in trainer.network.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"fuse": "linear", "dropout": 0.2, "drop_path": 0.3}], ids=["bare", "full"])
@pytest.mark.parametrize("family", TINY)
def test_without_learning_petra_gives_the_gradients_of_backprop(family, options):
    network = tiny(family, (2, 3), **options)
    twin = copy.deepcopy(network)
    found, expected = {}, {}
    for into, net, method in (
        (found, network, {"method": "petra", "stages": 3}),
        (expected, twin, {"method": "backprop"}),
    ):
        trainer = make(net, optimizer=lambda p: torch.optim.SGD(p, lr=0.0), seed=3, loss=cross_entropy, **method)

        def keep(tick, action, stage, trainer=trainer, into=into):
            if action.kind is Kind.UPDATE:
                names = {p: name for name, p in trainer.network.named_parameters()}
                for p in stage.parameters:
                    into[names[p], action.microbatch] = p.grad.clone()

        trainer.executor.observers.append(keep)
        for x, y in batches(6):
            trainer.step(x, y)
        trainer.drain()
    assert found.keys() == expected.keys()
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, expected[key], rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rev-swin-t", "rev-mvit-s"])
def test_full_sizes_run_on_paper(name):
    with torch.device("meta"):
        network = models.create(name)
        logits = network(torch.empty(2, 3, 224, 224))
        logits.sum().backward()
    assert logits.shape == (2, 1000)
    assert all(p.grad.shape == p.shape for p in network.parameters())


@pytest.mark.parametrize("name", ["rev-swin-t", "rev-mvit-s"])
def test_small_images(name):
    options = {"window": 4} if "swin" in name else {}
    network = models.create(
        name, width=8, heads=(1, 1, 2, 2), depths=(2, 2, 2, 1), image_size=32, patch=2, num_classes=10, **options
    )
    assert network(torch.randn(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize("family", TINY)
def test_under_autocast(family):
    network = tiny(family).float()
    x = images().float()
    exact = network(x)
    with torch.autocast("cpu", torch.bfloat16):
        y = network(x)
    y.float().sum().backward()
    torch.testing.assert_close(y.float(), exact, rtol=0.1, atol=0.02)
    assert all(p.grad is not None for p in network.parameters())


@pytest.mark.parametrize("family", TINY)
def test_what_is_saved_are_parameters_alone(family):
    network = tiny(family)
    assert set(network.state_dict()) == {name for name, _ in network.named_parameters()}
    assert any(True for _ in network.buffers())


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("rev-swin-t", {"depths": (2, 0)}, "depths is"),
        ("rev-swin-t", {"depths": (2, 2)}, "there are 2 groups"),
        ("rev-swin-t", {"width": 100}, "100 channels, which is not a multiple of its 3 heads"),
        ("rev-swin-t", {"image_size": 30}, "not a multiple of patch 4"),
        ("rev-swin-t", {"window": 0}, "window is 0"),
        ("rev-swin-t", {"image_size": (32, 16)}, r"image_size is \(32, 16\): give one integer, 1 or more"),
        ("rev-swin-t", {"dropout": 1.0}, "dropout is 1.0"),
        ("swin-t", {"fuse": "sum"}, "fuse is 'sum': choose one of mean, linear, mlp"),
        ("rev-mvit-s", {"widen": "both"}, "widen is 'both'"),
        ("rev-mvit-s", {"key_stride": 0}, "key_stride is 0"),
        ("rev-mvit-s", {"in_channels": 0}, "in_channels is 0"),
        ("rev-mvit-s", {"mlp_ratio": 0.0}, "mlp_ratio"),
    ],
)
def test_bad_arguments(name, arguments, message):
    with pytest.raises(ValueError, match=message), torch.device("meta"):
        models.create(name, **arguments)


@pytest.mark.parametrize("family", TINY)
def test_images_of_another_size_raise(family):
    network = tiny(family)
    assert isinstance(network, Network)
    with pytest.raises(ValueError, match="images are 8×16, but the network was built for 16×16"):
        network(torch.zeros(1, 3, 8, 16, dtype=torch.float64))
