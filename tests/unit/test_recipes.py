import argparse
import json
import shlex

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from petra import models
from petra.cli.main import main
from petra.cli.options import add_run_options, spell_options
from petra.cli.options import given as read
from petra.cli.parser import build_parser
from petra.runs.config import RunConfig
from petra.runs.recipes import RECIPES
from petra.runs.run import Run
from petra.trainer.lr_schedules import StepLRSchedule
from petra.trainer.optimizers import base_learning_rate, sgd


def test_learning_rate_rule_of_the_paper():
    assert base_learning_rate(64, 1) == 0.1 * 64 / 256
    assert base_learning_rate(64, 16) == 0.1 * 64 * 16 / 256


def test_curve_of_the_paper():
    """Warm-up of five epochs to 1, then a tenth after epochs 150 and 225 of 300."""
    curve = StepLRSchedule(epochs=300, updates_per_epoch=10)
    assert curve(0) == pytest.approx(1 / 50)
    assert curve(24) == pytest.approx(0.5)
    assert [curve(49), curve(50), curve(1499)] == [1, 1, 1]
    assert curve(1500) == curve(2249) == pytest.approx(0.1)
    assert curve(2250) == curve(2999) == pytest.approx(0.01)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.4)
    scheduler = curve.scheduler(optimizer)
    for update in range(60):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.4 * curve(update))
        optimizer.step()
        scheduler.step()


def test_no_weight_decay_on_norms_and_biases():
    network = models.create("revnet18", width=4, depths=(1, 1))
    optimizer = sgd(list(network.parameters()), lr=0.1, weight_decay=5e-4)
    decay = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert len(decay) == len(list(network.parameters()))
    for name, parameter in network.named_parameters():
        plain = "bn" in name or name.endswith("bias")
        assert decay[parameter] == (0.0 if plain else 5e-4), name
    assert all(group["nesterov"] and group["momentum"] == 0.9 for group in optimizer.param_groups)


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_valid(name):
    config = RunConfig.from_options(name, {"data": "digits"})
    config.validate()
    assert RunConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize("name", RECIPES)
def test_what_a_recipe_stands_for(name, capsys):
    """The command that is shown does the same."""
    assert main(["recipes", name]) == 0
    shown = shlex.split(capsys.readouterr().out.partition("\n\n")[2].replace("\\\n", " "))
    assert shown[:2] == ["petra", "train"]
    options = {"data": "digits", **read(build_parser().parse_args(shown[1:]))}
    assert RunConfig.from_options(None, options) == RunConfig.from_options(name, {"data": "digits"})


def test_any_options_are_spelled():
    options = {
        **{"coupling": "fixed-point", "drop_last": False, "schedule": [4, 2, 0]},
        "corrections": ("predict", "shrink:0.9"),
        **{"lr": 1 / 3, "beta2": 0.98, "lr_milestones": (0.5, 1 / 3)},
        "model_options": {"depths": [2], "window": 4, "fuse": "mlp", "rates": [0.1, 0.2]},
    }
    assert read(build_parser().parse_args(["train", *spell_options(options)])) == options


def test_recipe_of_the_paper():
    config = RunConfig.from_options("petra-cifar10", {"data": "digits"})
    assert (config.model, config.stages, config.batch_size, config.epochs) == ("revnet18", 10, 64, 300)
    assert (config.schedule, config.weight_decay, config.warmup_epochs) == ("lock-step", 5e-4, 5)
    assert config.checkpoint_epochs == 10
    assert config.drop_last
    assert config.base_lr == 0.1 * 64 * config.accumulate / 256


def test_options_override_recipes():
    config = RunConfig.from_options("petra-cifar10", {"data": "digits", "method": "backprop"})
    assert config.schedule is None  # the recipe's order is for its own method
    config.validate()
    config = RunConfig.from_options("digits", {"model_options": {"width": 8}})
    assert config.model_options == {"width": 8, "depths": [2, 2]}
    assert RunConfig.from_options("digits", {"model": "resnet18"}).model_options == {}
    assert RunConfig.from_options("digits", {"model": "revnet34"}).model_options == {"width": 16}
    assert RunConfig.from_options("petra-cifar10", {"data": "d", "model_options": {"depths": [1]}}).stages == 3
    with pytest.raises(ValueError, match="--data is missing: give it, because the recipe petra-cifar10 does not"):
        RunConfig.from_options("petra-cifar10", {})


def test_more_replicas_than_samples_are_refused_before_any_is_started():
    with pytest.raises(ValueError, match="--replicas is 33, but they share micro-batches of 32 samples"):
        RunConfig.from_options("digits", {"replicas": 33}).validate()


@pytest.mark.parametrize("given", [True, False])
def test_what_is_left_of_an_epoch_is_left_out_on_request(given, tmp_path):
    flag = ["--drop-last" if given else "--no-drop-last"]
    parser = argparse.ArgumentParser()
    add_run_options(parser, with_method=True)
    options = parser.parse_args(["--recipe", "digits", "--batch-size", "1000", *flag])
    run = Run(RunConfig.from_options("digits", read(options)), tmp_path, quiet=True)
    assert len(run.train) == (1 if given else 2)
    run.close()


def test_a_run_follows_its_configuration(tmp_path):
    """Learning rate of every update, and every micro-batch of every epoch in an update in the end."""
    options = {"epochs": 2, "batch_size": 200, "accumulate": 3, "model_options": {"width": 2, "depths": [1, 1]}}
    run = Run(
        RunConfig.from_options("digits", {**options, "lr_milestones": (0.5,), "stages": 4, "label_smoothing": 0.3}),
        tmp_path,
        quiet=True,
    )
    rates = []
    run.trainer.executor.observers.append(
        lambda tick, action, stage: (
            rates.append(stage.optimizer.param_groups[0]["lr"]) if stage.index == 0 and action.kind == "U" else None
        )
    )
    summary = run()
    per_epoch = len(run.train) / 3  # 8 micro-batches an epoch
    curve = StepLRSchedule(2, per_epoch, warmup_epochs=1.0, lr_milestones=(0.5,))
    assert rates == pytest.approx([0.05 * curve(update + 1) for update in range(6)])
    assert [stage.updates for stage in run.trainer.stages] == [6] * 4  # 16 = 5 * 3 + 1
    assert not run.trainer.executor.in_flight
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    best = max(record["test_accuracy"] for record in records)
    assert summary["best_test_accuracy"] == best
    assert records[summary["best_epoch"] - 1]["test_accuracy"] == best
    assert records[-1]["test_loss"] == run.trainer.evaluate(run.test.epoch(0), cross_entropy).loss  # not smoothed
