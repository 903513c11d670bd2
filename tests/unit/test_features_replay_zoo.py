"""The ResNets of the Features Replay paper for CIFAR."""

import copy

import pytest
import torch
from helpers.networks import batches
from helpers.trainers import make
from helpers.zoo import SIZES, count, on_paper
from torch import nn
from torch.nn.functional import batch_norm, conv2d

from petra import METHODS, ReversibleLayer, models


def tiny(name):
    torch.manual_seed(0)
    return models.create(name, depths=(1, 2), width=3, in_channels=2, num_classes=4)


@pytest.mark.parametrize("name", SIZES)
def test_names_count_convolutions_on_the_path(name):
    network = on_paper(name)
    path = [n for n, m in network.named_modules() if isinstance(m, nn.Conv2d | nn.Linear) and "shortcut" not in n]
    assert name.split("-")[0] == f"resnet{len(path)}"
    assert all(m.bias is None for m in network.modules() if isinstance(m, nn.Conv2d))
    assert not any(isinstance(layer, ReversibleLayer) for layer in network)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sizes"), SIZES.items())
def test_sizes(name, sizes):
    network = on_paper(name)
    assert (len(network), count(network)) == sizes
    assert models.find(name).parameters == sizes[1]
    last = 64 if "basic" in name else 2048
    assert count(on_paper(name, num_classes=100)) - count(network) == 90 * (last + 1)


@pytest.mark.parametrize(
    ("n", "published"), [(3, "0.27"), (5, "0.46"), (7, "0.66"), (9, "0.85"), (18, "1.73"), (200, "19.42")]
)
def test_parameters_of_other_depths_are_those_of_he_et_al(n, published):
    """Their Table 6 says 0.27, 0.46, 0.66, 0.85, 1.7 and 19.4 million for 20 to 1202 layers."""
    assert f"{count(on_paper('resnet164-basic', depths=(n, n, n))) / 1e6:.2f}" == published


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_shapes_on_cifar(name):
    """Groups end with 32×32, 16×16 and so on, of the width of the paper's groups."""
    with torch.device("meta"):
        x, sizes = torch.empty(2, 3, 32, 32), []
        for layer in models.create(name):
            x = layer(*x) if isinstance(x, tuple) else layer(x)
            if isinstance(x, torch.Tensor) and x.ndim == 4 and tuple(x.shape[1:3]) not in sizes:
                sizes.append(tuple(x.shape[1:3]))
    if "basic" in name:
        assert sizes == [(16, 32), (32, 16), (64, 8)]
    else:
        assert sizes == [(256, 32), (512, 16), (1024, 8), (2048, 4)]
    assert x.shape == (2, 10)


def test_a_block_is_what_the_paper_says():
    """relu(A(x) + bn(conv(relu(bn(conv(x)))))), where A drops pixels and appends channels of zeros."""
    network = tiny("resnet164-basic")
    block, x = network.group2_block0, torch.randn(3, 3, 5, 7)

    def normal(h, norm):
        return batch_norm(h, None, None, norm.weight, norm.bias, training=True)

    f = block.f
    h = torch.relu(normal(conv2d(x, f.conv1.weight, stride=2, padding=1), f.bn1))
    h = normal(conv2d(h, f.conv2.weight, padding=1), f.bn2)
    shortcut = torch.zeros(3, 6, 3, 4)
    for i in range(3):
        for j in range(4):
            shortcut[:, :3, i, j] = x[:, :, 2 * i, 2 * j]
    torch.testing.assert_close(block(x), torch.relu(shortcut + h))
    assert not list(block.shortcut.parameters())
    assert isinstance(network.group2_block1.shortcut, nn.Identity)
    assert list(dict(tiny("resnet101-cifar").group1_block0.shortcut.named_children())) == ["conv", "bn"]


@pytest.mark.parametrize("method", sorted(METHODS))
@pytest.mark.parametrize("name", ["resnet164-basic", "resnet101-cifar"])
def test_every_method_trains_them_however_fine_the_cut(name, method):
    network = tiny(name)
    before = copy.deepcopy(network.state_dict())
    trainer = make(network, method=method, stages=len(network))
    for x, y in batches(6):
        assert all(finished.loss.isfinite() for finished in trainer.step(x, y))
    trainer.drain()
    for n, a in network.named_parameters():
        assert a.isfinite().all(), n
        assert not torch.equal(a, before[n]), n


def test_the_other_networks_have_the_sizes_of_the_petra_paper():
    """Convolutions with bias, and projected shortcuts."""
    assert count(on_paper("resnet18")) == 11_178_762
    assert all(m.bias is not None for m in on_paper("resnet50").modules() if isinstance(m, nn.Conv2d))
