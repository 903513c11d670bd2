"""The experiments on language models: the plans, how they are run, and tables and the figure of given results."""

import argparse
import functools
import json
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.scripts import import_scripts

from petra import models
from petra.cli.main import main
from petra.cli.options import add_checkpoint_options, add_run_options, given
from petra.runs.config import RunConfig

NAMES = ("run", "plans", "results", "summary", "trials", "cut_tokens", "excerpts", "made_text", "weight_tying")
run, plans, results, summary, trials, cut_tokens, excerpts, made_text, weight_tying = import_scripts(
    "experiments/language", *NAMES
)
Choices, PLANS, Trial = plans.Choices, plans.PLANS, trials.Trial


def every(choices=None):
    return [trial for plan in PLANS.values() for trial in plan(choices or Choices())]


@functools.cache
def parser():
    found = argparse.ArgumentParser()
    add_run_options(found, with_method=True)
    add_checkpoint_options(found)
    return found


def configured(trial):
    """The configuration that Petra makes from the command line of a trial."""
    options = parser().parse_args([*trial.arguments()[1:], "--data", "tokens:books"])
    return RunConfig.from_options(options.recipe, given(options))


def test_each_name_means_one_training():
    found = every(Choices(seeds=(0, 1)))
    assert len({trial.name for trial in found}) == len(set(found))
    assert len(PLANS["lr"](Choices())) == 9
    assert {(t.kind, t.k) for t in PLANS["frontier"](Choices()) if t.optimizer == "soap"} == {
        ("backprop", 1),
        ("exact", 8),
        *(("petra", k) for k in (1, 2, 4, 8, 16, 32)),
    }
    assert set(PLANS["lr"](Choices())) <= set(PLANS["frontier"](Choices()))


@pytest.mark.slow
def test_every_trial_is_a_configuration_with_updates_of_128_sequences(monkeypatch):
    with torch.device("meta"):
        outline = models.create("rev-gpt-25m", width=8, heads=1)
    monkeypatch.setattr("petra.runs.config.outline", lambda model, options: outline)
    for trial in every():
        config = configured(trial)
        config.validate()
        assert config.batch_size * config.accumulate == 128
        assert (config.clip_norm, config.beta2, config.decay) == (1.0, 0.95, 0.1)
        assert config.warmup_epochs == pytest.approx(0.1 * config.epochs)
        assert (config.accumulate, config.base_lr) == (trial.k, trial.lr)


def test_shorter_trainings_have_other_names_and_sizes():
    found = every(Choices(sequences=64, train_tokens=13_000_000))
    assert all("-u64-t13m-" in trial.name for trial in found)
    for trial in found[::40]:
        config = configured(trial)
        assert config.batch_size * config.accumulate == 64


def test_a_training_split_is_cut(tmp_path):
    source, tokens = tmp_path / "source", np.arange(50, dtype="<u2")
    source.mkdir()
    for split, count in (("train", 40), ("test", 10)):
        tokens[:count].tofile(source / f"{split}.bin")
    (source / "tokenizer.json").write_text("{}")
    splits = {split: {"tokens": count, "bytes": 4 * count} for split, count in (("train", 40), ("test", 10))}
    (source / "tokens.json").write_text(json.dumps({"dtype": "uint16", **splits}))
    cut_tokens.cut_tokens(source, tmp_path / "short", 20)
    found = json.loads((tmp_path / "short" / "tokens.json").read_text())
    assert (found["train"]["tokens"], found["train"]["bytes"], found["test"]) == (20, 80, splits["test"])
    assert np.fromfile(tmp_path / "short" / "train.bin", "<u2").tolist() == list(range(20))
    assert (tmp_path / "short" / "test.bin").read_bytes() == (source / "test.bin").read_bytes()
    with pytest.raises(ValueError, match=r"--train-tokens is 41, but .* has 40 training tokens"):
        cut_tokens.cut_tokens(source, tmp_path / "long", 41)


def test_excerpts_begin_at_equal_distances(tmp_path, capsys):
    text = "abc\n\n\n\nd" + "0123456789" * 3 + "xy"
    assert excerpts.excerpts(text, 2, 8) == "abc\n\nd\n\n\n23456789"
    (tmp_path / "text").write_text(text)
    asked = [str(tmp_path / "text"), str(tmp_path / "out"), "--length", "4", "--excerpts"]
    excerpts.main([*asked, "4"])
    assert (tmp_path / "out").read_text().split("\n\n\n") == ["abc", "2345", "2345", "2345"]
    with pytest.raises(SystemExit):
        excerpts.main([*asked, "20"])
    assert "20 excerpts of 4 characters are longer than the text with 40" in capsys.readouterr().err


