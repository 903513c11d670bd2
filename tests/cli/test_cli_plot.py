"""Figures of runs: `petra compare --plot` and `petra plot`."""

import json
from unittest.mock import Mock

import pytest
from helpers.commands import SMALL

from petra.cli.main import main
from petra.measure import memory_figure, method_style, run_figure

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


@pytest.fixture
def drawn(monkeypatch):
    """The figures that are saved."""
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    found = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **how: (found.append(figure), path.write_bytes(PNG)))
    return found


def records(count):
    return [
        {"epoch": i, "seconds": 2.0 * i, "train_loss": 2.0 / i, "test_loss": 2.5 / i, "test_accuracy": 1 - 0.5 / i}
        for i in range(1, count + 1)
    ]


def test_a_single_epoch_can_be_seen(drawn, tmp_path):
    """A line through one point would be empty."""
    run_figure.draw_runs([run_figure.Curves("a", records(1))], tmp_path / "a.png")
    assert all(line.get_marker() != "None" for axis in drawn[0].axes for line in axis.get_lines())


def test_epochs_are_whole_accuracy_is_in_percent_and_the_legend_is_outside(drawn, tmp_path):
    runs = [run_figure.Curves(name, records(5), [], name) for name in ("petra", "delayed")]
    run_figure.draw_runs(runs, tmp_path / "a.png")
    loss, over_time, accuracy, _ = drawn[0].axes
    assert [text.get_text() for text in loss.get_xticklabels()] == ["1", "2", "3", "4", "5"]
    assert [text.get_text() for text in accuracy.get_yticklabels()] == ["50 %", "60 %", "70 %", "80 %", "90 %"]
    assert over_time.get_xticklabels()[-1].get_text().endswith(" s")
    assert all(axis.get_legend() is None for axis in drawn[0].axes)
    [legend] = drawn[0].legends
    assert [text.get_text() for text in legend.get_texts()] == ["petra", "delayed"]


def test_methods_have_the_same_colours_in_all_figures(drawn, tmp_path):
    for names in (["petra", "delayed"], ["backprop", "delayed", "petra"]):
        run_figure.draw_runs([run_figure.Curves(n, records(2), [], n) for n in names], tmp_path / "a.png")
        memory_figure.draw_memory({name: {1: 100, 2: 150} for name in names}, tmp_path / "b.png")
    found = [{line.get_label(): line.get_color() for line in figure.axes[0].get_lines()} for figure in drawn]
    assert len({(one["petra"], one["delayed"]) for one in found}) == 1
    same = method_style.styles_of(["petra", "petra", "own"])
    assert len({style.light for style in same}) == len({style.marker for style in same}) == 3


@pytest.mark.parametrize(("largest", "scale"), [(3, "linear"), (20, "log")])
def test_small_methods_are_not_flattened_by_large_ones(largest, scale, drawn, tmp_path):
    memory_figure.draw_memory({"petra": {1: 100, 4: 100}, "ddg": {1: 100, 4: 100 * largest}}, tmp_path / "a.png")
    [axis] = drawn[0].axes
    assert axis.get_yscale() == scale
    assert [text.get_text() for text in axis.get_xticklabels()] == ["1", "4"]


@pytest.mark.parametrize(("highest", "scale"), [(10.0, "linear"), (3e5, "log")])
def test_losses_of_a_run_that_went_astray_leave_those_of_others_to_be_seen(highest, scale, tmp_path, drawn):
    losses = {"well": [2.0, 1.0, 0.5], "astray": [highest, 2.3, None]}
    runs = [
        run_figure.Curves(
            name,
            [{"epoch": i, "seconds": i, "test_loss": v, "test_accuracy": 0.001 + i} for i, v in enumerate(of_run)],
        )
        for name, of_run in losses.items()
    ]
    run_figure.draw_runs(runs, tmp_path / "a.png")
    assert [axis.get_yscale() for axis in drawn[0].axes] == [scale, scale, "linear", "linear"]


def test_runs_of_the_same_name_are_told_apart(compared, tmp_path, monkeypatch):
    """As those of two comparisons, with momentum and without; and a folder has a name from within."""
    drawn = Mock()
    monkeypatch.setattr("petra.cli.plot.draw_runs", drawn)
    monkeypatch.setattr("petra.cli.plot.check_plots", Mock())
    monkeypatch.chdir(compared / "ddg")
    twice = [compared / "ddg", compared / "backprop", compared / "ddg" / ".." / "backprop"]
    assert main(["plot", ".", *map(str, twice[1:]), "--out", str(tmp_path / "a.png")]) == 0
    assert [run.name for run in drawn.call_args.args[0]] == ["ddg", str(twice[1]), str(twice[2])]
