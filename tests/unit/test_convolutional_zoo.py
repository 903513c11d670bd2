"""The RevNets and ResNets of the RevNet paper, and RevNets that are reversible up to the head."""

import copy
from contextlib import nullcontext

import pytest
import torch
from helpers.trainers import make
from helpers.zoo import count, on_paper
from torch import nn
from torch.nn.functional import avg_pool2d, conv2d, cross_entropy

from petra import METHODS, ReversibleBlock, ReversibleLayer, check_invertible, models, pareprop, plain_autograd
from petra.measure import at_rest, nbytes
from petra.models.preact_resnet import ReshapingUnit
from petra.reversible import InvertibleDownsampling
from petra.schedule import Kind

pytestmark = pytest.mark.slow

CIFAR = {  # Table 2, millions of parameters with 10 and with 100 classes
    "resnet32": ("0.46", "0.47"),
    "revnet38": ("0.46", "0.48"),
    "resnet110": ("1.73", "1.73"),
    "revnet110": ("1.73", "1.74"),
    "resnet164": ("1.70", "1.73"),
    "revnet164": ("1.75", "1.79"),
}
IMAGENET = {"resnet101": 44.5, "revnet104": 45.2}
INVERTIBLE = {"irevnet18": 21_599_274, "irevnet50": 15_370_570}  # ours, with 10 classes
NAMES = (*CIFAR, *IMAGENET, *INVERTIBLE)
REVERSIBLE = [name for name in NAMES if "rev" in name]


def tiny(name, depths=(2, 2), width=4, **arguments):
    torch.manual_seed(0)
    return models.create(name, depths=depths, width=width, in_channels=2, num_classes=4, **arguments).double()


def data(name, count=1, size=3):
    generator = torch.Generator().manual_seed(1)
    side = 16 if name in IMAGENET else 4
    for _ in range(count):
        x = torch.randn(size, 2, side, side, generator=generator, dtype=torch.float64)
        yield x, torch.randint(4, (size,), generator=generator)


@pytest.mark.parametrize(("name", "published"), CIFAR.items())
def test_parameters_on_cifar_are_those_of_the_paper_as_printed(name, published):
    # By 0.46 and 0.48, RevNet-38 has 464,830 to 464,999 parameters with 10 classes: just over 1 % more than 0.46.
    assert tuple(f"{count(on_paper(name, num_classes=n)) / 1e6:.2f}" for n in (10, 100)) == published
    assert count(on_paper(name)) == count(on_paper(name, num_classes=10)) == models.find(name).parameters


@pytest.mark.parametrize(("name", "published"), IMAGENET.items())
def test_parameters_on_imagenet_are_within_one_percent(name, published):
    assert count(on_paper(name)) / 1e6 == pytest.approx(published, rel=0.01)
    assert count(on_paper(name)) == models.find(name).parameters


@pytest.mark.parametrize(("name", "parameters"), INVERTIBLE.items())
def test_parameters_of_invertible_networks(name, parameters):
    assert count(on_paper(name)) == parameters
    assert models.find(name).parameters == models.find(name).count_parameters()  # for ImageNet


@pytest.mark.parametrize("name", NAMES)
def test_names_count_layers(name):
    """Convolutions from image to class without shortcuts; i-RevNets have no convolution in the stem."""
    path = [
        n for n, m in on_paper(name).named_modules() if isinstance(m, nn.Conv2d | nn.Linear) and "shortcut" not in n
    ]
    assert f"{name.rstrip('0123456789')}{len(path) + (name in INVERTIBLE)}" == name


def test_six_hundred_layers():
    network = on_paper("revnet110", depths=(50, 50, 50))
    assert sum(isinstance(m, nn.Conv2d | nn.Linear) for m in network.modules()) == 602
    assert sum(not isinstance(layer, ReversibleLayer) for layer in network) == 4  # stem, two changes of shape, head


