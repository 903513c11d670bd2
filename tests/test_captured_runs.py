"""Runs whose ticks are replayed, from the command line; graphs are stood in for by recorded operations."""

import json

import pytest
from replaying import ReplayRecorder

from petra.cli.main import main
from petra.measure import likeness_figure
from petra.training import optimizers

SMALL = [
    *("--model", "revnet18", "--width", "2", "--depths", "1,1", "--data", "synthetic:1x6x6:4:120", "--stages", "4"),
    *("--batch-size", "8", "--epochs", "1", "--lr", "0.02", "--threads", "1", "--device", "cpu"),
]


def summary(folder):
    found = json.loads((folder / "summary.json").read_text())
    return {name: value for name, value in found.items() if name not in ("samples_per_second", "environment")}


def metrics(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{**json.loads(line), "samples_per_second": 0, "seconds": 0, "time": 0} for line in lines]


@pytest.fixture
def standing_in(monkeypatch):
    """As if the CPU could record; `capture` is what the trainer was told."""
    told = []

    def make_recorder(device, place, capture=None):
        told.append(capture)
        return None if capture is False else ReplayRecorder()

    monkeypatch.setattr("petra.training.trainer.make_recorder", make_recorder)
    monkeypatch.setattr(optimizers, "_fused", lambda parameters: True)
    return told


def test_a_replayed_run_is_the_same_run(tmp_path, standing_in):
    for name, option in (("plain", ["--no-capture"]), ("replayed", [])):
        assert main(["train", *SMALL, "--quiet", *option, "--out", str(tmp_path / name)]) == 0
    assert standing_in == [False, None]
    plain, replayed = summary(tmp_path / "plain"), summary(tmp_path / "replayed")
    assert (plain.pop("replayed_ticks"), plain.pop("not_replayed")) == (0, None)
    assert replayed.pop("replayed_ticks") > 5
    assert replayed.pop("not_replayed") is None
    assert plain == replayed
    assert metrics(tmp_path / "plain") == metrics(tmp_path / "replayed")


def test_why_ticks_are_not_replayed_is_said_once(tmp_path, standing_in, capsys):
    command = ["train", *SMALL, "--method", "gpipe", "--accumulate", "2", "--out", str(tmp_path / "run")]
    assert main(command) == 0
    assert capsys.readouterr().err.count("ticks are not replayed: gpipe empties the pipeline") == 1
    found = summary(tmp_path / "run")
    assert found["replayed_ticks"] == 0
    assert "empties the pipeline" in found["not_replayed"]


def test_ticks_that_were_replayed_before_a_run_was_resumed_count(tmp_path, standing_in, monkeypatch):
    monkeypatch.setattr("petra.training.run.Run._finish", lambda run: (_ for _ in ()).throw(RuntimeError("no end")))
    command = ["train", *SMALL, "--quiet", "--out", str(tmp_path / "run")]
    assert main(command) == 1
    monkeypatch.undo()
    assert main([*command, "--resume"]) == 0
    assert summary(tmp_path / "run")["replayed_ticks"] > 4


def test_comparisons_take_the_option(tmp_path, standing_in):
    methods = ["--methods", "backprop", "petra"]
    assert not main(["compare", *SMALL, "--quiet", *methods, "--out", str(tmp_path / "a")])
    assert all(one["replayed_ticks"] > 4 for one in json.loads((tmp_path / "a" / "comparison.json").read_text()))
    assert not main(["compare", *SMALL, "--quiet", *methods, "--no-capture", "--out", str(tmp_path / "b")])
    assert standing_in == [None, None, False, False]


def test_what_is_watched_for_fidelity_is_not_replayed_and_the_rest_is(tmp_path, standing_in, monkeypatch):
    monkeypatch.setattr(likeness_figure, "find_spec", lambda name: None)  # figures take longer than the runs
    rows = {}
    for every in (1, 20):
        for given in ([], ["--no-capture"]):
            folder = tmp_path / f"{every}{given}"
            how = ["--epochs", str(min(3, every)), "--every", str(every), *given, "--out", str(folder)]
            assert not main(["fidelity", *SMALL, "--quiet", *how])
            assert (summary(folder)["replayed_ticks"] > 4) == (every > 1 and not given)
            rows.setdefault(every, []).append((folder / "fidelity.jsonl").read_text())
    assert all(a == b != "" for a, b in rows.values())


@pytest.mark.parametrize("command", ["train", "compare", "fidelity"])
def test_capture_on_a_cpu_is_refused_with_a_word(command, tmp_path, capsys):
    assert main([command, *SMALL, "--capture", "--out", str(tmp_path / "run")]) == 2
    assert "--capture records CUDA graphs, and --device is cpu: leave --capture out" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_capture_on_several_ranks_is_refused_with_a_word(tmp_path, capsys):
    assert main(["train", *SMALL, "--capture", "--ranks", "2", "--out", str(tmp_path / "run")]) == 2
    assert "--capture is for one process, and there are to be 2" in capsys.readouterr().err
