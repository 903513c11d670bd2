"""The experiments on CIFAR-10: the plans, how they are run, and tables and figures of given results."""

import argparse
import functools
import json
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch
from helpers.scripts import import_scripts

from petra import NonFiniteLoss, models
from petra.cli.main import main
from petra.cli.options import add_checkpoint_options, add_run_options, given
from petra.data import load_data
from petra.data.dataset import fingerprint
from petra.data.images import build_image_data
from petra.measure.gradient_similarity import METRICS
from petra.runs.config import RunConfig

pytestmark = pytest.mark.slow

run, plans, tables, replays = import_scripts("experiments/cifar10", "run", "plans", "tables", "replay")
cache, figures, jobs, results = run.cache, run.figures, run.jobs, run.results
PLANS, replay = plans.PLANS, replays.replay
ALL = {trial.name: trial for plan in PLANS.values() for trial in plan}


@functools.cache
def parser():
    found = argparse.ArgumentParser()
    add_run_options(found, with_method=True)
    add_checkpoint_options(found)
    found.add_argument("--every", type=int)
    return found


def configured(trial):
    """The configuration that Petra makes from the command line of a trial."""
    options = parser().parse_args([*trial.arguments()[1:], "--data", "digits"])
    return RunConfig.from_options(options.recipe, given(options))


def test_each_name_means_one_training():
    assert len(ALL) == len({json.dumps([t.options, t.seed, t.command], sort_keys=True) for t in ALL.values()})
    for plan in PLANS.values():
        for trial in plan:
            assert trial.options == ALL[trial.name].options


def test_every_trial_is_a_configuration(monkeypatch):
    with torch.device("meta"):  # once for all trials
        outlines = {name: models.create(name) for name in {trial.options["model"] for trial in ALL.values()}}
    monkeypatch.setattr("petra.runs.config.outline", lambda model, options: outlines[model])
    for trial in ALL.values():
        if trial.seed == 0:
            configured(trial).validate()


def test_the_paper_s_recipe():
    petra = configured(ALL["revnet18-petra-lock-step-k4-e100-s1"])
    assert (petra.epochs, petra.batch_size, petra.base_lr, petra.seed, petra.stages) == (100, 64, 0.1, 1, 10)
    assert (petra.decay, petra.lr_milestones, petra.warmup_epochs) == (5e-4, (0.5, 0.75), 5.0)
    backprop = configured(ALL["resnet18-backprop-k1-e100-s0"])
    assert (backprop.batch_size, backprop.base_lr, backprop.schedule) == (128, 0.1, None)
    short = configured(ALL["revnet18-petra-low-staleness-predict-k1-e30-s0"])
    assert (short.base_lr, short.lr_milestones, short.warmup_epochs) == (0.025, (0.5, 0.8), 2.0)
    assert short.corrections == ("predict",)
    assert configured(ALL["revnet50-petra-stashed-lock-step-k1-e30-s0"]).stages == 18


def test_the_features_replay_paper_s_recipe():
    assert len(PLANS["replay"]) == 30
    for trial in PLANS["replay"]:
        config = configured(trial)
        assert "--recipe" not in trial.arguments()
        assert config.epochs == (30 if config.model == "revnet18" else 50)
        assert (config.batch_size, config.base_lr, config.beta1) == (128, 0.01, 0.9)
        assert (config.decay, config.lr_milestones, config.warmup_epochs) == (5e-4, (0.5, 0.75), 0.0)
        assert ("--every" in trial.arguments()) == trial.watched
    assert not {t.name for t in replay(3)} & set(ALL)  # the names say how many epochs
    assert {t.options["epochs"] for t in replay(3)} == {3}


def test_a_beginning_is_the_first_epoch_of_a_training_that_is_watched():
    whole = [configured(t) for t in PLANS["replay"] if t.watched]
    for trial in PLANS["beginning"]:
        config = configured(trial)
        assert (trial.options["every"], config.epochs, config.lr_milestones) == (1, 1, (1.0,))
        assert any(replace(config, epochs=w.epochs, lr_milestones=w.lr_milestones) == w for w in whole)
        whole = [w for w in whole if (w.model, w.method) != (config.model, config.method)]
    assert whole == []


