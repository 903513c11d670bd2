"""`petra export`."""

import warnings

import pytest
import torch
from safetensors.torch import load_file

import petra
from petra.cli.main import main
from petra.distributed import SingleProcess
from petra.trainer.checkpoint_folder import Checkpoints

pytestmark = pytest.mark.slow

COMMON = ["--quiet", "--threads", "1", "--device", "cpu", "--epochs", "1", "--warmup-epochs", "0", "--stages", "3"]
DIGITS = ["--model", "revnet18", "--width", "4", "--depths", "1,1", "--data", "digits"]
GPT = ["--model", "rev-gpt", "--width", "8", "--depth", "1", "--heads", "1", "--seq-len", "12", "--optimizer", "adamw"]


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "digits"
    assert main(["train", *COMMON, *DIGITS, "--out", str(folder)]) == 0
    return folder


def export(*arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporters, about themselves
        return main(["export", *map(str, arguments)])


def test_programs(digits, tmp_path, capsys):
    network, x = petra.load(digits), torch.randn(5, 1, 8, 8)
    assert export(digits, "--format", "torch-export", "--out", tmp_path / "digits.pt2") == 0
    assert capsys.readouterr().out == f"revnet18 in {tmp_path / 'digits.pt2'}\n"
    program = torch.export.load(tmp_path / "digits.pt2").module()
    with torch.no_grad():
        assert torch.equal(program(x), network(x))


def test_onnx(digits, tmp_path, monkeypatch):
    written = {}
    monkeypatch.setattr("petra.cli.export.export_onnx", lambda network, x, **options: written.update(x=x, **options))
    assert export(digits, "--format", "onnx", "--image-size", 16, "--no-check", "--out", tmp_path / "digits.onnx") == 0
    assert written.pop("x").shape == (2, 1, 16, 16)
    assert written == {"path": tmp_path / "digits.onnx", "check": False}


def test_weights(digits, tmp_path):
    import torch.distributed.checkpoint as dcp

    weights = petra.load(digits).state_dict()
    assert export(digits, "--format", "dcp", "--out", tmp_path / "dcp") == 0
    state = {name: torch.zeros_like(value) for name, value in weights.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is one process
        dcp.load(state, checkpoint_id=tmp_path / "dcp")
    assert export(digits, "--out", tmp_path / "new" / "digits.safetensors") == 0
    saved = load_file(tmp_path / "new" / "digits.safetensors")
    for name, value in weights.items():
        assert torch.equal(state[name], value)
        assert torch.equal(saved[name], value)


def has_no_gradient(name):
    """Whether it is the bias of a convolution, all of which come before a normalization that removes it."""
    return "conv" in name and name.endswith(".bias")


def test_a_checkpoint_with_its_optimizer_is_read_by_plain_pytorch(digits, tmp_path):
    """The momentum and settings of every parameter, under its name, go into an optimizer of PyTorch."""
    import torch.distributed.checkpoint as dcp

    assert export(digits, "--format", "dcp-checkpoint", "--out", tmp_path / "dcp") == 0
    network = petra.load(digits)
    expected = {name: value.clone() for name, value in network.state_dict().items()}
    names = [name for name, _ in network.named_parameters()]
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0, momentum=0.9)
    state = {
        "model": {name: torch.zeros_like(value) for name, value in expected.items()},
        "optimizer": {
            "state": {name: {"momentum_buffer": torch.zeros_like(p)} for name, p in network.named_parameters()},
            "settings": {name: {"lr": 0.0, "momentum": 0.0} for name in names},
        },
        "progress": {"microbatches": 0},
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is one process
        dcp.load(state, checkpoint_id=tmp_path / "dcp")
    assert all(torch.equal(state["model"][name], value) for name, value in expected.items())
    checkpoints = Checkpoints(digits / "checkpoint", SingleProcess())
    for stage in range(3):
        for name, saved in checkpoints.stage(stage)["weights"]["optimizer"]["state"].items():
            assert torch.equal(state["optimizer"]["state"][name]["momentum_buffer"], saved["momentum_buffer"])
            assert saved["momentum_buffer"].any() != has_no_gradient(name)
    assert state["progress"]["microbatches"] == checkpoints.run()["progress"]["microbatches"] > 0
    assert all(settings["momentum"] == 0.9 for settings in state["optimizer"]["settings"].values())
    states = {i: state["optimizer"]["state"][name] for i, name in enumerate(names)}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": states})
    for name, parameter in network.named_parameters():
        assert optimizer.state[parameter]["momentum_buffer"].any() != has_no_gradient(name)
    assert export(digits, "--format", "dcp", "--checkpoint", 3, "--out", tmp_path / "other") == 2
    assert export(digits, "--format", "dcp-checkpoint", "--checkpoint", 77, "--out", tmp_path / "other") == 2


def test_language_models(tmp_path):
    (tmp_path / "verse.txt").write_text("so long as men can breathe or eyes can see\n" * 12)
    folder = tmp_path / "verse"
    assert main(["train", *COMMON, *GPT, "--data", f"text:{tmp_path / 'verse.txt'}", "--out", str(folder)]) == 0
    assert export(folder, "--format", "torch-export") == 0
    x = torch.randint(15, (3, 12))
    with torch.no_grad():
        assert torch.equal(torch.export.load(folder / "network.pt2").module()(x), petra.load(folder)(x))


def test_mistakes(digits, tmp_path, capsys):
    (tmp_path / "there").touch()
    assert export(digits, "--out", tmp_path / "there") == 2
    assert "exists: delete it, or give another --out" in capsys.readouterr().err
