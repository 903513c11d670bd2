"""Stored results of CIFAR-10 compared with the first epochs of repeated trainings."""

import json
import sys
import time

import pytest
from helpers.scripts import import_scripts

pytestmark = pytest.mark.slow

run, plans = import_scripts("experiments/cifar10", "run", "plans")
check, jobs, results = run.check, run.jobs, run.results
PLANS = plans.PLANS
FIRST, SECOND = PLANS["figure4"][:2]
CONFIG = {"model": "revnet18", "epochs": 30, "autocast": "bf16", "checkpoint_epochs": 10}
KEPT = {
    "config": CONFIG,
    "train_losses": [None, 1.2346, 1.0],
    "test_losses": [2.0, 1.5, 1.25],
    "test_accuracies": [0.1, 0.25, 0.5],
    "seconds": [1.0, 2.0, 3.0],
}


def made(epochs, **other):
    """Petra's metrics of a training that agrees with the stored result except for `other` in every epoch."""
    records = [dict(zip(check.COMPARED, row, strict=True)) for row in ((None, 2.0, 0.1), (1.23456, 1.49999, 0.25))]
    return "".join(json.dumps({**record, "seconds": 9.9, **other}) + "\n" for record in records[:epochs])


def folder_of(folder, text, **config):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "data": "somewhere", "newer": 1, **config}))
    (folder / "metrics.jsonl").write_text(text)
    return folder


def test_epochs_that_round_to_the_stored_values_agree(tmp_path):
    assert check.differences(folder_of(tmp_path / "run", made(2), checkpoint_epochs=1), KEPT, 2) == []


@pytest.mark.parametrize(
    ("text", "config", "message"),
    [
        (made(2, test_loss=1.5001), {}, "test loss of epoch 1 is 1.5001, stored is 2.0"),
        (made(2, train_loss=1.2346), {}, "train loss of epoch 1 is 1.2346, stored is None"),
        (made(1), {}, "only 1 of 2 epochs were trained"),
        (made(2), {"autocast": None}, "other options: autocast is None, stored is bf16"),
    ],
)
def test_differences_are_reported(text, config, message, tmp_path):
    assert check.differences(folder_of(tmp_path / "run", text, **config), KEPT, 2)[0] == message


def test_a_training_that_diverged_early_is_compared_as_far_as_it_got(tmp_path):
    short = {name: value[:1] if isinstance(value, list) else value for name, value in KEPT.items()}
    assert check.differences(folder_of(tmp_path / "run", made(1)), short, 5) == []
    assert check.differences(tmp_path / "none", short, 5) == ["it did not start"]


def test_the_stored_results_match_the_plans():
    known = results.read(run.HERE / "results")
    for plan in PLANS.values():
        for trial in plan:
            if trial.name in known:
                config = known[trial.name]["config"]
                assert (config["model"], config["epochs"]) == (trial.options["model"], trial.options["epochs"])
                assert config["seed"] == trial.seed


def test_a_job_is_done_when_it_has_enough(tmp_path):
    code = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *a: sys.exit(130))\nos.mkdir('checkpoint')\n"
    code += "open('metrics.jsonl', 'w').write('{}\\n')\ntime.sleep(60)"
    command = [sys.executable, "-S", "-c", f"import os\nos.chdir({str(tmp_path)!r})\n{code}"]
    began = time.monotonic()
    one = jobs.Job("one", command, tmp_path, enough=lambda folder: check.has_epochs(folder, 1))
    assert jobs.run_jobs([one], at_once=1) == jobs.Outcome(done=["one"])
    assert time.monotonic() - began < 30
    assert not (tmp_path / "checkpoint").exists()


def test_the_runner_checks_stored_results_and_changes_none(tmp_path, monkeypatch, capsys):
    kept = tmp_path / "results"
    kept.mkdir()
    (kept / results.FILE).write_text(json.dumps({FIRST.name: KEPT, SECOND.name: KEPT}))
    before = (kept / results.FILE).read_text()
    out = tmp_path / "out"
    folder_of(out / run.CHECKS / FIRST.name, made(2, test_loss=9.0))  # of an earlier check, which is removed

    def faked(trial, given, data, extra):
        folder = given.out / trial.name
        text = made(2) if trial is FIRST else made(2, test_accuracy=0.3)
        code = f"import time\nfrom pathlib import Path\nfolder = Path({str(folder)!r})\ntime.sleep(0.5)\n"
        code += f"(folder / 'config.json').write_text({json.dumps(CONFIG)!r})\n"
        code += f"(folder / 'metrics.jsonl').write_text({text!r})\ntime.sleep(60)"
        return jobs.Job(trial.name, [sys.executable, "-S", "-c", code], folder)

    monkeypatch.setattr(run, "job", faked)
    monkeypatch.setattr(run.cache, "decoded", lambda data, out: data)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    arguments = ["--data", str(tmp_path), "--out", str(out), "--results", str(kept), "--jobs", "2", "--check", "2"]
    monkeypatch.setattr(sys, "argv", ["run.py", "figure4", *arguments])
    assert run.main() == 1
    said = capsys.readouterr().out
    assert "DIFFERS: test accuracy of epoch 1 is 0.3, stored is 0.1; test accuracy of epoch 2" in said
    assert "1 of 2 trainings agree with the stored results" in said
    assert (kept / results.FILE).read_text() == before
    monkeypatch.setattr(sys, "argv", ["run.py", "figure4", *arguments, "--only", FIRST.name])
    assert run.main() == 0


@pytest.mark.parametrize(("timed", "words"), [(False, "0.1\n"), (True, "0.1 (it was trained with --cudnn-benchmark, ")])
def test_trainings_with_cudnn_benchmark_may_differ(timed, words, tmp_path, capsys):
    folder_of(tmp_path / FIRST.name, made(1, test_accuracy=0.3))
    assert check.report([FIRST], tmp_path, {FIRST.name: {**KEPT, "environment": {"cudnn_benchmark": timed}}}, 1) == 1
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--check", "0"], "--check is 0: give 1 epoch or more"),
        (["--check", "2", "--list"], "--check trains: give it without --list"),
        (["--check", "2"], "finds no results of these trainings"),
    ],
)
def test_a_check_of_nothing_is_rejected(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run.py", "figure4", "--data", ".", "--results", "none", *arguments])
    with pytest.raises(SystemExit, match="2"):
        run.main()
    assert words in capsys.readouterr().err
    assert not any(tmp_path.iterdir())
