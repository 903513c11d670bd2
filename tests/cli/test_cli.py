"""The command line as a user meets it."""

import argparse
import gc
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from helpers import fork_server
from helpers.commands import SMALL
from safetensors.torch import load_file

from petra import models
from petra.cli.main import main
from petra.cli.options import set_up_device
from petra.cli.parser import COMMANDS
from petra.runs.run import Run
from petra.runs.run_folder import FolderLock
from petra.trainer import checkpoint
from petra.trainer.trainer import weights_hash

pytestmark = pytest.mark.slow


def train(*arguments):
    return main(["train", *SMALL, "--quiet", *map(str, arguments)])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert train("--out", folder) == 0
    return folder


def test_a_run_writes_what_it_promises(finished):
    assert sorted(p.name for p in finished.iterdir()) == [
        *("best.safetensors", "checkpoint", "config.json", "hashes.json", "metrics.jsonl", "network.json"),
        *("summary.json", "weights.safetensors"),
    ]
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["stages"] == [1, 1, 1, 1]
    assert summary["schedule"] == "low-staleness"
    assert summary["staleness"] == [3, 2, 1, 0]
    assert 0 <= summary["test_accuracy"] <= summary["best_test_accuracy"] <= 1
    assert summary["samples_per_second"] > 0
    assert len(summary["memory_bytes"]) == 4
    assert summary["memory_bytes"][1]["inputs"] == 0  # a reversible stage
    assert summary["memory_bytes"][2]["inputs"] > 0  # downsampling
    records = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [r["epoch"] for r in records] == [1, 2]
    assert records[-1]["test_accuracy"] == summary["test_accuracy"]


def test_weights_load_into_the_model_used_without_the_trainer(finished):
    network = models.create("revnet18", width=4, depths=(1, 1), in_channels=1, num_classes=10)
    network.load_state_dict(load_file(finished / "weights.safetensors"))
    assert weights_hash(network.state_dict()) == json.loads((finished / "summary.json").read_text())["weights_sha256"]


def test_a_finished_run_is_not_run_again(finished, capsys):
    before = (finished / "metrics.jsonl").read_bytes()
    assert main(["train", "--resume", "--out", str(finished)]) == 0
    assert "test accuracy" in capsys.readouterr().out
    assert (finished / "metrics.jsonl").read_bytes() == before


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    run_in_child(folder)
    return folder


def test_resume_after_an_interruption(uninterrupted, tmp_path):
    """SIGTERM: the run writes a checkpoint between two ticks and says how to go on."""
    folder = tmp_path / "run"
    log = tmp_path / "log"
    process = fork_server.start(run_and_exit, restartable(folder), log)
    wait_for(folder / "checkpoint" / "latest.json")
    process.terminate()
    process.join(60)
    process.kill()
    error = log.read_text()
    assert process.exitcode == 130, error
    assert "continue with --resume" in error
    assert len(error.strip().splitlines()) == 1
    with (folder / "metrics.jsonl").open("a") as file:  # as if it had died between metrics and checkpoint
        file.write('{"epoch": 1}\n')
    run_in_child(folder)
    assert same(folder, uninterrupted)


def test_asked_to_stop_when_all_is_trained_it_ends_what_is_left(tmp_path, monkeypatch):
    came = []
    export = checkpoint.export_weights

    def stop_and_export(*given):
        os.kill(os.getpid(), signal.SIGTERM)
        export(*given)

    monkeypatch.setattr(checkpoint, "export_weights", stop_and_export)
    usual = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        assert train("--epochs", 1, "--out", tmp_path / "run") == 0
    finally:
        signal.signal(signal.SIGTERM, usual)
    assert came == []  # by default it would end the process
    assert (tmp_path / "run" / "summary.json").exists()


def restartable(folder):
    # two ticks between checkpoints, so that a kill often falls into the writing of one
    often = ["--batch-size", "128", "--checkpoint-every", "2", "--data", "synthetic:1x8x8:10:1437"]
    return ["train", *SMALL, "--quiet", *often, "--resume", "--out", str(folder)]


def run_and_exit(arguments, log):
    """Run the command in this process, as `python -m petra` does; errors go into ``log``."""
    with open(log, "w") as file:
        os.dup2(file.fileno(), 2)
    sys.exit(main(arguments))


def start_child(folder):
    """Run the command in its own process, which has everything imported already."""
    return fork_server.start(main, restartable(folder))


def run_in_child(folder):
    process = start_child(folder)
    process.join(timeout=120)
    assert process.exitcode == 0
    assert (folder / "summary.json").exists()