@pytest.mark.parametrize("plan", ["replay", "fidelity", "table2"])
def test_a_smoke_of_each_kind_is_a_configuration(plan):
    config = configured(PLANS[plan][-1].smoke())
    config.validate()
    assert (config.epochs, config.model_options["width"]) == (2, 4)


def result(accuracy, loss=0.1):
    figures = {"test_accuracy": accuracy, "best_after_last_drop": accuracy, "mean_after_last_drop": accuracy}
    return {**figures, "train_loss": loss}


def test_table2_chooses_k_on_the_training_loss():
    known = {
        "revnet18-backprop-k1-e100-s0": result(0.94),
        "revnet18-backprop-k1-e100-s1": result(0.95),
        "revnet18-petra-lock-step-k4-e100-s0": result(0.93, loss=0.02),
        "revnet18-petra-lock-step-k8-e100-s0": result(0.96, loss=0.03),
        "revnet18-backprop-k4-e100-s0": result(0.955),
    }
    rows = {line.split(" | ")[1]: line for line in tables.table2(known).splitlines() if line.startswith("| revnet18")}
    assert "94.50 ± 0.71 | 94.50 ± 0.71 | 0.1000 | 2/3 |  | 94.9" in rows["backprop, batch 128"]
    assert "+1.00 | 94.9" in rows["backprop, batch 64 × 4"]
    assert "-1.50 | 94.9" in rows["PETRA, lock-step, k = 4 (lowest training loss)"]
    assert "+1.50 | 94.9" in rows["PETRA, lock-step, k = 8"]
    assert tables.NOT_RUN in rows["PETRA, lock-step, k = 2"]


@pytest.mark.parametrize("plan", PLANS)
def test_tables_without_results_say_so(plan):
    assert tables.NOT_RUN in tables.TABLES[plan]({})


def trained(accuracies, **more):
    return {"config": {"epochs": 30}, "test_accuracies": accuracies, "train_losses": [2.3], **more}


def test_the_table_of_features_replay_has_errors_sigma_and_divergence():
    sigma = [{"stage": s, "measurements": 9, "sigma": 0.9, "lowest_sigma": 0.5} for s in range(4)]
    known = {
        "resnet164-basic-backprop-K1-e50-s0": trained([0.94, 0.93]),
        "resnet164-basic-features-replay-K2-e50-s0": trained([0.9, 0.945]),
        "resnet164-basic-features-replay-K4-e50-watched-s0": trained([0.9], sigma=sigma),
        "resnet164-basic-dni-K2-e50-s0": trained([0.2], diverged="the loss is nan"),
        "resnet164-basic-dni-K4-e50-s0": trained([], diverged="the loss is nan"),
        "resnet101-cifar-backprop-K1-e50-s0": trained([0.97], train_losses=[23.0]),
        "resnet101-cifar-ddg-K4-e50-s0": trained([0.1], train_losses=[2.3, 4567.8, 2.3]),
        "resnet101-cifar-backprop-K1-e50-s1": trained([0.9]),
        "resnet101-cifar-features-replay-K4-e50-s1": trained([0.91]),
    }
    table = tables.replay(known)
    assert "| resnet164-basic | backprop | 1 | 0 | 6.00 % | 7.00 % |  | 6.40 % | 2/30 |" in table
    assert "| resnet164-basic | features-replay | 2 | 0 | 5.50 % | 5.50 % | -0.50 | 6.03 % | 2/30 |" in table
    assert "| resnet164-basic | dni | 2 | 0 | 80.00 % | diverged |  | diverges | 1/30, diverged |" in table
    assert "| resnet164-basic | dni | 4 | 0 |  | diverged |  | diverges | 0/30, diverged |" in table
    assert f"| resnet164-basic | ddg | 2 | 0 | {tables.NOT_RUN} |" in table
    assert "| resnet101-cifar | backprop | 1 | 0 | 3.00 % | 3.00 % |  | 5.25 % | 1/30 |" in table
    assert (
        "| resnet101-cifar | ddg | 4 | 0 | 90.00 % | 90.00 % | +87.00 |  | 1/30, training loss up to 4,568 |" in table
    )
    assert "| resnet101-cifar | features-replay | 4 | 1 | 9.00 % | 9.00 % | -1.00 |  | 1/30 |" in table
    assert "| resnet164-basic-features-replay-K4-e50-watched | " + "0.900 (0.500) | " * 4 + "9 |" in table


