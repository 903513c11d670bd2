"""Figures of runs: `petra compare --plot` and `petra plot`."""

import json
from unittest.mock import Mock

import pytest
from helpers.commands import SMALL

from petra.cli.main import main
from petra.measure import run_figure

pytestmark = pytest.mark.slow

PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    methods = ["--methods", "backprop", "features-replay"]
    short = [*SMALL, "--batch-size", "128", "--quiet"]
    assert main(["compare", *short, "--momentum", "0", *methods, "--out", str(folder)]) == 0
    assert main(["fidelity", *short, "--every", "5", "--method", "ddg", "--out", str(folder / "ddg")]) == 0
    return folder


def test_seconds_are_noted_with_every_epoch(compared):
    """Of all epochs so far, without evaluation; what is trained in them gives the rate."""
    records = [json.loads(line) for line in (compared / "features-replay" / "metrics.jsonl").read_text().splitlines()]
    assert 0 < records[0]["seconds"] < records[1]["seconds"]
    trained = [r["seconds"] * r["samples_per_second"] for r in records]
    assert trained[1] == pytest.approx(2 * trained[0])


def test_runs_are_drawn_side_by_side(compared, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    folders = [str(compared / name) for name in ("backprop", "features-replay", "ddg")]
    assert main(["plot", *folders, "--out", str(tmp_path / "runs.png")]) == 0
    assert (tmp_path / "runs.png").read_bytes().startswith(PNG)
    assert main(["plot", *folders[:2], "--out", str(tmp_path / "losses.png")]) == 0
    assert (tmp_path / "losses.png").read_bytes().startswith(PNG)


def test_compare_draws_if_asked(tmp_path):
    pytest.importorskip("matplotlib")
    assert main(["compare", *SMALL, "--quiet", "--plot", "--methods", "ddg", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "comparison.png").read_bytes().startswith(PNG)


def test_figures_need_matplotlib_and_runs(compared, tmp_path, capsys, monkeypatch):
    """Before anything is trained."""
    monkeypatch.setattr(run_figure, "find_spec", lambda name: None)
    assert main(["plot", str(compared / "ddg")]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
    assert main(["compare", *SMALL, "--plot", "--out", str(tmp_path)]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())
    monkeypatch.setattr(run_figure, "find_spec", lambda name: True)
    assert main(["plot", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_a_single_epoch_can_be_seen():
    """A line through one point would be empty."""
    drawn = Mock()
    for count in (1, 2):
        records = [{"epoch": epoch, "test_loss": 0.5} for epoch in range(count)]
        run_figure._plot(drawn, [run_figure.Curves("a", records)], "epoch", ("test_loss",), "loss")
    assert [call.kwargs.get("marker") for call in drawn.plot.call_args_list] == ["o", None]


@pytest.mark.parametrize(("highest", "scale"), [(30.0, "linear"), (3e5, "log")])
def test_losses_of_a_run_that_went_astray_leave_those_of_others_to_be_seen(highest, scale, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **how: (drawn.append(figure), path.write_bytes(PNG)))
    losses = {"well": [2.0, 1.0, 0.5], "astray": [highest, 2.3, None]}
    runs = [
        run_figure.Curves(
            name,
            [{"epoch": i, "seconds": i, "test_loss": v, "test_accuracy": 0.001 + i} for i, v in enumerate(of_run)],
        )
        for name, of_run in losses.items()
    ]
    run_figure.draw_runs(runs, tmp_path / "a.png")
    assert [axis.get_yscale() for axis in drawn[0].axes] == [scale, scale, "linear"]


def test_runs_of_the_same_name_are_told_apart(compared, tmp_path, monkeypatch):
    """As those of two comparisons, with momentum and without; and a folder has a name from within."""
    drawn = Mock()
    monkeypatch.setattr("petra.cli.plot.draw_runs", drawn)
    monkeypatch.setattr("petra.cli.plot.check_plots", Mock())
    monkeypatch.chdir(compared / "ddg")
    twice = [compared / "ddg", compared / "backprop", compared / "ddg" / ".." / "backprop"]
    assert main(["plot", ".", *map(str, twice[1:]), "--out", str(tmp_path / "a.png")]) == 0
    assert [run.name for run in drawn.call_args.args[0]] == ["ddg", str(twice[1]), str(twice[2])]