def wait_for(path):
    limit = time.monotonic() + 60
    while not path.exists() and time.monotonic() < limit:
        time.sleep(0.005)


def same(folder, other):
    """Weights and metrics, but for the speed."""
    hashes = [json.loads((f / "summary.json").read_text())["weights_sha256"] for f in (folder, other)]
    records = [
        [
            {**json.loads(line), "samples_per_second": 0, "seconds": 0}
            for line in (f / "metrics.jsonl").read_text().splitlines()
        ]
        for f in (folder, other)
    ]
    return hashes[0] == hashes[1] and records[0] == records[1]


@pytest.mark.parametrize("attempt", range(6))
def test_killed_at_a_random_moment_and_resumed_gives_the_same_weights(uninterrupted, tmp_path, attempt):
    folder = tmp_path / "run"
    process = start_child(folder)
    wait_for(folder / "config.json")
    seconds = (uninterrupted / "summary.json").stat().st_mtime - (uninterrupted / "config.json").stat().st_mtime
    time.sleep(random.Random(attempt).uniform(0, seconds))
    process.kill()
    process.join(timeout=60)
    if attempt % 2:  # once more, half-way through what was left
        process = start_child(folder)
        time.sleep(random.Random(attempt).uniform(0, seconds / 2))
        process.kill()
        process.join(timeout=60)
    run_in_child(folder)
    assert same(folder, uninterrupted)


def test_tensorboard(tmp_path):
    assert train("--epochs", 1, "--tensorboard", "--out", tmp_path / "run") == 0
    assert any("tfevents" in p.name for p in (tmp_path / "run" / "tensorboard").iterdir())


