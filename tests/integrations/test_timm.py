"""Networks of timm by name: `timm:…`."""

import pytest
import torch
from helpers.libraries import library
from torch import nn

import petra
from petra.cli.main import main

pytestmark = pytest.mark.slow  # the first test imports timm

VIT = {"image_size": 16, "patch": 4, "width": 8, "heads": 2, "depth": 2, "num_classes": 4, "in_channels": 1}
NAMES = {
    "vit_tiny_patch16_224": (VIT, True),
    "convnext_atto": ({"num_classes": 4, "in_channels": 1}, True),
    "resnet18": ({"num_classes": 4, "in_channels": 1, "image_size": 16}, False),
}


@pytest.fixture(autouse=True, scope="module")
def timm():
    return library("timm")


@pytest.mark.parametrize("name", NAMES)
def test_names(name, timm):
    arguments, converted = NAMES[name]
    torch.manual_seed(0)
    network = petra.models.create(f"timm:{name}", **arguments)
    assert any(isinstance(layer, petra.ReversibleLayer) for layer in network) == converted
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 8, "num_heads": 2, "depth": 2}
    twin = timm.create_model(name, num_classes=4, in_chans=1, **(sizes if name.startswith("vit") else {}))
    assert network.state_dict().keys() == twin.state_dict().keys()
    x = torch.randn(2, 1, 16, 16) if name != "convnext_atto" else torch.randn(2, 1, 32, 32)
    assert network(x).shape == (2, 4)
    if not converted:
        twin.load_state_dict(network.state_dict())
        torch.testing.assert_close(network.eval()(x), twin.eval()(x))


def test_training_on_stages():
    network = petra.models.create("timm:vit_tiny_patch16_224", **VIT)
    trainer = petra.Trainer(
        network, stages=3, loss=nn.functional.cross_entropy, optimizer=lambda p: torch.optim.SGD(p, 0.05)
    )
    x, y = torch.randn(8, 1, 16, 16), torch.arange(8) % 4
    before = trainer.evaluate([(x, y)]).loss
    for _ in range(20):
        trainer.step(x, y)
    trainer.drain()
    assert trainer.evaluate([(x, y)]).loss < before


def test_command_line(tmp_path, capsys):
    common = ["--quiet", "--threads", "1", "--device", "cpu", "--epochs", "1", "--warmup-epochs", "0", "--stages", "3"]
    sizes = ["--width", "8", "--depth", "2", "--heads", "2", "--patch", "4"]
    model = ["--model", "timm:vit_tiny_patch16_224", "--data", "digits", *sizes]
    assert main(["train", *common, *model, "--out", str(tmp_path)]) == 0
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("timm:vit_tiny_patch16_224 on digits: test accuracy")
    assert main(["export", str(tmp_path), "--format", "torch-export"]) == 0
    x = torch.randn(5, 1, 8, 8)
    with torch.no_grad():
        assert torch.equal(torch.export.load(tmp_path / "network.pt2").module()(x), petra.load(tmp_path)(x))


def test_mistakes():
    with pytest.raises(ValueError, match=r"timm has no network named 'resnet19': did you mean timm:resnet18"):
        petra.models.create("timm:resnet19")
    with pytest.raises(ValueError, match=r"timm:resnet18 does not take all of patch_size"):
        petra.models.create("timm:resnet18", patch=3)
    with pytest.raises(ValueError, match="has no argument 'stem': it takes num_classes"):
        petra.models.create("timm:resnet18", stem="imagenet")
