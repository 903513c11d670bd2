"""Runs whose ticks are captured, from the command line; recorded operations stand in for CUDA graphs."""

import json

import pytest
from helpers.operation_capture import OperationCapture

from petra.cli.main import main
from petra.measure import similarity_figure
from petra.trainer import optimizers

pytestmark = pytest.mark.slow

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
    """As if ticks could be captured on a CPU; returns the values of `cuda_graph` that trainers got."""
    values = []

    def make_graph_capture(device, cuda_graph=None):
        values.append(cuda_graph)
        return None if cuda_graph is False else OperationCapture()

    monkeypatch.setattr("petra.trainer.trainer.make_graph_capture", make_graph_capture)
    monkeypatch.setattr(optimizers, "_fused", lambda parameters: True)
    return values


def test_a_captured_run_is_the_same_run(tmp_path, standing_in):
    for name, option in (("plain", ["--no-cuda-graph"]), ("captured", [])):
        assert main(["train", *SMALL, "--quiet", *option, "--out", str(tmp_path / name)]) == 0
    assert standing_in == [False, None]
    plain, captured = summary(tmp_path / "plain"), summary(tmp_path / "captured")
    assert (plain.pop("captured_ticks"), plain.pop("not_captured")) == (0, None)
    assert captured.pop("captured_ticks") > 5
    assert captured.pop("not_captured") is None
    for stage in (*plain["memory_bytes"], *captured["memory_bytes"]):
        stage.pop("gradients")  # they are freed where nothing is captured
    assert plain == captured
    assert metrics(tmp_path / "plain") == metrics(tmp_path / "captured")


def test_why_ticks_are_not_captured_is_said_once(tmp_path, standing_in, capsys):
    command = [
        "train",
        *SMALL,
        "--method",
        "backprop",
        "--schedule",
        "1f1b",
        "--accumulate",
        "2",
        "--out",
        str(tmp_path / "run"),
    ]
    assert main(command) == 0
    assert capsys.readouterr().err.count("ticks are not captured: backprop keeps autograd graphs") == 1
    found = summary(tmp_path / "run")
    assert found["captured_ticks"] == 0
    assert "keeps autograd graphs" in found["not_captured"]


def test_ticks_that_were_captured_before_a_run_was_resumed_count(tmp_path, standing_in, monkeypatch):
    monkeypatch.setattr("petra.runs.run.Run._finish", lambda run: (_ for _ in ()).throw(RuntimeError("no end")))
    command = ["train", *SMALL, "--quiet", "--out", str(tmp_path / "run")]
    assert main(command) == 1
    monkeypatch.undo()
    assert main([*command, "--resume"]) == 0
    assert summary(tmp_path / "run")["captured_ticks"] > 4


def test_comparisons_take_the_option(tmp_path, standing_in):
    methods = ["--methods", "backprop", "petra"]
    assert not main(["compare", *SMALL, "--quiet", *methods, "--out", str(tmp_path / "a")])
    assert all(one["captured_ticks"] > 4 for one in json.loads((tmp_path / "a" / "comparison.json").read_text()))
    assert not main(["compare", *SMALL, "--quiet", *methods, "--no-cuda-graph", "--out", str(tmp_path / "b")])
    assert standing_in == [None, None, False, False]


def test_measured_ticks_are_not_captured_and_the_others_are(tmp_path, standing_in, monkeypatch):
    monkeypatch.setattr(similarity_figure, "find_spec", lambda name: None)  # figures take longer than the runs
    rows = {}
    for every in (1, 20):
        for given in ([], ["--no-cuda-graph"]):
            folder = tmp_path / f"{every}{given}"
            how = ["--epochs", str(min(3, every)), "--every", str(every), *given, "--out", str(folder)]
            assert not main(["fidelity", *SMALL, "--quiet", *how])
            assert (summary(folder)["captured_ticks"] > 4) == (every > 1 and not given)
            rows.setdefault(every, []).append((folder / "fidelity.jsonl").read_text())
    assert all(a == b != "" for a, b in rows.values())


@pytest.mark.parametrize("command", ["train", "compare", "fidelity"])
def test_capture_on_a_cpu_is_rejected(command, tmp_path, capsys):
    assert main([command, *SMALL, "--cuda-graph", "--out", str(tmp_path / "run")]) == 2
    assert "--cuda-graph captures CUDA graphs, and --device is cpu: leave --cuda-graph out" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
