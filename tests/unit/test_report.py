"""Reports of runs: what they show, what they escape, and what they say if files are missing or damaged."""

import json
import re
from datetime import UTC, datetime
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from helpers.run_files import STAGES, events_of_four_stages, write_run

from petra.cli.report import command_of
from petra.measure.timeline import Trace
from petra.report import read_run, report, run_folders
from petra.report.line_chart import Series, line_chart, thin
from petra.report.run_sections import staleness_of
from petra.report.stage_bars import stage_bars
from petra.runs.config import RunConfig

SVG = "{http://www.w3.org/2000/svg}"
WHEN = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)


def page_of(*folders):
    return report([read_run(folder, folder.name, command_of) for folder in folders], WHEN)


def tree_of(page):
    """The elements, if the page is well-formed."""
    return ElementTree.fromstring(page.removeprefix("<!DOCTYPE html>\n"))


def texts(page):
    return " ".join("".join(tree_of(page).find("body").itertext()).split())


class Parser(HTMLParser):
    """Notes elements, and all addresses that a browser would load."""

    def __init__(self):
        super().__init__()
        self.elements, self.loaded, self.open = [], [], []

    def handle_starttag(self, tag, attributes):
        self.elements.append(tag)
        self.open.append(tag)
        self.loaded += [value for name, value in attributes if name in ("src", "href") and not value.startswith("#")]

    def handle_endtag(self, tag):
        while self.open and self.open.pop() != tag:
            pass


def captions(page):
    return ["".join(caption.itertext()) for caption in tree_of(page).iter("figcaption")]


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "petra", trace=True, fidelity=True)


def test_a_report_has_everything_that_a_run_recorded(run):
    page = page_of(run)
    assert captions(page) == [
        "loss",
        "accuracy",
        "learning rate",
        "samples per second (mean so far)",
        "staleness: micro-batches between forward and backward",
        "memory of each stage, activations at their peak",
        "measured: some ticks of the full pipeline",
        "schedule low-staleness: the first 7 micro-batches",
        "cosine to the exact gradient",
        "mean cosine of each stage",
        "norm relative to the exact gradient",
        "σ, the part of the gradient in the exact direction",
    ]
    shown = texts(page)
    for words in (
        "Petra report, 2026-01-02 03:04",
        "finishedstatus",
        "3 of 3epochs",
        "80.00%test accuracy",
        "85.00%best accuracy, epoch 2",
        "2.00 MiBpeak activations",
        "petra train --model revnet18 --data digits --method petra --stages 4 --epochs 3 --lr 0.05",
        "low-staleness",
        "torch2.13.0",
        "3 measurements, every 5 updates",
        "rank 0",
    ):
        assert words in shown
    assert not tree_of(page).findall(".//*[@class='missing']")
    assert len(page.encode()) < 100_000


def test_it_needs_no_network_and_no_script(run):
    page = page_of(run)
    parser = Parser()
    parser.feed(page)
    assert parser.loaded == []
    assert not {"script", "link", "img", "iframe", "object", "image", "use"} & set(parser.elements)
    assert not re.search(r"@import|url\(|https?://(?!www\.w3\.org/)", page)
    assert parser.open == []  # all elements are closed, except for those without an end
    assert 'name="viewport"' in page
    assert "prefers-color-scheme:dark" in page


def test_charts_stay_within_their_frames(run):
    for svg in tree_of(page_of(run)).iter(f"{SVG}svg"):
        left, top, width, height = map(float, svg.get("viewBox").split())
        for shape in svg.iter(f"{SVG}path"):
            if shape.get("class") in ("line", "dashed line"):
                numbers = [float(n) for n in re.findall(r"-?[\d.]+", shape.get("d"))]
                assert all(left <= x <= left + width for x in numbers[::2])
        for text in svg.iter(f"{SVG}text"):
            assert left <= float(text.get("x")) <= left + width
            assert top <= float(text.get("y")) <= top + height
        for bar in svg.iter(f"{SVG}rect"):
            assert float(bar.get("x", 0)) + float(bar.get("width")) <= left + width + 0.2


