"""Loggers with the real packages: the records of a training arrive there, also after a resumption."""

import json
from time import sleep

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import petra
from petra.trainer.loggers import JsonLogger, MLflowLogger, TensorBoardLogger, WandbLogger, make_logger


class Stop(petra.Callback):
    """Ends a training after a step, as a crash would."""

    def on_update(self, loop):
        if loop.step == 3:
            raise KeyboardInterrupt


def fit(folder, *callbacks, **options):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    trainer = petra.Trainer(network, loss=cross_entropy, stages=2, optimizer=lambda p: torch.optim.SGD(p, 0.1))
    data = [(torch.ones(2, 3), torch.tensor([0, 1]))] * 2
    arguments = {"epochs": 3, "checkpoint_every": 1, "out": folder, "quiet": True} | options
    return trainer.fit(data, data, callbacks=callbacks, **arguments).records


def fit_twice(folder, make):
    """Stop in the second epoch, and resume."""
    with pytest.raises(KeyboardInterrupt):
        fit(folder, make(), Stop())
    return fit(folder, make(), resume=True)


def test_json_lines(tmp_path):
    expected = fit_twice(tmp_path / "run", lambda: JsonLogger(tmp_path / "log.jsonl"))
    assert [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()] == expected


def test_tensorboard(tmp_path):
    module = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    expected = fit_twice(tmp_path, TensorBoardLogger)
    found = module.EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("test_loss")
    assert [(event.step, event.value) for event in found] == [
        (record["step"], pytest.approx(record["test_loss"])) for record in expected
    ]
    with pytest.raises(ValueError, match="has no folder for tensorboard: give out to fit"):
        fit(None, TensorBoardLogger(), checkpoint_every=None)


@pytest.mark.slow
def test_wandb_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    fit(tmp_path, WandbLogger(project="trial", name="first"))
    identity = json.loads((tmp_path / "wandb.json").read_text())["id"]
    written = list((tmp_path / "wandb").glob(f"offline-run-*-{identity}/run-{identity}.wandb"))
    assert len(written) == 1
    for _ in range(100):  # its own process writes
        if b"test_loss" in written[0].read_bytes():
            break
        sleep(0.1)
    assert b"test_loss" in written[0].read_bytes()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*:FutureWarning:mlflow.*")
def test_mlflow_in_files(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "store").as_uri()
    expected = fit_twice(tmp_path / "run", lambda: MLflowLogger("trial", tracking_uri=uri))
    client = mlflow.MlflowClient(tracking_uri=uri)
    runs = client.search_runs([client.get_experiment_by_name("trial").experiment_id])
    assert [run.info.status for run in runs] == ["FINISHED"]
    history = client.get_metric_history(runs[0].info.run_id, "test_loss")
    assert {(m.step, m.value) for m in history} == {(record["step"], record["test_loss"]) for record in expected}
    assert runs[0].data.params["method"] == "petra"


def test_unknown_loggers_and_missing_packages(monkeypatch):
    with pytest.raises(ValueError, match="there is no logger named 'wanbd': did you mean 'wandb'"):
        make_logger("wanbd")
    for name in ("wandb", "mlflow"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
        with pytest.raises(ValueError, match=rf"the {name} logger needs a package .*: pip install 'petra\[{name}\]'"):
            make_logger(name)
