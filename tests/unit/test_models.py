import json
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers.zoo import SIZES as OF_FEATURES_REPLAY
from safetensors.torch import load_file

from petra import Network, ReversibleResidual, models, plain_autograd
from petra.models.registry import LISTING
from petra.trainer.checkpoint import export_weights

SIZES = {  # ImageNet, 1000 classes; Table 2 gives 11.7M, 21.8M, 25.6M; 12.2M, 22.3M, 30.4M
    "resnet18": (11_694_312, 10),
    "resnet34": (21_806_184, 18),
    "resnet50": (25_583_592, 18),
    "revnet18": (12_215_912, 10),
    "revnet34": (22_327_784, 18),
    "revnet50": (30_421_608, 18),
}


@pytest.mark.parametrize(("name", "size"), SIZES.items())
def test_parameters_and_layers(name, size):
    with torch.device("meta"):
        network = models.create(name, num_classes=1000, stem="imagenet")
    assert (sum(p.numel() for p in network.parameters()), len(network)) == size
    assert models.find(name).parameters == size[0]


def test_all_names_are_tested():
    built = {entry.name for entry in models.entries() if entry.build in (models.resnet, models.revnet)}
    assert built == {*SIZES, *OF_FEATURES_REPLAY}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(("stem", "size"), [("cifar", 16), ("imagenet", 64)])
def test_small_ones_run_and_reversible_gradients_are_exact(name, stem, size):
    torch.manual_seed(0)
    network = models.create(name, num_classes=5, in_channels=2, width=4, stem=stem).double()
    x = torch.randn(2, 2, size, size, dtype=torch.float64)
    found = torch.autograd.grad(network(x).square().sum(), list(network.parameters()))
    with plain_autograd():
        expected = torch.autograd.grad(network(x).square().sum(), list(network.parameters()))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_blocks_that_keep_the_shape_are_reversible():
    kinds = [isinstance(layer, ReversibleResidual) for layer in models.create("revnet18", width=4)]
    assert kinds == [False, True, True, False, True, False, True, False, True, False]
    kinds = [isinstance(layer, ReversibleResidual) for layer in models.create("revnet50", width=4)]
    assert kinds == [False, *(b > 0 for depth in (3, 4, 6, 3) for b in range(depth)), False]


def test_basic_block_is_what_the_paper_says():
    network = models.create("revnet18", width=4).eval()
    x, y = torch.randn(2, 4, 8, 8), torch.randn(2, 4, 8, 8)
    block = network.group1_block0
    assert torch.equal(block(x, y)[0], y + block.f(x))
    assert block(x, y)[1] is x
    down = network.group2_block0
    passed = down.f.bn1(down.f.conv1(x))
    expected = torch.relu(down.f.bn2(down.f.conv2(torch.relu(passed)))) + down.shortcut.bn(down.shortcut.conv(y))
    assert torch.equal(down(x, y)[0], expected)
    assert torch.equal(down(x, y)[1], passed)


def test_names_are_stable_and_weights_load_without_petra(tmp_path):
    network = models.create("revnet18", width=4, depths=(1, 1))
    names = list(network.state_dict())
    assert names[0] == "stem.conv.weight"
    assert "group2_block0.shortcut.bn.running_var" in names
    assert names[-1] == "head.fc.bias"
    export_weights(network.state_dict(), tmp_path / "weights.safetensors")
    twin = models.create("revnet18", width=4, depths=(1, 1))
    twin.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(network.eval()(x), twin.eval()(x))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"depths": (0, 1)}, "depths is"),
        ({"width": 0}, "width is 0"),
        ({"stem": "huge"}, "stem is 'huge'"),
        ({"breadth": 3}, "revnet18 has no argument 'breadth': it takes depths"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        models.create("revnet18", **arguments)


def test_unknown_names_get_a_hint(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)  # not installed
    with pytest.raises(ValueError, match="no model named 'revnet19': did you mean 'revnet18'"):
        models.create("revnet19")


def test_unknown_names_that_resemble_none_get_the_closest_and_not_all(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", SimpleNamespace(is_model=lambda name: name == "vit_tiny_patch16_224"))
    with pytest.raises(
        ValueError, match=r"no model named 'vit_.*': networks of timm are named timm:vit_tiny_patch16_224$"
    ):
        models.create("vit_tiny_patch16_224")
    with pytest.raises(ValueError, match=r"the closest of \d+ are .*`petra models` lists all") as raised:
        models.create("nope")
    assert len(str(raised.value)) < 160


def test_the_stored_listing_is_up_to_date():
    """The tests of parameters here and of the other families compare each count with the network."""
    stored = json.loads(LISTING.read_text())
    assert stored == models.listing(), "write json.dumps(petra.models.listing()) to listing.json"
    counts = {row["name"]: row["parameters"] for row in stored}
    for name in ("revnet18", "revnet38", "resnet164-basic", "rev-roberta-small"):
        assert models.find(name).count_parameters() == counts[name]


def test_own_networks_can_be_registered():
    models.register("mine", "for a test", lambda width=1: Network(torch.nn.Linear(width, width)), width=2)
    try:
        assert models.create("mine", width=3)[0].in_features == 3
        assert models.find("mine").parameters == 6
        with pytest.raises(ValueError, match="already"):
            models.register("mine", "again", lambda: Network())
    finally:
        models.registry._ENTRIES.pop("mine")


def test_a_torchvision_of_another_pytorch_is_named(tmp_path, monkeypatch):
    (tmp_path / "timm.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    with pytest.raises(ValueError, match=r"torchvision::nms does not exist\): install the versions of torch and torch"):
        models.create("timm:resnet18")
