"""Benchmarks and experiments: what a trial leaves alone, and mistakes in their options."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from petra import Trainer

ROOT = Path(__file__).parents[1]


def script(path, monkeypatch):
    """A script as a module, which finds its neighbours."""
    monkeypatch.syspath_prepend(str((ROOT / path).parent))
    spec = importlib.util.spec_from_file_location(path.replace("/", "_").removesuffix(".py"), ROOT / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["run", "sharing"])
def test_a_trial_of_the_tick_keeps_nothing(name, tmp_path, monkeypatch):
    module = script(f"benchmarks/tick/{name}.py", monkeypatch)
    for measured, found in (("processes", 1.0), ("streams", 1.0), ("measure", []), ("show", "")):
        if hasattr(module, measured):
            monkeypatch.setattr(module, measured, lambda *given, found=found: found)
    out = tmp_path / "out" if name == "run" else tmp_path / "out" / "sharing.json"
    for arguments, kept in ((["--smoke"], False), (["--device", "cpu"], True)):
        monkeypatch.setattr(sys, "argv", [name, *arguments, "--out", str(out)])
        module.main()
        assert out.exists() == kept


def test_guesses_that_nothing_came_of(tmp_path, monkeypatch, capsys):
    module = script("benchmarks/prediction/run.py", monkeypatch)
    few = ["--model", "revnet18", "--width", "2", "--depths", "1", "--data", "synthetic:1x8x8:2:8", "--epochs", "1"]
    for arguments, words in ((few, "fewer updates"), ([*few, "--data", "nowhere"], "no data set or folder 'nowhere'")):
        monkeypatch.setattr(sys, "argv", ["run.py", *arguments, "--quiet", "--device", "cpu", "--out", str(tmp_path)])
        with pytest.raises(SystemExit, match="2"):
            module.main()
        assert words in capsys.readouterr().err


def test_twins_that_are_there_are_held_against_what_is_asked_for(tmp_path, monkeypatch):
    module = script("experiments/twins/run.py", monkeypatch)
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "summary.json").write_text(json.dumps({"epochs": 30}))
    asked = []
    monkeypatch.setattr(module, "petra", lambda arguments: asked.append(arguments) or 2)
    with pytest.raises(SystemExit):
        module.train("rev-vit-cifar10", "vit-s", "backprop", 0, tmp_path, ["--epochs", "20"])
    assert asked[0][-1] == "--resume"


@pytest.mark.parametrize("correct", ["none", "predict,inertia:4", "coast"])
def test_theory_of_stability_is_about_what_the_engine_does(correct, monkeypatch):
    n, k, m, curvature, updates = 5, 2, 0.8, 0.7, 12
    weight = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    before = weight.weight.item()
    trainer = Trainer(
        nn.Sequential(weight, nn.Identity()),
        method="checkpointed",
        stages=2,
        order=(n, 0),
        accumulate=k,
        loss=lambda y, target: curvature * y.square().sum() / 2,
        optimizer=lambda p: torch.optim.SGD(p, 1 - m, momentum=m, nesterov=True),
        corrections=[] if correct == "none" else correct.split(","),
    )
    for _ in range(updates * k):
        trainer.step(*torch.ones(2, 1, 1, dtype=torch.float64))
    trainer.drain()
    update = script("benchmarks/prediction/stability.py", monkeypatch).update_map(curvature, n, k, m, correct, True)
    state = torch.tensor([before] * (len(update) // 2) + [0.0] * (len(update) // 2), dtype=torch.float64)
    assert weight.weight.item() == pytest.approx((torch.linalg.matrix_power(update, updates) @ state)[0].item())