def test_names_and_options_cannot_become_markup(tmp_path):
    evil = '<script>alert("1")</script>&\x00'
    folder = write_run(tmp_path / "run", data=evil, fidelity=True)
    found = json.loads((folder / "summary.json").read_text())
    found["environment"][evil] = evil
    found["schedule"] = evil
    (folder / "summary.json").write_text(json.dumps(found))
    record = read_run(folder, f"{evil}'", command_of)
    record.problems.append(evil)
    page = report([record, record])
    parser = Parser()
    parser.feed(page)
    assert "script" not in parser.elements
    assert "<script" not in page
    assert texts(page).count('<script>alert("1")</script>&') >= 6


def test_several_runs_are_compared(run, tmp_path):
    other = write_run(tmp_path / "delayed", method="delayed", lr=0.01)
    page = page_of(run, other)
    tree = tree_of(page)
    tables = ["".join(table.itertext()) for table in tree.iter("table")]
    assert "test accuracy" in tables[0]
    assert "petra" in tables[0]
    assert "delayed" in tables[0]
    assert tables[1] == "optionpetradelayed" + "methodpetradelayed" + "lr0.050.01"
    first = next(tree.iter("figure"))
    lines = list(first.find(f"{SVG}svg").iter(f"{SVG}g"))
    assert [(g.get("class"), g.find(f"{SVG}path").get("class")) for g in lines] == [
        ("r0", "line"),
        ("r0", "dashed line"),
        ("r1", "line"),
        ("r1", "dashed line"),
    ]
    assert ["".join(item.itertext()) for item in first.iter("li")] == ["petra", "delayed"]
    assert [h.get("id") for h in tree.iter("h2")] == ["comparison", "run-0", "run-1"]
    links = {a.get("href") for a in tree.iter("a")}
    assert links == {"#comparison", "#run-0", "#run-1"}
    assert "petra, delayed" in [
        "".join(item.itertext()) for item in tree.iter("li")
    ]  # one line for two runs with the same staleness


def test_a_run_that_has_not_finished_is_reported_as_far_as_it_is(tmp_path):
    page = page_of(write_run(tmp_path / "run", finished=False, epochs=2))
    shown = texts(page)
    assert "not finishedstatus" in shown
    assert "2 of 3epochs" in shown
    assert "the run has not finished, or it was stopped: summary.json is missing" in shown
    assert "Memory is recorded in summary.json when a run finishes." in shown
    assert "staleness: micro-batches between forward and backward" in captions(page)  # from the options
    assert "--trace 100" in shown
    assert "petra fidelity --model revnet18" in shown


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", "{", "config.json is damaged"),
        ("config.json", None, "config.json is missing"),
        ("config.json", '{"model": 3}', "config.json is of another version of Petra"),
        ("metrics.jsonl", '{"epoch": 1, "test_loss": NaN}\nx\n{"epoch": 2, "test_loss": 0.5}\n', "damaged in line 2"),
        ("metrics.jsonl", "[]\n[]\n", "damaged in 2 lines, the first of them 1"),
        ("metrics.jsonl", b"\xff\xfe", "damaged in line 1"),
        ("metrics.jsonl", None, "metrics.jsonl is missing"),
        ("summary.json", "[1]", "summary.json is damaged (it is not an object)"),
        ("summary.json", b"\xff", "summary.json is damaged"),
        ("trace.json", "{}", "trace.json is damaged (KeyError: 'traceEvents')"),
        ("trace.json", "[" * 100_000, "trace.json is damaged"),
        ("fidelity.jsonl", "{", "fidelity.jsonl is damaged in line 1"),
    ],
)
def test_what_is_damaged_is_named_and_the_rest_is_shown(file, content, message, run):
    path = run / file
    (run / "network.json").write_text("{}")
    if content is None:
        path.unlink()
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    page = page_of(run)
    assert message in texts(page)
    assert len(captions(page)) >= 5


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("memory_bytes", [3, {"weights": "x"}]),
        ("staleness", "late"),
        ("stages", {"a": 1}),
        ("environment", []),
        ("activation_peak_bytes", "much"),
        ("best_epoch", None),
        ("schedule", 7),
    ],
)
def test_values_of_another_kind_are_left_out(name, value, run):
    found = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(found | {name: value}))
    assert len(captions(page_of(run))) >= 9