@pytest.mark.parametrize("name", NAMES)
def test_which_layers_are_reversible(name):
    network = on_paper(name)
    ordinary = [n for n, layer in network.named_children() if not isinstance(layer, ReversibleLayer)]
    if name in INVERTIBLE:
        assert ordinary == ["head"]
    elif name in REVERSIBLE:
        first = 1 if name in ("revnet164", "revnet104") else 2  # bottlenecks widen in the first group too
        groups = range(first, 5 if name in IMAGENET else 4)
        assert ordinary == ["stem", *(f"group{i}_unit0" for i in groups), "head"]
    else:
        assert len(ordinary) == len(network)


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("name", REVERSIBLE)
def test_gradients_and_statistics_equal_plain_autograd(name, depth, device):
    twin = tiny(name, depths=(depth, depth)).to(device)
    twin[-2].f.requires_grad_(False)
    networks = [copy.deepcopy(twin) for _ in range(2)]
    x, y = (tensor.to(device) for tensor in next(data(name)))
    for network, way in zip([twin, *networks], (plain_autograd, nullcontext, pareprop), strict=True):
        with way():
            loss = cross_entropy(network(x), y)
        loss.backward()
    for network in networks:
        for (n, a), b in zip(network.named_parameters(), twin.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None) == (not a.requires_grad), n
            if a.grad is not None:
                torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-9, msg=n)
        for (n, a), b in zip(network.state_dict().items(), twin.state_dict().values(), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0 if device == "cpu" else 1e-12, msg=n)
            if n.endswith("num_batches_tracked"):
                assert int(a) == 1, n


@pytest.mark.parametrize("name", REVERSIBLE)
def test_reversible_layers_invert(name):
    network = tiny(name)
    ((x, _),) = data(name)
    streams = (x,)
    for layer in network[:-1]:
        if isinstance(layer, ReversibleLayer):
            report = check_invertible(layer, *streams, tolerance=1e-10)
            assert report, report
            assert report.bit_exact or list(layer.parameters())
        with torch.no_grad():
            streams = layer(*streams)


@pytest.mark.parametrize("name", ["revnet38", "revnet164", "irevnet18", "irevnet50"])
def test_without_learning_petra_gives_the_gradients_of_backprop(name):
    network = tiny(name)
    twin = copy.deepcopy(network)
    options = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.0)}
    found, expected = {}, {}
    for trainer, into in (
        (make(network, method="petra", stages=3, **options), found),
        (make(twin, method="backprop", **options), expected),
    ):

        def keep(tick, action, stage, trainer=trainer, into=into):
            if action.kind is Kind.UPDATE:
                for n, p in trainer.network.named_parameters():
                    if any(p is q for q in stage.parameters):
                        into[n, action.microbatch] = p.grad.clone()

        trainer.executor.observers.append(keep)
        for x, y in data(name, 6):
            trainer.step(x, y)
        trainer.drain()
    assert len(found) == 6 * len(list(network.parameters()))
    assert found.keys() == expected.keys()
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, expected[key], rtol=1e-9, atol=1e-9, msg=str(key))


@pytest.mark.parametrize("method", sorted(METHODS))
@pytest.mark.parametrize("name", ["revnet38", "resnet164", "irevnet18"])
def test_every_method_trains_them_however_fine_the_cut(name, method):
    """The finest stages of an i-RevNet have no parameters, and the first is reversible."""
    network = tiny(name, depths=(1, 1))
    before = copy.deepcopy(network.state_dict())
    trainer = make(network, method=method, stages=len(network))
    for x, y in data(name, 6):
        assert all(finished.loss.isfinite() for finished in trainer.step(x, y))
    trainer.drain()
    for n, a in network.named_parameters():
        assert a.isfinite().all(), n
        assert not torch.equal(a, before[n]), n


def test_an_invertible_network_keeps_no_activation_in_any_stage():
    for stages in (3, 6):
        for name, keeps in (("irevnet18", False), ("irevnet50", False), ("revnet38", True)):
            trainer = make(tiny(name), method="petra", stages=stages)
            for x, y in data(name, 12):
                trainer.step(x, y)
            held = [row.inputs for row in at_rest(trainer.executor)]
            assert any(held) == keeps, (name, held)
            assert [row.stashed_weights for row in at_rest(trainer.executor)] == [0] * stages


