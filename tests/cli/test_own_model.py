"""Networks of the user's own modules on the command line, and networks that another script has registered."""

import json
import sys

import pytest
import torch
from helpers.library_networks import timm_network
from helpers.networks import mixed_network, reversible_network
from helpers.trainers import make, sgd
from torch import nn

import petra
from petra import models
from petra.cli.main import main
from petra.models.imported import import_function
from petra.trainer.trainer import weights_hash
from petra.trainer.validation import NotReversibleWarning

SOURCE = '''
"""A network with its own forward."""
from torch import nn
import petra


class Classifier(nn.Module):
    def __init__(self, classes, width):
        super().__init__()
        self.flat = nn.Flatten()
        self.embed = nn.Linear(64, width)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width)) for _ in range(2)))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.blocks(self.embed(self.flat(x))))


def classifier(num_classes, width=16, activation=nn.ReLU):
    """Return a classifier."""
    return Classifier(num_classes, width)


def nothing():
    return 3


alias = len
'''
COMMON = ["--quiet", "--threads", "1", "--device", "cpu", "--batch-size", "256", "--epochs", "2", "--stages", "3"]
COMMON += ["--warmup-epochs", "0", "--data", "digits", "--lr", "0.01"]


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A package in the working directory, which is not on the import path yet."""
    (tmp_path / "own_nets").mkdir()
    (tmp_path / "own_nets" / "__init__.py").write_text("")
    (tmp_path / "own_nets" / "small.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "own_nets"]:
        del sys.modules[name]


def test_train_evaluate_load_and_resume(own, capsys):
    out = own / "run"
    model = ["--model", "own_nets.small:classifier", "--set", "width=8"]
    assert main(["train", *COMMON, *model, "--method", "delayed", "--out", str(out)]) == 0
    spec = json.loads((out / "network.json").read_text())
    assert spec["model"] == "own_nets.small:classifier"
    assert spec["arguments"] == {"num_classes": 10, "width": 8}  # what json cannot store keeps its default
    assert main(["evaluate", str(out), "--threads", "1", "--device", "cpu", "--json"]) == 0
    score = json.loads(capsys.readouterr().out.splitlines()[-1])
    summary = json.loads((out / "summary.json").read_text())
    assert score["test_accuracy"] == summary["test_accuracy"]
    network = petra.load(out)
    assert weights_hash(network.state_dict()) == summary["weights_sha256"]
    assert next(iter(network.state_dict())) == "embed.weight"
    assert main(["train", "--resume", "--out", str(out), "--quiet", "--threads", "1", "--device", "cpu"]) == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_nets.small:missing", r"defines no function missing; it defines classifier, nothing: give package.module"),
        ("own_nets.small:alias", "defines no function alias"),
        ("own_nets.absent:f", r"own_nets.absent cannot be imported \(No module named 'own_nets.absent'\): start from"),
        ("shutil:rmtree", "is a module of Python's standard library"),
        ("own nets:f", "model is 'own nets:f': give package.module:function"),
    ],
)
def test_mistakes(own, name, message):
    with pytest.raises(ValueError, match=message):
        import_function(name)


def test_functions_that_return_something_else(own, capsys):
    assert main(["train", *COMMON, "--model", "own_nets.small:nothing", "--out", str(own / "run")]) == 2
    assert "own_nets.small:nothing returns a int: return the network" in capsys.readouterr().err


def test_a_registered_network_that_is_not_known_here(own, capsys, monkeypatch):
    monkeypatch.setattr("petra.models.registry._ENTRIES", dict(models.registry._ENTRIES))
    monkeypatch.syspath_prepend(own)
    from own_nets.small import classifier

    def build(in_channels: int, num_classes: int) -> petra.Network:
        return petra.Network(*petra.as_network(classifier(num_classes)))

    models.register("own-net", "for a test", build)
    out = own / "run"
    assert main(["train", *COMMON, "--model", "own-net", "--method", "delayed", "--out", str(out)]) == 0
    assert main(["evaluate", str(out), "--threads", "1", "--device", "cpu"]) == 0
    petra.load(out)
    del models.registry._ENTRIES["own-net"]  # as in another process
    with pytest.raises(
        ValueError, match=r"names the network 'own-net', which is not registered here .*import the module"
    ):
        petra.load(out)
    assert main(["evaluate", str(out), "--threads", "1", "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert "import the module that registers it before petra.load, or train with --model package.module:fun" in error
    assert "damaged" not in error


class TestModesAndWarnings:
    def test_networks_in_evaluation_mode_are_trained_in_training_mode(self):
        network = mixed_network().eval()
        make(network, stages=2)
        assert all(m.training for m in network.modules())

    def test_converted_networks_too(self):
        network = petra.as_network(timm_network("vit_tiny_patch16_224").eval())
        make(network, stages=2)
        assert all(m.training for m in (*network.modules(), *network.module.modules()))

    def test_single_modules_stay_in_evaluation_mode(self):
        network = mixed_network()
        network[0].eval()
        make(network, stages=2)
        assert not network[0].training
        assert network[1].training

    @pytest.mark.parametrize("method", ["petra", "reversible"])
    def test_nothing_to_reverse(self, method):
        network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        with pytest.warns(NotReversibleWarning, match=f"no layer of the network is reversible, so {method} stores"):
            make(network, method=method, stages=2)

    def test_no_warning(self, recwarn):
        make(reversible_network(2), stages=2)
        petra.Trainer(
            nn.Sequential(nn.Linear(4, 4)), method="backprop", loss=nn.functional.cross_entropy, optimizer=sgd
        )
        assert not [w for w in recwarn if issubclass(w.category, NotReversibleWarning)]
        assert torch.is_grad_enabled()