def test_the_order_is_chosen_by_training_loss_too_and_a_correction_is_not():
    losses = {"lock-step": 0.03, "low-staleness": 0.02, "low-staleness-predict+inertia4": 0.01}
    known = {f"revnet50-petra-{how}-k8-e100-s0": result(0.9, loss=loss) for how, loss in losses.items()}
    assert tables.chosen("table2", "revnet50", known) == "revnet50-petra-low-staleness-k8-e100"


def test_what_diverged_is_in_no_mean_and_not_hidden():
    known = {f"revnet18-petra-lock-step-k4-e100-s{s}": result(0.9, loss=0.01) for s in (0, 1)}
    known["revnet18-petra-lock-step-k8-e100-s0"] = result(0.8, loss=0.02)
    assert tables.chosen("table2", "revnet18", known) == "revnet18-petra-lock-step-k4-e100"
    known["revnet18-petra-lock-step-k4-e100-s2"] = {"diverged": "the loss is nan", "test_accuracies": [0.1]}
    assert tables.chosen("table2", "revnet18", known) == "revnet18-petra-lock-step-k8-e100"
    assert "90.00 ± 0.00, 1 diverged | 90.00 ± 0.00, 1 diverged | 0.0100 | 3/3" in tables.table2(known)
    lost = {t.name: {"diverged": "the loss is nan"} for t in PLANS["figure4"]}
    assert "| 32 | diverged | diverged |  |" in tables.figure4(lost)


def run_of(folder, accuracies, rates=None, lr_milestones=(0.25, 0.5)):
    """Write a folder as Petra leaves it before the end."""
    folder.mkdir(parents=True)
    rates = rates or [0.1] * len(accuracies)
    records = [
        {"test_accuracy": a, "lr": lr, "train_loss": None, "test_loss": float("nan"), "seconds": 1.26 * i}
        for i, (a, lr) in enumerate(zip(accuracies, rates, strict=True))
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "config.json").write_text(json.dumps({"data": "somewhere", "epochs": 4, "lr_milestones": lr_milestones}))


@pytest.mark.parametrize("second", [0.1, 0.01])  # where nothing is in flight, the rate has dropped as epoch 2 ends
def test_results_are_read_once_and_stored(tmp_path, second):
    trial = ALL["revnet18-petra-lock-step-k1-e30-s0"]
    folder = tmp_path / "out" / trial.name
    run_of(folder, [0.1, 0.9, 0.5, 0.4], [0.1, second, 0.01, 0.01])
    assert results.collect([trial], tmp_path / "out", tmp_path / "results") == {}
    (folder / "summary.json").write_text(json.dumps(dict.fromkeys(results.KEPT, 1)))
    found = results.collect([trial], tmp_path / "out", tmp_path / "results")[trial.name]
    assert found["config"] == {"epochs": 4, "lr_milestones": [0.25, 0.5]}
    assert found["best_after_last_drop"] == 0.5
    assert found["mean_after_last_drop"] == pytest.approx(0.45)
    nothing = {"test_loss": None, "train_loss": None}
    assert results.records(found)[1] == {"epoch": 2, "test_accuracy": 0.9, **nothing, "seconds": 1.3}
    assert results.collect([trial], tmp_path / "elsewhere", tmp_path / "results")[trial.name] == found


def test_a_rate_that_drops_at_the_end_leaves_the_last_epoch(tmp_path):
    trial = ALL["revnet18-petra-lock-step-k1-e30-s0"]
    run_of(tmp_path / trial.name, [0.1, 0.9, 0.5, 0.4], lr_milestones=[1])
    (tmp_path / trial.name / "summary.json").write_text(json.dumps(dict.fromkeys(results.KEPT, 1)))
    found = results.of_run(trial, tmp_path / trial.name)
    assert (found["best_after_last_drop"], found["mean_after_last_drop"]) == (0.4, 0.4)


def measurement(epoch, stage, sigma):
    return {"epoch": epoch, "stage": stage, **dict.fromkeys(METRICS, 0.5), "sigma": sigma}


