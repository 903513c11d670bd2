"""`petra fidelity` as a user meets it."""

import json
import signal
from itertools import combinations

import pytest
from helpers.commands import SMALL

from petra.cli.main import main
from petra.measure import similarity_figure as likeness_figure
from petra.measure.gradient_similarity import METRICS
from petra.runs.run import Run

pytestmark = pytest.mark.slow


def fidelity(*arguments):
    return main(["fidelity", *SMALL, "--quiet", *map(str, arguments)])


def rows(folder):
    return [json.loads(line) for line in (folder / "fidelity.jsonl").read_text().splitlines()]


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert main(["train", *SMALL, "--quiet", "--out", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("measured") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(likeness_figure, "find_spec", lambda name: None)
        assert fidelity("--every", 5, "--out", folder) == 0
    return folder


def test_without_matplotlib_there_is_all_but_the_figure(measured, trained, capsys):
    """46 updates of four stages; training is that of `petra train`."""
    assert summary(measured)["weights_sha256"] == summary(trained)["weights_sha256"]
    found = rows(measured)
    assert sorted({(r["update"], str(r["stage"])) for r in found}) == sorted(
        (u, s) for u in range(5, 46, 5) for s in ("0", "1", "2", "3", "all")
    )
    assert len(found) == 9 * 5
    assert all(set(METRICS) < set(row) for row in found)
    assert found[-1]["epoch"] == pytest.approx(45 / 23, abs=1e-4)
    means = json.loads((measured / "fidelity.json").read_text())
    assert means["every"] == 5
    assert means["staleness"] == [3, 2, 1, 0]
    assert [row["stage"] for row in means["means"]] == [0, 1, 2, 3, "all"]
    assert means["means"][3]["cosine_to_delayed"] == pytest.approx(1.0, abs=1e-6)  # the last stage is never late
    assert 0 < means["means"][0]["cosine"] < means["means"][3]["cosine"] <= 1
    assert not (measured / "fidelity.png").exists()


def test_a_report_shows_the_measurements(measured, tmp_path):
    assert main(["report", str(measured), "--out", str(tmp_path / "a.html")]) == 0
    page = (tmp_path / "a.html").read_text()
    assert "9 measurements, every 5 updates" in page
    assert "mean cosine of each stage" in page


def test_resuming_a_finished_run_only_draws(measured, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setattr(likeness_figure, "find_spec", lambda name: None)
    before = rows(measured)
    assert main(["fidelity", "--resume", "--quiet", "--out", str(measured)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["stage", "-----", "0", "1", "2", "3", "all"]
    assert "means of 9 updates of petra" in lines[-1]
    assert "pip install matplotlib" in lines[-1]
    assert rows(measured) == before
    assert json.loads((measured / "fidelity.json").read_text())["every"] == 5


def test_a_single_measurement_is_one_update(tmp_path, capsys):
    few = ["--data", "synthetic:1x8x8:3:64", "--epochs", "1", "--batch-size", "64", "--stages", "2"]
    small = ["--model", "revnet18", "--width", "4", "--depths", "1,1", "--warmup-epochs", "0", "--device", "cpu"]
    assert main(["fidelity", *small, *few, "--every", "1", "--quiet", "--out", str(tmp_path / "run")]) == 0
    assert "means of 1 update of petra; in " in capsys.readouterr().out


def test_the_figure(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert fidelity("--every", 10, "--epochs", 1, "--method", "backprop", "--out", tmp_path) == 0
    assert (tmp_path / "fidelity.png").read_bytes().startswith(b"\x89PNG")
    assert "no figure" not in capsys.readouterr().out
    assert all(row[name] == pytest.approx(1.0, abs=1e-4) for row in rows(tmp_path) for name in METRICS)


def test_titles_of_the_figure_do_not_run_into_each_other(measured, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    drawn, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *a, **k: (drawn.append(figure), save(figure, *a, **k))[1])
    assert likeness_figure.draw(rows(measured), tmp_path / "fidelity.png", "a title")
    places = [axis.title.get_window_extent() for axis in drawn[0].axes]
    assert not any(a.overlaps(b) for a, b in combinations(places, 2))


def test_interrupted_and_resumed(measured, tmp_path, monkeypatch, capsys):
    """What was in flight at the interruption is not measured; all else is the same."""
    monkeypatch.setattr(likeness_figure, "find_spec", lambda name: None)
    trace = Run._trace

    def interrupt(run, ending=False):
        if run.trainer.executor.microbatches == 26 and not ending:
            signal.raise_signal(signal.SIGTERM)
        trace(run, ending)

    with monkeypatch.context() as patch:
        patch.setattr(Run, "_trace", interrupt)
        assert fidelity("--every", 5, "--out", tmp_path) == 130
    assert "continue with --resume" in capsys.readouterr().err
    with (tmp_path / "fidelity.jsonl").open("a") as file:
        file.write('{"update": 9')  # as a kill leaves it
    assert fidelity("--every", 7, "--resume", "--out", tmp_path) == 2
    assert "is measured every 5 updates, not 7: leave it out" in capsys.readouterr().err
    assert fidelity("--resume", "--out", tmp_path) == 0  # every 5 as before, not 50
    assert summary(tmp_path)["weights_sha256"] == summary(measured)["weights_sha256"]
    assert rows(tmp_path) == [row for row in rows(measured) if row["update"] != 25]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--every", "0"], "--every is 0"),
        (["--method", "petre"], "did you mean 'petra'"),
        (["--stages", "9"], "stages is 9"),
        (["--resume"], "--resume needs --out"),
        (["--ranks", "2"], "--ranks"),
    ],
)
def test_bad_input(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        code = fidelity(*arguments)
    except SystemExit as ended:
        code = ended.code
    error = capsys.readouterr().err
    assert code == 2
    assert message in error
    assert len(error.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_runs_that_are_there(measured, tmp_path, capsys):
    assert fidelity("--out", measured) == 2
    assert "holds a run already: give --resume to continue it, --overwrite to replace it" in capsys.readouterr().err
    assert main(["fidelity", "--resume", "--stages", "2", "--out", str(measured)]) == 2
    assert "has stages 4, not 2" in capsys.readouterr().err
    (tmp_path / "fidelity.jsonl").write_text("mine")
    assert fidelity("--out", tmp_path) == 2
    assert "holds a run already" in capsys.readouterr().err


def test_nothing_to_measure(tmp_path, capsys):
    assert fidelity("--every", 1000, "--epochs", 1, "--out", tmp_path) == 0
    assert "give a smaller --every" in capsys.readouterr().out
