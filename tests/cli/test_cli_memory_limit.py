"""`petra train --memory` and `--storage`."""

import json

import pytest
import torch
from helpers.commands import SMALL

from petra.cli.main import main
from petra.runs.config import RunConfig
from petra.runs.fit_run import _Steps
from petra.runs.trained_network import NetworkSpec
from petra.runs.trainer_setup import TrainerSetup

NETWORK = {"model": "revnet18", "model_options": {"width": 2, "depths": [1, 1]}, "batch_size": 4, "epochs": 1}
REVERSIBLE = [*SMALL, "--method", "reversible", "--epochs", "1", "--batch-size", "20", "--device", "cpu"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("petra.memory.step_cost._SECONDS", 0.0)


def train(folder, *options):
    return main(["train", *REVERSIBLE, *options, "--out", str(folder)])


def config(folder):
    return json.loads((folder / "config.json").read_text())


def test_a_run_that_fits(tmp_path, capsys):
    """The plan is printed, recorded and used; the run can be resumed with another one."""
    assert train(tmp_path / "run", "--memory", "1GiB", "--checkpoint-every", "1") == 0
    error = capsys.readouterr().err
    assert "of 1.00 GiB" in error
    assert "storage of layers" in error
    storage = config(tmp_path / "run")["storage"]
    assert any("store" in part for part in storage)
    assert main(["evaluate", str(tmp_path / "run"), "--device", "cpu"]) == 0


def test_a_run_that_does_not_fit(tmp_path, capsys):
    assert train(tmp_path / "run", "--memory", "1KiB") == 2
    error = capsys.readouterr().err
    assert "no training step fits into 1.0 KiB: the smallest needs" in error
    assert "more --stages" in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory", "lots"], "--memory is 'lots': 'lots' is not an amount of memory: give one like 8GiB"),
        (["--memory", "8 GiB", "--method", "petra"], "method petra does not let it: add --method reversible"),
        (["--memory", "8 GiB", "--ranks", "2"], "--memory is for one process: leave it out, or train with --ranks 1"),
        (["--storage", "keep"], "--storage is 'keep': storage is 'keep': give one of reconstruct"),
        (["--storage", "store", "--method", "petra"], "is for method reversible"),
        (["--storage", "2*store"], "2 storages for "),
        (["--storage", "selective"], "is for your own training step"),
    ],
)
def test_mistakes(options, message, tmp_path, capsys):
    try:
        code = train(tmp_path / "run", *options)
    except SystemExit as ended:
        code = ended.code
    error = capsys.readouterr().err
    assert (code, error.count("\n")) == (2, 1)
    assert message in error
    assert not (tmp_path / "run").exists()


def test_storages_give_the_same_training(tmp_path):
    losses = []
    for index, storage in enumerate(["reconstruct", "store"]):
        assert train(tmp_path / str(index), "--storage", storage, "--quiet") == 0
        losses.append(json.loads((tmp_path / str(index) / "summary.json").read_text())["test_loss"])
        assert config(tmp_path / str(index))["storage"] == [storage]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_parts_of_a_batch_train_the_same_network():
    """Also after the whole batch has followed its parts, as when the best plans are measured again."""
    config = RunConfig.from_options(None, {**NETWORK, "data": "synthetic:1x8x8:3:40", "method": "reversible"})
    data = config.load_data()
    setup = TrainerSetup(config, NetworkSpec.of(config, data), 1, torch.device("cpu"), {}, False)
    x, y = torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 0])
    steps = _Steps(config, setup, x, y)
    for parts in (1, 2, 1):
        steps.run(parts)
        assert steps._trainer.network is steps.network


def test_repeated_layers_that_are_not_reversible_keep_what_a_trainer_can_store(tmp_path):
    vit = ("--model", "vit-s", "--stages", "1", "--set", "patch=4", "--width", "16", "--depth", "2", "--heads", "2")
    options = ("train", *vit, "--data", "synthetic:1x8x8:3:40", "--method", "reversible", "--max-steps", "1")
    assert main([*options, "--memory", "520KiB", "--device", "cpu", "--quiet", "--out", str(tmp_path / "run")]) == 0
    assert config(tmp_path / "run")["storage"] == ["4*store"]