def test_a_training_that_diverged_is_a_result(tmp_path):
    trial = ALL["revnet18-petra-K4-e30-watched-s0"]
    folder = tmp_path / "out" / trial.name
    run_of(folder, [0.3, 0.2])
    rows = [measurement(0.5, 0, 1.0), measurement(1.0, 0, 0.5), measurement(1.5, 0, None), measurement(0.5, "all", 9.0)]
    (folder / "fidelity.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / jobs.LOG).write_text("petra: stopped in epoch 1\n")
    assert results.collect([trial], tmp_path / "out", tmp_path / "results") == {}
    said = str(NonFiniteLoss("the loss of micro-batch 7 on stage 3 is nan: look for it"))
    (folder / jobs.LOG).write_text(f"petra: stopped in epoch 1\npetra: error: {said}\n")
    known = results.collect([trial], tmp_path / "out", tmp_path / "results")
    assert known[trial.name]["diverged"] == said
    assert known[trial.name]["test_accuracies"] == [0.3, 0.2]
    assert known[trial.name]["sigma"] == [{"stage": 0, "measurements": 3, "sigma": 0.75, "lowest_sigma": 0.5}]
    kept = results.similarity(known[trial.name])
    assert [(row["epoch"], row["stage"], row["sigma"]) for row in kept] == [(1, 0, 0.75), (2, 0, None)]
    assert results.state(trial, tmp_path / "out", known) == "diverged"
    assert results.collect([trial], tmp_path / "elsewhere", tmp_path / "results") == known


def test_measurements_at_every_update_are_stored_and_drawn(tmp_path):
    trial = ALL["revnet18-petra-K4-beginning-s0"]
    run_of(tmp_path / trial.name, [0.3])
    rows = [measurement(0.5, 1, 0.25) | {"update": 1}, measurement(1.0, 1, -0.12345) | {"update": 2}]
    rows += [measurement(1.0, 0, None) | {"update": 2}, measurement(0.5, "all", 0.5) | {"update": 1}]
    (tmp_path / trial.name / "fidelity.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / trial.name / "fidelity.json").write_text("{}")
    (tmp_path / trial.name / "summary.json").write_text(json.dumps(dict.fromkeys(results.KEPT, 1)))
    found = results.of_run(trial, tmp_path / trial.name)
    assert found["sigma_by_update"] == {"0": [None, None], "1": [0.25, -0.1235], "all": [0.5, None]}
    assert "| 0.063 (-0.123; 1 of 2) |  |  | 0.500 (0.500; 0 of 1) |" in tables.beginning({trial.name: found})
    rarely = replace(trial, options={**trial.options, "every": 2})
    assert results.of_run(rarely, tmp_path / trial.name) == {k: v for k, v in found.items() if k != "sigma_by_update"}
    pytest.importorskip("matplotlib")
    assert figures.draw("beginning", {trial.name: found}, tmp_path) == ["beginning.png"]


def test_the_messages_of_divergence_are_recognized(tmp_path, capfd):
    (tmp_path / "run").mkdir()
    small = ["--model", "revnet18", "--width", "4", "--depths", "1,1", "--data", "synthetic:3x8x8:4", "--epochs", "1"]
    small += ["--batch-size", "64", "--warmup-epochs", "0", "--threads", "1", "--device", "cpu", "--quiet"]
    assert main(["train", *small, "--lr", "1e30", "--out", str(tmp_path / "run")]) == 1
    (tmp_path / "run" / jobs.LOG).write_text(capfd.readouterr().err)
    assert "the loss of micro-batch" in jobs.divergence(tmp_path / "run")
    weights = "petra: error: 3.f.0.weight is not finite after micro-batch 7: lower the learning rate"
    (tmp_path / "run" / jobs.LOG).write_text(weights)
    assert "3.f.0.weight" in jobs.divergence(tmp_path / "run")
    (tmp_path / "run" / jobs.LOG).write_text("petra: error: OutOfMemoryError: CUDA out of memory")
    assert jobs.divergence(tmp_path / "run") is None


def test_a_figure_for_each_network_from_stored_results(tmp_path):
    pytest.importorskip("matplotlib")
    curves = {"test_accuracies": [0.1, 0.2], "test_losses": [2.0, 1.0], "train_losses": [None, 1.0], "seconds": [1, 2]}
    similarity = {"names": ["epoch", "stage", "sigma"], "rows": [[1, 0, 0.9], [2, 0, None]]}
    known = {
        "resnet164-basic-backprop-K1-e50-s0": curves,
        "revnet18-petra-K4-e30-watched-s0": {**curves, "similarity": similarity, "diverged": "so"},
        "revnet18-backprop-k1-e100-s0": {**curves, "diverged": "so"},
    }
    assert figures.draw("replay", known, tmp_path) == ["replay-resnet164-basic.png", "replay-revnet18.png"]
    assert figures.draw("table2", known, tmp_path) == ["table2.png"]
    for plan in ("full", "figure4", "table4", "corrections", "fidelity", "beginning"):
        assert figures.draw(plan, known, tmp_path) == []


@pytest.mark.parametrize("how", [["--summarise"], ["--data", ".", "--limit", "0"]])
def test_a_table_of_other_epochs_is_not_overwritten_by_an_empty_one(how, tmp_path, monkeypatch, capsys):
    (tmp_path / "replay.md").write_text("of fifteen epochs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run.py", "replay", *how, "--out", "runs", "--results", "."])
    assert run.main() == 3
    assert (tmp_path / "replay.md").read_text() == "of fifteen epochs"
    assert "nothing written" in capsys.readouterr().out


def test_tables_of_other_epochs_have_their_own_folder(tmp_path, monkeypatch, capsys):
    kept = {name: [1.0] for name, _ in results.CURVES.values()}
    known = {f"resnet164-basic-backprop-K1-e{e}-s0": {**kept, "config": {"epochs": e}} for e in (15, 50)}
    (tmp_path / "runs.json").write_text(json.dumps(known))
    monkeypatch.chdir(tmp_path)
    for more in ([], ["--epochs", "15"]):
        monkeypatch.setattr(sys, "argv", ["run.py", "replay", *more, "--summarise", "--out", "runs", "--results", "."])
        assert run.main() == 3
    assert "in epochs-15: replay.md" in capsys.readouterr().out
    assert "e15" in (tmp_path / "epochs-15" / "replay.md").read_text()
    assert "e15" not in (tmp_path / "replay.md").read_text()


def test_rows_of_the_table_of_corrections_are_distinct():
    rows = [tuple(line.split("|")[1:3]) for line in tables.corrections({}).splitlines()[2:]]
    assert len(rows) == len(set(rows)) > 10


def test_decoded_images_are_unchanged(tmp_path):
    images, labels = torch.randint(0, 256, (10, 3, 32, 32), dtype=torch.uint8), torch.arange(10)
    data = build_image_data(
        "cifar", (images, labels), (images[:4], labels[:4]), num_classes=10, crop_padding=4, flip=True
    )
    cache.write(data, tmp_path / cache.NAME)
    again = load_data(str(tmp_path / cache.NAME))
    assert fingerprint(again) == fingerprint(data)
    assert (again.crop_padding, again.flip, again.mean, again.std) == (4, True, data.mean, data.std)


def job(tmp_path, name, code):
    return jobs.Job(name, [sys.executable, "-S", "-c", code], tmp_path / name)


def test_jobs_finish_fail_or_are_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "LEAST", 0.0)
    stops = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *a: sys.exit(130))\ntime.sleep(60)"
    todo = [job(tmp_path, "good", ""), job(tmp_path, "bad", "print('said this')\nraise SystemExit(2)")]
    todo += [job(tmp_path, f"long{i}", stops) for i in range(3)]
    began = time.monotonic()
    outcome = jobs.run_jobs(todo, at_once=2, limit=3.0)
    assert time.monotonic() - began < 30
    assert outcome.done == ["good"]
    assert outcome.failed == {"bad": "said this"}
    assert sorted(outcome.stopped) == ["long0", "long1"]  # the third was never started
    assert not (tmp_path / "long2").exists()