def test_tensorboard_shows_what_the_run_has_come_to_once(tmp_path, monkeypatch):
    """Not the run that it has replaced, nor what came after the checkpoint that it was resumed from."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator").EventAccumulator
    command = "--tensorboard", "--checkpoint-every", 30, "--checkpoint-epochs", 9, "--out", tmp_path / "run"
    assert train(*command, "--epochs", 1) == 0
    save = Run._save
    with monkeypatch.context() as patch:
        patch.setattr(Run, "_save", lambda run, wait: save(run, wait) if run.progress.epoch < 2 else run.nothing)
        assert train(*command, "--overwrite") == 1  # with both epochs written down, and one of them in a checkpoint
    assert train(*command, "--resume") == 0
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2
    assert [found.step for found in accumulator(str(tmp_path / "run" / "tensorboard")).Reload().Scalars("lr")] == steps


def test_without_tensorboard_a_run_is_refused_before_it_replaces_another(finished, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert train("--tensorboard", "--out", folder, "--overwrite") == 2
    assert "the tensorboard logger needs a package that is not installed" in capsys.readouterr().err
    assert sorted(p.name for p in folder.iterdir()) == sorted(p.name for p in finished.iterdir())


def test_compare(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    arguments = [
        "compare",
        *SMALL,
        "--quiet",
        "--epochs",
        "1",
        "--methods",
        "backprop,petra",
        "--schedule",
        "lock-step",
    ]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["method", "--------", "backprop", "petra"]
    assert "sequential" in lines[2]
    assert "lock-step" in lines[3]
    assert [s["method"] for s in json.loads((tmp_path / "comparison.json").read_text())] == ["backprop", "petra"]
    assert main([*arguments, "--out", str(tmp_path)]) == 2
    assert "holds a run already" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "petra")
    before = (tmp_path / "backprop" / "summary.json").stat().st_mtime_ns
    assert main([*arguments, "--out", str(tmp_path), "--resume"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]] == ["backprop", "petra"]
    assert (tmp_path / "backprop" / "summary.json").stat().st_mtime_ns == before  # not run again
    assert main([*arguments, "--out", str(tmp_path), "--resume", "--lr", "0.1"]) == 2
    assert "backprop has lr 0.05, not 0.1: give the same options" in capsys.readouterr().err
    assert main([*arguments, "--out", str(tmp_path), "--overwrite"]) == 0


def test_a_method_that_diverges_does_not_end_a_comparison(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    arguments = ["compare", *SMALL, "--quiet", "--epochs", "1", "--lr", "1e9", "--warmup-epochs", "0"]
    assert main([*arguments, "--methods", "backprop", "petra", "--out", str(tmp_path)]) == 1
    said = capsys.readouterr()
    rows = said.out.splitlines()[2:]
    assert [row.split()[:4] for row in rows] == [
        ["backprop", "4", "sequential", "diverged"],
        ["petra", "4", "low-staleness", "diverged"],
    ]
    assert said.err.startswith("petra: error: backprop and petra diverged: the loss of micro-batch ")
    kept = json.loads((tmp_path / "comparison.json").read_text())
    assert all(len(one["stages"]) == 4 for one in kept)  # layers of each, as in summaries
    assert [(one["method"], "is nan" in one["diverged"] or "is inf" in one["diverged"]) for one in kept] == [
        ("backprop", True),
        ("petra", True),
    ]


@pytest.mark.parametrize("command", [["methods"], ["recipes"], ["schedule"], ["schedule", "--text"]])
def test_lists_and_drawings(command, capsys):
    assert main(command) == 0
    assert len(capsys.readouterr().out.splitlines()) >= 3


def test_every_command_has_its_line_in_the_help(capsys):
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(any(line.split() == [name, *text.split()] for line in lines) for name, (_, text) in COMMANDS.items())


@pytest.mark.parametrize("width", [80, 100])
@pytest.mark.parametrize("command", ["methods", "corrections", "models", "recipes"])
def test_lists_fit_into_the_terminal(command, width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    assert main([command]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert width - 20 < max(map(len, lines)) <= width


def test_schedule_of_any_method(capsys):
    assert main(["schedule", "lock-step", "--stages", "2", "--microbatches", "2"]) == 0
    assert capsys.readouterr().out == (
        "tick     0   1        2        3\n"
        "stage 0  F0  F1       B0 U     B1 U\n"
        "stage 1  .   F0 B0 U  F1 B1 U  .\n"
        "\nlock-step: ticks between forward and backward, stage by stage: 2, 0\n"
    )


def test_a_schedule_that_is_wider_than_the_terminal_continues_below(capsys, monkeypatch):
    """Nothing is left out, and every part has its stages and ticks."""
    drawn = {}
    for width in (40, 400):
        monkeypatch.setenv("COLUMNS", str(width))
        assert main(["schedule", "--stages", "3", "--microbatches", "5"]) == 0
        drawn[width] = capsys.readouterr().out.split("\n\n")[:-1]
        assert all(len(line) <= width for part in drawn[width] for line in part.splitlines())
    assert len(drawn[400]) == 1
    assert len(drawn[40]) > 2
    for stage in range(3):
        actions = [action for part in drawn[40] for action in part.splitlines()[1 + stage].split()[2:]]
        assert actions == drawn[400][0].splitlines()[1 + stage].split()[2:]
    assert all(part.startswith("tick ") and part.splitlines()[0].split()[1].isdigit() for part in drawn[40])


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ([], "low-staleness: ticks between"),
        (["gpipe"], "gpipe: no weight changes"),
        (["--method", "backprop"], "sequential: no weight changes"),
        (["locked-forward", "--method", "petra"], "locked-forward: ticks between"),
        (["6,4,2,0"], "in-flight: ticks between"),
        (["flush:1", "--method", "petra"], "flush:1: no weight changes"),
        (["flush:3"], "flush:3: ticks between"),
        (["interleaved", "--accumulate", "4"], "interleaved:2: no weight changes"),
        (["interleaved:1", "--method", "reversible", "--accumulate", "3"], "interleaved:1: no weight changes"),
    ],
)
def test_schedules_by_name_and_by_method(arguments, name, capsys):
    assert main(["schedule", *arguments]) == 0
    assert f"\n{name}" in capsys.readouterr().out


def test_a_schedule_is_drawn_into_a_file(tmp_path, capsys):
    picture = tmp_path / "lock-step.svg"
    assert main(["schedule", "lock-step", "--stages", "3", "--microbatches", "2", "--svg", str(picture)]) == 0
    root = ElementTree.parse(picture).getroot()
    assert sum(rect.get("class") is not None for rect in root.iter("{http://www.w3.org/2000/svg}rect")) == 3 * 2 * 3
    assert "lock-step: 3 stages, 2 micro-batches" in picture.read_text()
    assert capsys.readouterr().out == f"wrote {picture}\n"


def test_an_unknown_schedule_is_named(capsys):
    assert main(["schedule", "lockstep"]) == 2
    assert "no schedule named 'lockstep': did you mean 'lock-step'" in capsys.readouterr().err


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_help_explains(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert "usage: petra" in capsys.readouterr().out


BAD = {
    "unknown model": (["--model", "revnet19"], "no model named 'revnet19'", "did you mean 'revnet18'"),
    "unknown method": (["--method", "petre"], "--method is 'petre'", "did you mean 'petra'"),
    "unknown recipe": (["--recipe", "digit"], "no recipe named 'digit'", "did you mean 'digits'"),
    "unknown schedule": (["--schedule", "lockstep"], "no schedule named 'lockstep'", "did you mean 'lock-step'"),
    "schedule of backprop": (
        ["--method", "backprop", "--schedule", "lock-step"],
        "backprop",
        "choose gpipe, 1f1b or interleaved",
    ),
    "k = 0": (["--accumulate", "0"], "--accumulate is 0", "give 1 or more"),
    "no epochs": (["--epochs", "-1"], "--epochs is -1", "give 1 or more"),
    "no batch": (["--batch-size", "0"], "--batch-size is 0", "give 1 or more"),
    "too many stages": (["--stages", "5"], "stages is 5", "give at most 4"),
    "no stages": (["--stages", "0"], "stages is 0", "at least one"),
    "bad cut": (["--stages", "2,3"], "[2, 3]", "add up to the network's 4"),
    "stages in words": (["--stages", "four"], "'four'", "whole number"),
    "negative lr": (["--lr", "-1"], "--lr is -1", "give 0 or more"),
    "nan lr": (["--lr", "nan"], "--lr is nan", "give 0 or more"),
    "clipping": (["--clip-norm", "0"], "--clip-norm is 0", "give more than 0"),
    "lr_milestones": (["--lr-milestones", "0.5,2"], "--lr-milestones is [0.5, 2.0]", "between 0 and 1"),
    "no data folder": (["--data", "no/such/folder"], "no/such/folder", ""),
    "width": (["--width", "0"], "width is 0", "1 or more"),
    "depths": (["--depths", "0,1"], "depths is [0, 1]", "1 or more"),
    "no GPU": (["--device", "cuda:7"], "cuda:7", ""),
    "bad device": (["--device", "toaster"], "'toaster'", "give cpu, cuda"),
    "no threads": (["--threads", "0"], "--threads is 0", "give between 1 and 4096"),
    "resume without a folder": (["--resume"], "--resume needs --out", "give the folder"),
    "unknown option": (["--speed", "11"], "--speed", "--help"),
    "meta": (["--device", "meta"], "'meta'", "give cpu, cuda"),
    "negative in flight": (["--schedule", "3,2,1,-1"], "[3, 2, 1, -1]", "must decrease from stage to stage"),
    "huge seed": (["--seed", str(10**30)], "--seed is 1000", "less than 2^63"),
    "out is a file": (["--out", __file__], "test_cli.py, which is a file", "give a folder"),
    "no Nesterov": (
        ["--optimizer", "adamw", "--no-nesterov"],
        "--no-nesterov is for sgd, not for adamw",
        "leave it out",
    ),
    "momentum": (["--momentum", "1"], "--momentum is 1.0", "less than 1"),
    "resume and overwrite": (["--resume", "--overwrite"], "not allowed with", "--help"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_that_names_value_and_remedy(case, tmp_path, capsys, monkeypatch):
    arguments, value, remedy = BAD[case]
    if case == "no GPU" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    monkeypatch.chdir(tmp_path)
    try:
        code = main(["train", *SMALL, "--quiet", *arguments])
    except SystemExit as ended:
        code = ended.code
    error = capsys.readouterr().err
    assert code == 2
    assert len(error.strip().splitlines()) == 1
    assert value in error
    assert remedy in error
    assert list(tmp_path.iterdir()) == []


def test_ranks_share_the_cores_also_where_nobody_tells_which_they_may_use(monkeypatch):
    shares = []
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)  # macOS has none
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    monkeypatch.setattr(torch, "set_num_threads", shares.append)
    monkeypatch.setenv("WORLD_SIZE", "2")
    set_up_device(argparse.Namespace(threads=None, device="cpu"))
    assert shares == [3]


def test_resume_of_nothing_says_so(tmp_path, capsys):
    assert main(["train", "--resume"]) == 2
    assert "--resume needs --out: give the folder" in capsys.readouterr().err
    assert main(["train", "--resume", "--out", str(tmp_path / "none")]) == 2
    assert "none holds no run to resume: give the folder of one" in capsys.readouterr().err


class TestRunsThatAreThere:
    """Errors around a folder with a run in it; the run itself stays as it was."""

    def check(self, finished, capsys, arguments, *values, code=2):
        before = {p.name: p.read_bytes() for p in finished.iterdir() if p.is_file()}
        assert main(["train", *arguments, "--quiet", "--device", "cpu", "--out", str(finished)]) == code
        error = capsys.readouterr().err
        assert len(error.strip().splitlines()) == 1
        assert all(value in error for value in values), error
        assert {p.name: p.read_bytes() for p in finished.iterdir() if p.is_file()} == before

    def test_not_overwritten(self, finished, capsys):
        self.check(finished, capsys, SMALL, "holds a run already: give --resume")

    def test_resume_with_other_options(self, finished, capsys):
        self.check(finished, capsys, ["--resume", "--lr", "0.7"], "has lr 0.05, not 0.7")
        self.check(finished, capsys, ["--resume", "--width", "5"], "has width 4, not 5")
        self.check(finished, capsys, ["--resume", "--momentum", "0.5"], "has momentum its default, not 0.5")

    def test_resume_with_another_configuration_written_by_hand(self, finished, tmp_path, capsys):
        edited = shutil.copytree(finished, tmp_path / "edited")
        config = json.loads((edited / "config.json").read_text())
        (edited / "config.json").write_text(json.dumps({**config, "lr": 0.7}))
        self.check(edited, capsys, ["--resume"], "the checkpoint was written with lr 0.05, not 0.7")
        assert json.loads((edited / "config.json").read_text())["lr"] == 0.7  # left for the user to fix
        (edited / "config.json").write_text(json.dumps({**config, "checkpoint_epochs": 2}))
        assert main(["train", "--resume", "--out", str(edited)]) == 0

    def test_resume_where_there_is_nothing_yet_is_said(self, tmp_path, capsys):
        assert main(["train", *SMALL, "--epochs", "1", "--resume", "--out", str(tmp_path / "run")]) == 0
        assert (
            f"there is no checkpoint in {tmp_path / 'run'}: the run starts from the beginning\n"
            in capsys.readouterr().err
        )
        assert main(["train", *SMALL, "--epochs", "1", "--resume", "--out", str(tmp_path / "run")]) == 0
        assert "starts from the beginning" not in capsys.readouterr().err

    def test_resume_with_the_same_options_or_a_recipe(self, finished):
        assert main(["train", *SMALL, "--resume", "--recipe", "digits", "--out", str(finished)]) == 0

    def test_foreign_files_are_not_overwritten(self, capsys, tmp_path):
        (tmp_path / "metrics.jsonl").write_text("mine")
        self.check(tmp_path, capsys, SMALL, "holds a run already")

    def test_overwrite(self, finished, tmp_path):
        (tmp_path / "summary.json").write_text("old")
        assert main(["train", *SMALL, "--quiet", "--epochs", "1", "--overwrite", "--out", str(tmp_path)]) == 0
        assert json.loads((tmp_path / "summary.json").read_text())["epochs"] == 1
        assert main(["compare", *SMALL, "--data", "nowhere", "--overwrite", "--out", str(tmp_path.parent)]) == 2
        assert (tmp_path / "summary.json").exists()

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["--stages", "9"], "the network has only 4 layers"),
            (["--model", "rev-gpt"], "rev-gpt is for"),
            (["--optimizer", "adamw", "--corrections", "spike"], "leave spike out"),
        ],
    )
    def test_what_cannot_be_trained_replaces_nothing(self, finished, capsys, arguments, words):
        own = [*SMALL, *arguments] if "--model" not in arguments else [*arguments, "--data", "digits"]
        self.check(finished, capsys, [*own, "--overwrite"], words)

    def test_a_run_with_damaged_checkpoints_is_overwritten(self, finished, tmp_path):
        folder = shutil.copytree(finished, tmp_path / "run")
        (folder / "checkpoint" / "latest.json").write_text("{")
        assert main(["train", *SMALL, "--quiet", "--epochs", "1", "--overwrite", "--out", str(folder)]) == 0
        assert json.loads((folder / "summary.json").read_text())["epochs"] == 1

    def test_truncated_checkpoint(self, finished, capsys, tmp_path):
        broken = tmp_path / "broken"
        broken.mkdir()
        for name in ("config.json", "metrics.jsonl"):
            (broken / name).write_bytes((finished / name).read_bytes())
        shutil.copytree(finished / "checkpoint", broken / "checkpoint")
        for name in ("run.pt", "stage1.pt"):
            part = next((broken / "checkpoint").glob(f"*/{name}"))
            whole = part.read_bytes()
            part.write_bytes(whole[:500])
            remedy = f"or remove {broken / 'checkpoint'} to start again"
            self.check(broken, capsys, ["--resume"], f"{name} is not a complete checkpoint", remedy)
            part.unlink()
            self.check(broken, capsys, ["--resume"], f"{name} of the last checkpoint is not in", remedy)
            part.write_bytes(whole)
        (broken / "checkpoint" / "latest.json").write_text("{")
        self.check(broken, capsys, ["--resume"], "latest.json is damaged")
        (broken / "checkpoint" / "latest.json").unlink()
        self.check(broken, capsys, ["--resume"], "latest.json is missing, but")

    def test_weights_that_are_lost_are_written_anew(self, finished, tmp_path):
        folder = shutil.copytree(finished, tmp_path / "run")
        weights = folder / "weights.safetensors"
        content = weights.read_bytes()
        for lost in (None, content[:-1] + b"?"):
            weights.unlink()
            if lost is not None:
                weights.write_bytes(lost)
            assert main(["train", "--resume", "--out", str(folder), "--device", "cpu", "--quiet"]) == 0
            assert weights.read_bytes() == content

    def test_data_may_have_moved_but_not_changed(self, finished, capsys):
        self.check(
            finished,
            capsys,
            ["--resume", "--data", "synthetic:1x8x8:10"],
            "is not the data that the run started with, or has changed",
        )

    def test_a_folder_that_cannot_be_made(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(NotADirectoryError):
            FolderLock(tmp_path / "file" / "run")
        gc.collect()  # nothing more is said by what was half made

    def test_two_at_a_time(self, finished, capsys, tmp_path):
        folder = shutil.copytree(finished, tmp_path / "run")
        claim = FolderLock(folder)
        self.check(folder, capsys, ["--resume"], "another process is training in")
        claim.close()
        assert main(["train", "--resume", "--out", str(folder), "--device", "cpu", "--quiet"]) == 0

    def test_a_recovery_waits_for_the_lock_that_workers_of_a_lost_process_hold(self, tmp_path):
        claim = FolderLock(tmp_path)
        threading.Timer(0.2, claim.close).start()
        FolderLock(tmp_path, patience=30.0).close()
        claim = FolderLock(tmp_path)
        with pytest.raises(ValueError, match="another process is training in"):
            FolderLock(tmp_path, patience=0.1)
        claim.close()

    @pytest.mark.parametrize("how", [[], ["--resume"]])
    def test_one_that_another_has_trained_meanwhile_is_left_alone(self, finished, capsys, tmp_path, monkeypatch, how):
        def late(folder, patience):
            shutil.copytree(finished, folder)
            return FolderLock(folder)

        monkeypatch.setattr("petra.runs.run.FolderLock", late)
        given = ["--quiet", "--device", "cpu", "--out", str(tmp_path / "run")]
        assert main(["train", *SMALL, *how, *given]) == 2
        assert "another process has trained in" in capsys.readouterr().err
        for name in ("config.json", "metrics.jsonl"):
            assert (tmp_path / "run" / name).read_bytes() == (finished / name).read_bytes()

    def test_damaged_configuration(self, capsys, tmp_path):
        for text in ("{", "{}", "[]", '{"model": 3}'):
            (tmp_path / "config.json").write_text(text)
            self.check(tmp_path, capsys, ["--resume"], "config.json is damaged")

    def test_checkpoint_of_another_network(self, finished, capsys, tmp_path):
        shutil.copytree(finished / "checkpoint", tmp_path / "checkpoint")
        config = json.loads((finished / "config.json").read_text())
        config["model_options"]["width"] = 5
        (tmp_path / "config.json").write_text(json.dumps(config))
        self.check(tmp_path, capsys, ["--resume"], "does not fit the run")

    def test_divergence_keeps_what_was_good(self, capsys, tmp_path):
        wild = ["--lr", "1e12", "--warmup-epochs", "0", "--checkpoint-every", "1"]
        code = main(["train", *SMALL, "--quiet", *wild, "--out", str(tmp_path)])
        error = capsys.readouterr().err
        assert code == 1
        assert "finite" in error or "the loss of micro-batch" in error
        assert "lower the learning rate" in error
        assert len(error.strip().splitlines()) == 1
        assert not (tmp_path / "summary.json").exists()
        for path in (tmp_path / "checkpoint").glob("*/stage*.pt"):
            state = checkpoint.load(path)["weights"]["network"]
            assert all(torch.isfinite(value).all() for value in state.values())