def test_tied_weights_are_compared(tmp_path, capsys):
    pytest.importorskip("tokenizers")
    (tmp_path / "text.txt").write_text(made_text.made_text(2000))
    asked = [
        "tokenize",
        "--train",
        str(tmp_path / "text.txt"),
        "--vocab-size",
        "300",
        "--out",
        str(tmp_path / "tokens"),
    ]
    assert main(asked) == 0
    capsys.readouterr()
    weight_tying.main(["--data", str(tmp_path / "tokens"), "--smoke", "--out", str(tmp_path / "no.json")])
    _, _, untied, tied, wide = capsys.readouterr().out.splitlines()
    assert (untied.split()[0], tied.split()[0], wide.split()[0]) == ("untied", "tied", "tied,")
    assert not (tmp_path / "no.json").exists()


def test_options_of_some_trials():
    known = {trial.name: trial for trial in every()}
    exact = configured(known["adamw-exact-k8-lr2e-3-s0"])
    assert (exact.method, exact.schedule, exact.stages, exact.batch_size) == ("petra", "1f1b", 8, 16)
    backprop = configured(known["adamw-backprop-k1-lr4e-3-s0"])
    assert (backprop.method, backprop.schedule, backprop.batch_size) == ("reversible", "sequential", 128)
    warm = configured(known["adamw-petra-k1-flush200-reschedule800-lr2e-3-s0"])
    assert (warm.flush_until, warm.corrections, warm.schedule) == (200, ("reschedule:800",), "low-staleness")
    network = configured(known["adamw-petra-k8-residual_scale=0.25-lr2e-3-s0"])
    assert network.model_options == {"chunked_loss": True, "residual_scale": 0.25}
    assert configured(known["adamw-petra-k32-e4-lr2e-3-s0"]).epochs == 4
    assert {t.momentum for t in PLANS["predict"](Choices()) if t.optimizer == "muon"} == {0.9, 0.98}


def test_learning_rates_are_chosen_for_an_optimizer_and_for_one_k():
    rates = plans.parse_rates(["adamw=3e-3", "adamw:k8=1e-3,5e-4"])
    choices = Choices(rates, ["adamw"], long_epochs=3)
    found = {(t.kind, t.k, t.lr) for t in PLANS["long"](choices)}
    assert found == {
        ("exact", 8, 1e-3),
        ("exact", 8, 5e-4),
        ("petra", 8, 1e-3),
        ("petra", 8, 5e-4),
        ("backprop", 1, 3e-3),
        ("petra", 16, 3e-3),
        ("petra", 32, 3e-3),
    }
    assert all(trial.epochs == 3 for trial in PLANS["long"](choices))
    for wrong in ("adam=1", "adamw", "adamw=x", "adamw:8k=1e-3", "adamw=0"):
        with pytest.raises(ValueError, match="--lr has"):
            plans.parse_rates([wrong])


@pytest.mark.parametrize(("lr", "text"), [(1e-3, "1e-3"), (1.5e-3, "1.5e-3"), (0.02, "2e-2"), (3e-5, "3e-5")])
def test_names_of_learning_rates(lr, text):
    assert trials.short(lr) == text


def result(trial, loss, diverged=None):
    fields = json.loads(json.dumps({"trial": vars(trial)}))
    return {**fields, "diverged": diverged, "test_loss": loss, "bits_per_byte": None if diverged else loss / 2}


def made(*pairs):
    return {trial.name: result(trial, *rest) for trial, *rest in pairs}


def test_the_best_learning_rate_is_that_of_the_lowest_mean():
    one, two = Trial("adamw", "petra", 8, 1e-3), Trial("adamw", "petra", 8, 2e-3)
    known = made(
        (one, 3.0), (replace(one, seed=1), 3.2), (two, 2.9), (replace(two, seed=1), None, "the loss is nan"), (two, 2.9)
    )
    assert {results.trial_of(stored) for stored in known.values()} >= {one, two}
    best = summary.best_of(known)[one.group]
    assert (best.lr, best.seeds) == (1e-3, 2)
    assert best.loss == pytest.approx(3.1)
    assert best.tried[2e-3] == float("inf")


def test_tables_and_the_figure_come_from_results_only(tmp_path, capsys):
    backprop, exact = Trial("adamw", "backprop", 1, 1e-3), Trial("adamw", "exact", 8, 1e-3)
    petra, other = Trial("adamw", "petra", 8, 1e-3), Trial("adamw", "petra", 16, 7e-4)
    known = made((backprop, 3.0), (exact, 3.001), (petra, 3.5), (other, 3.25), (replace(petra, lr=2e-3), None, "nan"))
    summary.write({"frontier": PLANS["frontier"](Choices()), "long": PLANS["long"](Choices())}, known, tmp_path)
    text = (tmp_path / "tables.md").read_text()
    assert text in capsys.readouterr().out
    assert "| adamw | 3.0000 (1e-3) | 3.0010 (1e-3) |  |  |  | 3.5000 (1e-3) | 3.2500 (7e-4) |  |" in text
    assert "|  |  | +0.0010 |  |  |  | +0.5000 | +0.2500 |  |" in text
    assert "| adamw-petra-k8 | 1e-3 | 3.5000 | 1.7500 | +0.5000 | 1 | 1e-3: 3.5000, 2e-3: diverged |" in text
    assert "none yet" in text
    pytest.importorskip("matplotlib")
    assert (tmp_path / "frontier.png").stat().st_size > 1000