def test_the_number_of_processes_is_compared_and_in_the_command(run, tmp_path):
    other = write_run(tmp_path / "ranks")
    assert "All runs have the same options." in texts(page_of(run, other))
    found = json.loads((other / "summary.json").read_text())
    (other / "summary.json").write_text(json.dumps(found | {"ranks": 2}))
    shown = texts(page_of(run, other))
    assert "optionpetraranks" + "ranks12" in shown
    assert read_run(other, "ranks", command_of).command.endswith(" --ranks 2")
    assert "--ranks" not in read_run(run, "one", command_of).command
    assert "peak activations of a process" in shown


def test_a_folder_of_fit_has_no_options(tmp_path):
    for name in ("metrics.jsonl", "summary.json"):
        source = write_run(tmp_path / "run") / name
        (tmp_path / name).write_text(source.read_text())
    assert read_run(tmp_path, "fit").problems == []
    assert "Trainer.fit does not record options." in texts(page_of(tmp_path))
    (tmp_path / "summary.json").unlink()
    problem = "the run has not finished, or it was stopped: fit(..., resume=True) continues it"
    assert read_run(tmp_path, "fit").problems == [problem]


def test_exact_schedules_have_no_staleness(tmp_path):
    folder = write_run(tmp_path / "exact", schedule="1f1b", accumulate=4)
    assert staleness_of(read_run(folder, "exact")) == [0, 0, 0, 0]  # also of older runs, which recorded another one


def test_learning_rates_of_all_stages_if_they_are_recorded(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["learning_rates"] = [0.01 * (stage + 1) / line["epoch"] for stage in range(STAGES)]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    [figure] = [f for f in tree_of(page_of(run)).iter("figure") if "learning rate" in f.find("figcaption").text]
    assert ["".join(item.itertext()) for item in figure.iter("li")] == [f"stage {i}" for i in range(STAGES)]


def test_one_learning_rate_and_what_changes_it(tmp_path):
    assert "Before corrections" not in texts(page_of(write_run(tmp_path / "a")))
    shown = texts(page_of(write_run(tmp_path / "b", corrections=("damp:4.0",))))
    assert "Before corrections of staleness (damp:4.0)" in shown


def test_steps_instead_of_epochs_in_a_short_run(tmp_path):
    folder = write_run(tmp_path / "run", epochs=0)
    records = [{"step": n, "epoch": n / 100, "train_loss": 3 - n / 100} for n in range(1, 60)]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    figure = next(tree_of(page_of(folder)).iter("figure"))
    assert "step" in [t.text for t in figure.iter(f"{SVG}text")]


def test_training_losses_of_steps_are_not_mixed_with_means_over_epochs(tmp_path):
    folder = write_run(tmp_path / "run")
    steps = [{"step": n, "epoch": n / 10, "train_loss": 3.0} for n in (5, 15, 25)]
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(step) + "\n" for step in steps)
    record = read_run(folder, "run")
    assert record.curve("train_loss") == [(0.5, 3.0), (1.5, 3.0), (2.5, 3.0)]
    assert len(record.curve("test_loss")) == 3


