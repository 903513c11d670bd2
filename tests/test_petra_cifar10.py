"""The experiments on CIFAR-10: what is planned, how it is carried out, and tables from given results."""

import argparse
import json
import sys
import time
from pathlib import Path

import pytest
import torch

from petra.cli.options import add_checkpoint_options, add_run_options, given
from petra.training.config import RunConfig
from petra.training.data import load
from petra.training.data.fingerprint import fingerprint
from petra.training.data.images import assemble

sys.path.insert(0, str(Path(__file__).parents[1] / "experiments" / "petra_cifar10"))
import cache
import jobs
import results
import tables
from plans import PLANS

ALL = {trial.name: trial for plan in PLANS.values() for trial in plan}


def configured(trial):
    """The configuration that petra makes of a trial's command line."""
    parser = argparse.ArgumentParser()
    add_run_options(parser, with_method=True)
    add_checkpoint_options(parser)
    parser.add_argument("--every", type=int)
    options = parser.parse_args([*trial.arguments()[1:], "--data", "digits"])
    return RunConfig.from_options(options.recipe, given(options))


def test_names_stand_for_one_thing_each():
    assert len(ALL) == len({json.dumps([t.options, t.seed, t.command], sort_keys=True) for t in ALL.values()})
    for plan in PLANS.values():
        for trial in plan:
            assert trial.options == ALL[trial.name].options


def test_every_trial_is_a_configuration():
    for trial in ALL.values():
        if trial.seed == 0:
            configured(trial).validate()


def test_the_paper_s_recipe():
    by_name = {name: configured(trial) for name, trial in ALL.items()}
    petra = by_name["revnet18-petra-lock-step-k4-e100-s1"]
    assert (petra.epochs, petra.batch_size, petra.base_lr, petra.seed, petra.stages) == (100, 64, 0.1, 1, 10)
    assert (petra.decay, petra.drops, petra.warmup_epochs) == (5e-4, (0.5, 0.75), 5.0)
    backprop = by_name["resnet18-backprop-k1-e100-s0"]
    assert (backprop.batch_size, backprop.base_lr, backprop.order) == (128, 0.1, None)
    short = by_name["revnet18-petra-low-staleness-predict-k1-e30-s0"]
    assert (short.base_lr, short.drops, short.warmup_epochs) == (0.025, (0.5, 0.8), 2.0)
    assert short.corrections == ("predict",)
    assert by_name["revnet50-petra-stashed-lock-step-k1-e30-s0"].stages == 18


def result(accuracy, loss=0.1):
    figures = {"test_accuracy": accuracy, "best_after_last_drop": accuracy, "mean_after_last_drop": accuracy}
    return {**figures, "train_loss": loss}


def test_table2_chooses_k_on_the_training_loss():
    known = {
        "revnet18-backprop-k1-e100-s0": result(0.94),
        "revnet18-backprop-k1-e100-s1": result(0.95),
        "revnet18-petra-lock-step-k4-e100-s0": result(0.93, loss=0.02),
        "revnet18-petra-lock-step-k8-e100-s0": result(0.96, loss=0.03),
    }
    rows = {line.split(" | ")[1]: line for line in tables.table2(known).splitlines() if line.startswith("| revnet18")}
    assert "94.50 ± 0.71" in rows["backprop, batch 128"]
    assert "-1.50 | 94.9" in rows["PETRA, lock-step, k = 4 (chosen)"]
    assert "+1.50 | 94.9" in rows["PETRA, lock-step, k = 8"]
    assert tables.NOT_RUN in rows["PETRA, lock-step, k = 2"]


@pytest.mark.parametrize("plan", PLANS)
def test_tables_of_nothing_say_so(plan):
    assert tables.NOT_RUN in tables.TABLES[plan]({})


def test_results_are_read_once_and_kept(tmp_path):
    trial = ALL["revnet18-petra-lock-step-k1-e30-s0"]
    folder = tmp_path / "out" / trial.name
    folder.mkdir(parents=True)
    rates = [0.1, 0.1, 0.01, 0.01]
    records = [
        {"test_accuracy": a / 10, "lr": lr, "train_loss": None} for a, lr in zip((1, 9, 5, 4), rates, strict=True)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    (folder / "config.json").write_text("{}")
    assert results.collect([trial], tmp_path / "out", tmp_path / "results") == {}
    (folder / "summary.json").write_text(json.dumps(dict.fromkeys(results.KEPT, 1)))
    found = results.collect([trial], tmp_path / "out", tmp_path / "results")[trial.name]
    assert found["best_after_last_drop"] == 0.5
    assert found["mean_after_last_drop"] == pytest.approx(0.45)
    assert results.collect([trial], tmp_path / "elsewhere", tmp_path / "results")[trial.name] == found


def test_images_are_the_same_decoded(tmp_path):
    images, labels = torch.randint(0, 256, (10, 3, 32, 32), dtype=torch.uint8), torch.arange(10)
    data = assemble("cifar", (images, labels), (images[:4], labels[:4]), num_classes=10, crop_padding=4, flip=True)
    cache.write(data, tmp_path / cache.NAME)
    again = load(str(tmp_path / cache.NAME))
    assert fingerprint(again) == fingerprint(data)
    assert (again.crop_padding, again.flip, again.mean, again.std) == (4, True, data.mean, data.std)


def job(tmp_path, name, code):
    return jobs.Job(name, [sys.executable, "-S", "-c", code], tmp_path / name)


def test_jobs_end_well_or_badly_or_are_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "LEAST", 0.0)
    stops = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *a: sys.exit(130))\ntime.sleep(60)"
    todo = [job(tmp_path, "good", ""), job(tmp_path, "bad", "print('said this')\nraise SystemExit(2)")]
    todo += [job(tmp_path, f"long{i}", stops) for i in range(3)]
    began = time.monotonic()
    outcome = jobs.carry_out(todo, at_once=2, limit=1.5)
    assert time.monotonic() - began < 30
    assert outcome.done == ["good"]
    assert outcome.failed == {"bad": "said this"}
    assert sorted(outcome.stopped) == ["long0", "long1"]  # the third was never begun
    assert not (tmp_path / "long2").exists()