def test_a_stage_that_only_moves_values_needs_none_of_them():
    network = tiny("irevnet18", depths=(1, 1))
    assert isinstance(network[2], InvertibleDownsampling)
    trainer = make(network, method="checkpointed", stages=len(network))
    for x, y in data("irevnet18", 8):
        trainer.step(x, y)
    for kept in trainer.stages[2].saved.values():
        assert [nbytes([stream]) for stream in kept.inputs[0]] == [8, 8]


def test_the_segment_before_the_head_stores_its_last_output_only():
    saved = []
    network = tiny("irevnet18", depths=(3, 3))
    ((x, _),) = data("irevnet18")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        streams = network[:-1](x)
    assert [t.shape for t in saved] == [s.shape for s in streams] == [(3, 4, 2, 2)] * 2
    network[-1](*streams).sum().backward()


def test_units_are_what_the_paper_says():
    """Equation 3: BN, ReLU, convolution, in this order; only the first branch has an activated input."""
    network = tiny("revnet38").eval()
    assert list(dict(network.group1_unit0.f.named_children())) == ["conv1", "bn2", "relu2", "conv2"]
    assert list(dict(network.group1_unit0.g.named_children())) == ["bn1", "relu1", "conv1", "bn2", "relu2", "conv2"]
    x1, x2 = torch.randn(2, 3, 2, 4, 4, dtype=torch.float64)
    unit = network.group1_unit1
    assert isinstance(unit, ReversibleBlock)

    def function(f, x, stride=1):
        h = conv2d(torch.relu(f.bn1(x)), f.conv1.weight, stride=stride, padding=1)
        return conv2d(torch.relu(f.bn2(h)), f.conv2.weight, padding=1)

    y1 = x1 + function(unit.f, x2)
    y2 = x2 + function(unit.g, y1)
    for found, expected in zip(unit(x1, x2), (y1, y2), strict=True):
        torch.testing.assert_close(found, expected)

    def shortcut(x):
        zeros = torch.zeros(3, 1, 2, 2, dtype=x.dtype)
        return torch.cat([zeros, avg_pool2d(x, 2), zeros], dim=1)

    unit = network.group2_unit0
    assert isinstance(unit, ReshapingUnit)
    y1 = shortcut(x1) + function(unit.f, x2, stride=2)
    y2 = shortcut(x2) + function(unit.g, y1)
    for found, expected in zip(unit(x1, x2), (y1, y2), strict=True):
        torch.testing.assert_close(found, expected)


def test_width_scales_all_groups():
    def channels(name, **arguments):
        network = on_paper(name, **arguments)
        return [layer.f[-1].out_channels for n, layer in network.named_children() if n.endswith("unit0")]

    assert channels("revnet38") == [16, 32, 56]
    assert channels("revnet38", width=8, depths=(1, 1, 1, 1, 1)) == [4, 8, 14, 28, 56]
    assert channels("resnet101", width=4) == [16, 32, 64, 128]
    assert channels("revnet104", width=4, depths=(1, 1, 1, 1)) == [8, 16, 32, 52]


@pytest.mark.parametrize("name", [*CIFAR, *IMAGENET])
def test_odd_images_and_more_groups(name):
    network = tiny(name, depths=(1, 1, 1, 1, 1), stem="cifar")
    assert network(torch.randn(3, 2, 19, 21, dtype=torch.float64)).shape == (3, 4)


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("revnet38", {"width": 5}, "width is 5, but it is divided among 2 streams"),
        ("resnet32", {"width": 0}, "width is 0"),
        ("revnet38", {"channels": (32, 16)}, r"channels is \(32, 16\)"),
        ("revnet110", {"depths": (1, 0)}, "depths is"),
        ("irevnet18", {"depths": ()}, "depths is"),
        ("irevnet18", {"stem": "huge"}, "stem is 'huge'"),
    ],
)
def test_bad_arguments(name, arguments, message):
    with pytest.raises(ValueError, match=message):
        models.create(name, **arguments)
