"""Twins: a training that exists already is resumed, which rejects other options."""

import json

import pytest
from helpers.scripts import import_scripts


def test_an_existing_training_is_resumed(tmp_path, monkeypatch):
    (module,) = import_scripts("experiments/twins", "run")
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "summary.json").write_text(json.dumps({"epochs": 30}))
    calls = []
    monkeypatch.setattr(module, "petra", lambda arguments: calls.append(arguments) or 2)
    with pytest.raises(SystemExit):
        module.train("rev-vit-cifar10", "vit-s", "backprop", 0, tmp_path, ["--epochs", "20"])
    assert calls[0][-1] == "--resume"