def test_losses_after_every_epoch():
    long = Trial("adamw", "petra", 8, 2e-3, epochs=3)
    known = made((long, 2.0), (replace(long, seed=1), 4.0), (replace(long, lr=1e-3), 5.0))
    for name, stored in known.items():
        stored["epochs"] = [{"test_loss": stored["test_loss"] + left} for left in (2, 1, 0)]
        assert name == results.trial_of(stored).name
    table = summary.by_epoch(summary.best_of(known), [long], known)
    assert "| adamw-petra-k8-e3 | 5.0000 | 4.0000 | 3.0000 |" in table
    assert summary.by_epoch(summary.best_of(known), [Trial("adamw", "petra", 8, 2e-3)], known) == ""


def write_run(folder, *, finished=True, log=""):
    folder.mkdir(parents=True)
    (folder / "checkpoint").mkdir()
    (folder / "config.json").write_text(json.dumps({"data": "tokens:/home/me", "accumulate": 4}))
    names = ("epoch", "train_loss", "test_loss", "bits_per_byte", "samples_per_second", "seconds")
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 40, **dict.fromkeys(names, 1)}) + "\n")
    (folder / "log.txt").write_text(log)
    if finished:
        (folder / "summary.json").write_text(json.dumps({"test_loss": 2.5, "bits_per_byte": 1.1}))


def test_results_are_collected_once_and_checkpoints_removed(tmp_path):
    done, diverged, stopped = (Trial("adamw", "petra", k, 1e-3) for k in (1, 2, 4))
    write_run(tmp_path / "runs" / done.name)
    said = "petra: error: the loss of micro-batch 7 on stage 1 is nan"
    write_run(tmp_path / "runs" / diverged.name, finished=False, log=said)
    write_run(tmp_path / "runs" / stopped.name, finished=False, log="petra: stopped in epoch 1")
    both = tmp_path / "runs", tmp_path / "results"
    results.collect([done, diverged, stopped], *both)
    known = results.read(both[1])
    assert known.keys() == {done.name, diverged.name}
    assert (known[done.name]["test_loss"], known[done.name]["updates"], known[done.name]["diverged"]) == (2.5, 10, None)
    assert "data" not in known[done.name]["options"]
    assert "is nan" in known[diverged.name]["diverged"]
    assert [(both[0] / t.name / "checkpoint").exists() for t in (done, diverged, stopped)] == [False, False, True]
    assert [results.state(t, both[0], known) for t in (done, diverged, stopped)] == ["2.5000", "diverged", "stopped"]
    (both[1] / "x.json").write_text("{")
    with pytest.raises(ValueError, match=r"x\.json is damaged"):
        results.read(both[1])


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["run.py", *map(str, arguments)])
    return run.main()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["frontiers"], "there is no plan 'frontiers'"),
        (["lr"], "--data is None: give the folder that `petra tokenize --out` has written"),
        (["lr", "--list", "--only", "x"], "no training of lr is called x"),
        (["--list", "--lr", "sgd=1"], "--lr has 'sgd=1'"),
    ],
)
def test_mistakes(arguments, message, monkeypatch, capsys):
    with pytest.raises(SystemExit) as end:
        call(monkeypatch, *arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_the_list_has_every_training(monkeypatch, tmp_path, capsys):
    assert call(monkeypatch, "--list", "--out", tmp_path, "--results", tmp_path) == 0
    shown = capsys.readouterr().out
    assert all(trial.name in shown for trial in every())


@pytest.mark.slow
def test_a_smoke_trains_and_a_second_one_does_not(monkeypatch, tmp_path, capsys):
    pytest.importorskip("tokenizers")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(run, "subprocess", SimpleNamespace(run=lambda command, check: main(command[3:])))
    arguments = ["frontier", "--smoke", "--jobs", "2", "--only", "adamw-exact*", "adamw-petra-k32*", "--out"]
    assert call(monkeypatch, *arguments, tmp_path / "runs", "--", "--no-drop-last") == 0
    folder = tmp_path / "runs_smoke"
    stored = results.read(folder / "results")
    assert stored.keys() == {"adamw-exact-k8-lr1e-3-s0", "adamw-petra-k32-lr4e-3-s0"}
    for kept in stored.values():
        assert kept["options"]["drop_last"] is False  # given after --
        assert 0 < kept["bits_per_byte"] < 10
        assert kept["updates"] > 4
    assert "start" in capsys.readouterr().out
    assert call(monkeypatch, *arguments, tmp_path / "runs") == 0
    assert "start" not in capsys.readouterr().out