def test_a_job_that_diverged_has_not_failed(tmp_path):
    said = "x is not finite after micro-batch 3: so"
    outcome = jobs.run_jobs([job(tmp_path, "lost", f"print('{said}')\nraise SystemExit(1)")], at_once=1)
    assert outcome == jobs.Outcome(diverged={"lost": said})


def test_a_killed_job_is_not_judged_by_its_earlier_messages(tmp_path):
    lost = job(tmp_path, "lost", "import os\nos.kill(os.getpid(), 9)")
    lost.folder.mkdir()
    (lost.folder / jobs.LOG).write_text("petra: stopped in epoch 3; continue with --resume\n")
    assert jobs.run_jobs([lost], at_once=1).failed == {"lost": "ended by SIGKILL"}


def test_a_running_service_is_used_and_not_stopped(tmp_path, monkeypatch, capsys):
    program = tmp_path / "nvidia-cuda-mps-control"
    program.write_text(f"#!/bin/sh\necho called $1 >> {tmp_path}/calls\nexit 1\n")  # as where there is one
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"):
        monkeypatch.setenv(name, "")
    with jobs.shared_gpu(tmp_path, True):
        assert (tmp_path / "calls").read_text() == "called -d\n"
    assert (tmp_path / "calls").read_text() == "called -d\n"
    assert "was not started" in capsys.readouterr().err