def test_folders_of_comparisons_are_their_runs(tmp_path):
    runs = [write_run(tmp_path / "compare" / name) for name in ("b", "a")]
    assert run_folders([tmp_path / "compare", runs[0]]) == [runs[1], runs[0], runs[0]]
    (tmp_path / "compare" / "comparison.json").write_text('[{"method": "b"}, {"method": "c"}]')
    assert run_folders([tmp_path / "compare"]) == runs
    for path, message in (
        (tmp_path / "none", "does not exist"),
        (tmp_path, "holds no run"),
        (runs[0] / "config.json", "is a file"),
    ):
        with pytest.raises(ValueError, match=message):
            run_folders([path])


def test_nothing_that_can_be_read_is_an_error(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"nothing in .* can be read: config.json is damaged"):
        read_run(tmp_path, "run")


def test_the_command_gives_the_same_configuration(run):
    from petra.cli.options import given
    from petra.cli.parser import build_parser

    options = {"model_options": {"width": 8, "depths": [1, 1]}, "schedule": "lock-step", "lr_milestones": (0.5,)}
    config = RunConfig(model="revnet18", data="digits", stages=3, nesterov=False, **options)
    words = command_of(config.to_json()).split()
    assert words[:2] == ["petra", "train"]
    assert RunConfig.from_options(None, given(build_parser().parse_args(words[1:]))) == config


def test_a_trace_is_read_back(tmp_path):
    trace = events_of_four_stages()
    trace.save(tmp_path / "trace.json")
    found = Trace.load(tmp_path / "trace.json")
    assert (found.names, found.fill, found.clock_error) == (trace.names, trace.fill, trace.clock_error)
    assert [(e.process, e.tick, e.action) for e in found.events] == [
        (e.process, e.tick, e.action) for e in trace.events
    ]
    assert [e.began - e.asked for e in found.events] == pytest.approx([0.0005] * len(trace.events))
    assert found.idle() == pytest.approx(trace.idle())


def test_long_lines_keep_their_extremes():
    points = [(float(i), 1.0) for i in range(10_000)]
    points[1234], points[5678] = (1234.0, 9.0), (5678.0, -3.0)
    found = thin(points)
    assert len(found) <= 300
    assert {points[0], points[-1], points[1234], points[5678]} <= set(found)
    assert found == sorted(found)
    chart = line_chart("a", [Series("a", points, "s0", "o")], "step")
    assert len(chart) < 10_000


def test_lines_have_gaps_where_there_is_no_number():
    points = [(1, 1.0), (2, 2.0), (3, None), (4, float("nan")), (5, 1.0), (6, 0.5)]
    tree = ElementTree.fromstring(line_chart("a", [Series("a", points, "s0", "o")], "epoch"))
    [line] = [p for p in tree.iter(f"{SVG}path") if p.get("class") == "line"]
    assert line.get("d").count("M") == 2
    assert line_chart("a", [Series("a", [(1, None)], "s0", "o")], "epoch") == ""


def test_losses_that_span_decades_are_on_a_logarithmic_axis():
    series = [Series(str(i), [(1, 2.0), (2, end)], "s0", "o") for i, end in enumerate((0.01, 300.0))]
    tree = ElementTree.fromstring(line_chart("loss", series, "epoch"))
    assert tree.find("figcaption").text == "loss, logarithmic"


def test_bars_add_up():
    rows = [("a", {"weights": 100.0, "graph": 300.0, "none": 0.0}), ("b", {"weights": 200.0})]
    tree = ElementTree.fromstring(stage_bars("memory", rows))
    svg = tree.find(f"{SVG}svg")
    widths = [float(bar.get("width")) for bar in svg.iter(f"{SVG}rect")]
    assert widths[0] / widths[1] == pytest.approx(1 / 3, abs=0.01)
    assert widths[2] == pytest.approx(2 * widths[0], abs=0.3)
    assert ["".join(item.itertext()) for item in tree.iter("li")] == ["weights", "graphs"]
    assert stage_bars("memory", []) == ""
