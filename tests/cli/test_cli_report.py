"""`petra report` from the command line, and its pages in a browser."""

import json
import re
import shutil
import subprocess
from html import escape, unescape

import pytest
from helpers.commands import SMALL
from helpers.run_files import write_run

from petra.cli.main import main

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
MEASURE = """
<script>
const size = e => e.getBoundingClientRect();
parent.document.title = JSON.stringify({
  window: innerWidth,
  page: document.documentElement.scrollWidth,
  loaded: performance.getEntriesByType("resource").length,
  background: getComputedStyle(document.body).backgroundColor,
  line: getComputedStyle(document.querySelector("path.line")).stroke,
  empty: [...document.querySelectorAll("svg")].filter(e => !e.closest("details") && !size(e).width).length,
  smallest: Math.min(...[...document.querySelectorAll("figure > svg > text")].map(e => size(e).height)),
  outside: [...document.querySelectorAll("figure > svg")].flatMap(s => [...s.querySelectorAll("text")]
    .filter(t => size(t).left < size(s).left - 1 || size(t).right > size(s).right + 1)).map(t => t.textContent),
});
</script>
"""


def test_a_report_of_one_run_is_in_its_folder(tmp_path, capsys):
    folder = write_run(tmp_path / "run")
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().out == f"1 run in {folder / 'report.html'}\n"
    assert "<h1>run</h1>" in (folder / "report.html").read_text()


def test_runs_of_the_same_name_are_told_apart(tmp_path, capsys):
    folders = [write_run(tmp_path / name / "run", finished=name == "a") for name in ("a", "b")]
    assert main(["report", *map(str, folders), "--out", str(tmp_path / "new" / "both.html")]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"{folders[1]}: the run has not finished, or it was stopped: summary.json is missing"
    assert said[1].startswith("2 runs in ")
    page = (tmp_path / "new" / "both.html").read_text()
    assert all(str(folder) in page for folder in folders)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{}/none"], "does not exist: give the folder of a run"),
        (["{}"], "holds no run: give the folder of one"),
        (["{}/run/config.json"], "is a file"),
        (["{}/run", "--out", "{}/a.png"], "a report is HTML: give a name that ends in .html"),
        (["{}/run", "--out", "{}"], "which is a folder"),
    ],
)
def test_mistakes(arguments, message, tmp_path, capsys):
    write_run(tmp_path / "run")
    folder = tmp_path / "empty" if arguments == ["{}"] else tmp_path
    folder.mkdir(exist_ok=True)
    assert main(["report", *(argument.format(folder) for argument in arguments)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_a_report_does_not_count_as_a_run_and_goes_with_it(tmp_path):
    folder = write_run(tmp_path / "run")
    assert main(["report", str(folder)]) == 0
    from petra.runs.run_folder import remove_run

    remove_run(folder)
    assert not any(folder.iterdir())


@pytest.mark.slow
def test_what_a_training_writes_is_what_a_report_reads(tmp_path):
    short = [*SMALL, "--epochs", "1", "--warmup-epochs", "0.5", "--quiet", "--batch-size", "256"]
    assert main(["train", *short, "--trace", "6", "--out", str(tmp_path / "all" / "x")]) == 0
    assert main(["report", str(tmp_path / "all")]) == 0
    page = (tmp_path / "all" / "report.html").read_text()
    assert "measured: some ticks" in page
    assert "memory of each stage" in page
    assert 'class="missing"' in page  # no gradients were compared
    assert "damaged" not in page


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize(("width", "dark"), [(390, True), (1200, False)])
def test_a_browser_shows_it_on_a_phone_and_on_a_screen(width, dark, tmp_path):
    names = ["petra", "a-name-that-is-much-longer-than-others-are"]
    folders = [str(write_run(tmp_path / name, trace=True, fidelity=True)) for name in names]
    page = tmp_path / "report.html"
    assert main(["report", *folders, "--out", str(page)]) == 0
    inner = escape(page.read_text().replace("</body>", MEASURE + "</body>"))
    frame = f'<iframe width="{width}" height="900" style="border:0" srcdoc="{inner}"></iframe>'  # windows are wider
    page.write_text(f'<!DOCTYPE html><meta charset="utf-8"><title></title>{frame}')
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else ["--blink-settings=preferredColorScheme=1"]
    where = [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1400,900", "--dump-dom", f"file://{page}"]
    command = [CHROMIUM, *FLAGS, *scheme, *where]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    found = json.loads(unescape(re.search(r"<title>(.*?)</title>", shown)[1]))
    assert found["window"] == width
    assert found["page"] <= width  # nothing is wider than the screen
    assert found["loaded"] == 0
    assert found["empty"] == 0
    assert found["outside"] == []
    assert found["smallest"] > 9  # pixels
    assert found["background"] == ("rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)")
    assert found["line"] == ("rgb(255, 140, 66)" if dark else "rgb(213, 94, 0)")