def test_data_of_another_kind_is_rejected_in_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "train.parquet").write_bytes(b"no parquet")
    folders = ["--data", str(tmp_path), "--out", str(tmp_path / "out"), "--results", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["run.py", "full", *folders])
    assert run.main() == 2
    said = capsys.readouterr().err
    assert said.startswith("run.py: error: ")
    assert "train.parquet" in said


def test_a_line_that_is_still_being_written_is_left_out(tmp_path):
    trial = PLANS["full"][0]
    (tmp_path / trial.name / "checkpoint").mkdir(parents=True)
    (tmp_path / trial.name / "metrics.jsonl").write_text('{"epoch": 1}\n{"epoch": 2}\n{"epo')
    assert results.state(trial, tmp_path, {}) == "2 of 300 epochs"


def file_of(folder):
    (folder / "file").touch()
    return "file"


def damaged(folder):
    (folder / "kept").mkdir()
    (folder / "kept" / results.FILE).write_text("{")
    return "kept"


@pytest.mark.parametrize(
    ("arguments", "made", "words"),
    [
        (["--data", ".", "--out"], file_of, "--out is file, which is not a folder"),
        (["--summarise", "--results"], file_of, "--results is file, which is not a folder"),
        (["--summarise", "--results"], damaged, "kept/runs.json is damaged"),
        (["--list", "--results"], damaged, "kept/runs.json is damaged"),
    ],
)
def test_a_folder_that_is_a_file_or_damaged_is_rejected(arguments, made, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run.py", "full", *arguments, made(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        run.main()
    assert words in capsys.readouterr().err


def test_results_of_a_concurrent_runner_are_not_lost(tmp_path, monkeypatch):
    ours, theirs = PLANS["figure4"][:2]

    def keep(trial):
        monkeypatch.setattr(results, "of_run", lambda *given: {})
        results.collect([trial], tmp_path, tmp_path)

    other = threading.Thread(target=keep, args=(theirs,))

    def slow(*given):
        other.start()
        other.join(0.3)
        return {}

    monkeypatch.setattr(results, "of_run", slow)
    results.collect([ours], tmp_path, tmp_path)
    other.join()
    assert set(results.read(tmp_path)) == {ours.name, theirs.name}


def test_too_little_time_to_start_is_reported(tmp_path, capsys):
    todo = [job(tmp_path, f"long{i}", "") for i in range(2)]
    assert jobs.run_jobs(todo, at_once=2, limit=jobs.LEAST / 2) == jobs.Outcome()
    assert f"less than {jobs.LEAST:.0f} s are left: 2 trainings are not started" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--smoke", "--jobs", "0"], "--jobs is 0: give 1 or more"),
        (["--smoke", "--epochs", "3"], "--epochs is for the plan replay only"),
        (["replay", "--smoke", "--epochs", "0"], "--epochs is 0: give 1 or more"),
        (["--smoke", "--only", "resnet18", "none*"], "no training of table2 is called resnet18 or none*"),
        (["--data", "no/such/folder"], "--data is no/such/folder, which is not a folder"),
    ],
)
def test_bad_options_are_rejected(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["run.py", "table2", *arguments])
    with pytest.raises(SystemExit, match="2"):
        run.main()
    assert words in capsys.readouterr().err
    assert not any(tmp_path.iterdir())
