"""`petra plan --simulate`: what it prints and writes, and its errors."""

import json

import pytest

from petra.cli.main import main

TINY = ["plan", "--model", "rev-gpt", "--width", "16", "--depth", "4", "--heads", "2", "--seq-len", "8"]
SIMULATE = [*TINY, "--batch-size", "2", "--quiet", "--simulate"]


def test_a_pipeline_on_many_workers(tmp_path, capsys):
    files = ["--json", str(tmp_path / "plan.json"), "--timeline", str(tmp_path / "plan.svg")]
    cluster = ["--latency", "0.01", "--bandwidth", "100", "--node-size", "2", "--network-bandwidth", "10"]
    speed = ["--teraflops", "0.001", "--jitter", "0.1", "--stragglers", "0.1"]
    main([*SIMULATE, "--ranks", "3", "--replicas", "100", "--accumulate", "4", *cluster, *speed, *files])
    shown = capsys.readouterr().out
    assert "simulated on 300 workers: 3 per pipeline, 3 stages, 100 replicas" in shown
    assert "wrote" in shown
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["workers"] == 3
    assert len(found["peak_memory"]) == 3
    assert [layer for layers in found["layers"] for layer in layers] == list(range(6))
    assert found["cluster"]["network"]["bandwidth"] == 1.25e9
    assert found["cluster"]["link"]["latency"] == 1e-5
    # Each worker does its arithmetic, and what is left is idle time or the average.
    costs = found["costs"][0]
    work = 4 * (costs["forward"] + costs["backward"])
    assert 0 < work < found["seconds_per_update"]
    assert (tmp_path / "plan.svg").read_text().startswith("<svg")


def test_layers_are_timed_unless_a_speed_is_given(capsys):
    main([*SIMULATE, "--ranks", "2", "--schedule", "lock-step", "--memory-limit", "0.001"])
    shown = capsys.readouterr().out
    assert "rev-gpt with petra, lock-step" in shown
    assert "above the limit of 0.00 MiB: 0-1" in shown


def test_a_bubble_is_idle_time(capsys):
    uniform = ["--set", "mlp_ratio=4", "--stages", "2,2,2", "--teraflops", "1"]
    main([*SIMULATE, "--ranks", "3", "--method", "reversible", "--schedule", "1f1b", "--accumulate", "2", *uniform])
    shown = capsys.readouterr().out
    idle = float(shown.partition("idle: ")[2].partition("%")[0])
    assert 50 <= idle < 80  # at least (J - 1) / (M + J - 1); the first and the last stage have less work


def test_interleaved_stages_are_placed_on_their_workers(capsys):
    options = ["--stages", "4", "--schedule", "interleaved", "--method", "reversible", "--accumulate", "4"]
    main([*SIMULATE, "--ranks", "2", "--teraflops", "1", *options])
    assert "2 per pipeline, 4 stages" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([*TINY, "--ranks", "2", "--jitter", "0.1"], "--jitter is for simulations: add --simulate"),
        ([*SIMULATE, "--ranks", "2", "--network-latency", "1"], "give --node-size too"),
        ([*SIMULATE, "--ranks", "7"], "at most 6"),
        ([*SIMULATE, "--ranks", "2", "--stragglers", "2"], "--stragglers is 2.0: give between 0 and 1"),
        ([*SIMULATE, "--ranks", "2", "--teraflops", "0"], "--teraflops is 0.0: give more than 0"),
        (
            [*SIMULATE, "--ranks", "3", "--stages", "4", "--schedule", "interleaved", "--method", "reversible"],
            "puts 4 stages on 2 workers, but --ranks is 3",
        ),
    ],
)
def test_mistakes_are_reported(options, words, capsys):
    if "--batch-size" not in options:
        options = [*options, "--batch-size", "2"]
    assert main([*options, *(["--teraflops", "1"] if "interleaved" in options else [])]) != 0
    assert words in capsys.readouterr().err
