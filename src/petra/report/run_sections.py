"""The sections of a report about one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

from petra.measure.method_style import styles_of
from petra.measure.ticks import format_bytes, format_seconds
from petra.methods import METHODS
from petra.report.fidelity_section import fidelity_section
from petra.report.html import NOTHING, Html, code, definitions, join, missing, table, tag
from petra.report.line_chart import MARKERS, Series, line_chart
from petra.report.run_record import RunRecord, number, numbers, some_stages
from petra.report.stage_bars import stage_bars
from petra.report.timeline_chart import timeline_chart
from petra.runs.config import RunConfig
from petra.runs.run_folder import FIT_HAS_NO_OPTIONS, written_by_fit
from petra.schedule import PipelineSchedule, ScheduleTable, draw_svg
from petra.trainer.schedules import choose_schedule

_MOST_ACTIONS = 300
"""Drawings of schedules with more actions would make the report large."""
_ALWAYS = {"method", "stages", "schedule", "accumulate", "lr", "optimizer", "seed"}
"""Options that are shown even if they have their default values."""
SPLITS = (("test", False), ("training", True))
"""The parts of the data, and whether their lines are dashed."""


def run_sections(run: RunRecord) -> Html:
    """Return all sections about a run.

    Args:
        run: The run.

    Returns:
        The elements.
    """
    sections: list[tuple[str, Callable[[RunRecord], Html]]] = [
        ("Result", result_section),
        ("Curves", curves_section),
        ("Stages", stages_section),
        ("Timeline", timeline_section),
        ("Gradient fidelity", fidelity_section),
        ("Configuration", config_section),
        ("Environment", environment_section),
    ]
    return join([guarded(title, section, run) for title, section in sections])


def guarded(title: str, section: Callable[[RunRecord], Html], run: RunRecord) -> Html:
    """Return a section, or a note that its files hold something else than a run writes."""
    try:
        found = section(run)
    except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        found = missing(f"A file in {run.folder} is damaged ({type(error).__name__}: {error}).")
    return tag("section", tag("h3", title), found) if found else NOTHING


def result_section(run: RunRecord) -> Html:
    """Return the result of the run, the command and what is missing."""
    cells = [tag("div", tag("strong", value), tag("span", name)) for name, value in _results(run)]
    problems = (
        tag("ul", *(tag("li", problem) for problem in run.problems), class_="missing") if run.problems else NOTHING
    )
    command = join([tag("p", "Command:"), code(run.command)]) if run.command else NOTHING
    return join([tag("div", *cells, class_="results"), problems, command])


def _results(run: RunRecord) -> list[tuple[str, str]]:
    summary = run.summary
    epochs, epoch = number(run.config.get("epochs")), run.last("epoch")
    of = f" of {epochs:g}" if epochs is not None else ""
    state = "finished" if run.finished else "not finished"
    found = [("status", state), ("epochs", "none" if epoch is None else f"{epoch:g}{of}")]
    for name, label, form in (
        ("test_accuracy", "test accuracy", "{:.2%}"),
        ("test_loss", "test loss", "{:.4g}"),
        ("bits_per_byte", "bits per byte", "{:.4f}"),
        ("train_loss", "training loss", "{:.4g}"),
        ("samples_per_second", "samples per second", "{:.0f}"),
    ):
        value = number(summary.get(name))
        value = run.last(name) if value is None else value
        if value is not None:
            found.append((label, form.format(value)))
    best, where = number(summary.get("best_test_accuracy")), number(summary.get("best_epoch"))
    if best is not None and best >= 0:
        found.append((f"best accuracy{f', epoch {where:g}' if where is not None else ''}", f"{best:.2%}"))
    if (seconds := run.last("seconds")) is not None:
        found.append(("training time", format_seconds(seconds)))
    if (peak := number(summary.get("activation_peak_bytes"))) is not None:
        found.append(("peak activations of a process", format_bytes(peak)))
    if (parameters := number(summary.get("parameters"))) is not None:
        found.append(("parameters", f"{parameters:,.0f}"))
    return found


def loss_charts(runs: Sequence[RunRecord]) -> list[Html]:
    """Return charts of losses, accuracy and learning rates of one run or several."""
    x, label = x_axis(runs)
    split = ": test (solid), training (dashed)" if len(runs) > 1 else ""
    charts = [
        line_chart(f"loss{split}", _splits(runs, "loss", x), label),
        line_chart(f"accuracy{split}", _splits(runs, "accuracy", x), label, y_kind="percent"),
    ]
    if len(runs) > 1:
        charts.append(line_chart("test loss over training time", _over_time(runs, "test_loss"), "time", "seconds"))
        accuracy = _over_time(runs, "test_accuracy")
        charts.append(line_chart("test accuracy over training time", accuracy, "time", "seconds", "percent"))
    bits = [Series(r.name, r.curve("bits_per_byte", x), c, m) for r, c, m in styled(runs)]
    charts.append(line_chart("bits per byte of test data", bits, label))
    return charts


def x_axis(runs: Sequence[RunRecord]) -> tuple[str, str]:
    """Return the metric of the horizontal axis and its label: epochs, or steps if there is less than one epoch."""
    if all((run.last("epoch") or 0) < 2 and run.last("step") is not None for run in runs):
        return "step", "step"
    return "epoch", "epoch"


def styled(runs: Sequence[RunRecord]) -> list[tuple[RunRecord, str, str]]:
    """Return each run with the class of its colour and its marker."""
    styles = styles_of([run.method for run in runs])
    return [(run, f"r{i}", style.marker) for i, (run, style) in enumerate(zip(runs, styles, strict=True))]


def _splits(runs: Sequence[RunRecord], metric: str, x: str) -> list[Series]:
    """Return a line of each run for each part of the data: solid for test data, dashed for training data."""
    found = []
    for run, colour, marker in styled(runs):
        for (split, dashed), key in zip(SPLITS, (f"test_{metric}", f"train_{metric}"), strict=True):
            name = split if len(runs) == 1 else f"{run.name}, {split}" if dashed else run.name
            shown = colour if len(runs) > 1 else f"s{2 * dashed}"
            mark, named = ("s", True) if dashed and len(runs) == 1 else (marker, not dashed or len(runs) == 1)
            found.append(Series(name, run.curve(key, x), shown, mark, dashed, named))
    return found


def _over_time(runs: Sequence[RunRecord], metric: str) -> list[Series]:
    return [Series(run.name, run.curve(metric, "seconds"), c, m) for run, c, m in styled(runs)]


def curves_section(run: RunRecord) -> Html:
    """Return the charts of losses, accuracy, learning rates and speed."""
    if not run.metrics:
        return missing("No epoch has ended yet.")
    x, label = x_axis([run])
    speed = [Series("samples per second", run.curve("samples_per_second", x), "s1", "o")]
    charts = [
        *loss_charts([run]),
        line_chart("learning rate", learning_rates(run, x), label, zero=True, note=_correction_note(run)),
        line_chart("samples per second (mean so far)", speed, label, zero=True),
    ]
    return tag("div", *charts, class_="charts")


def learning_rates(run: RunRecord, x: str) -> list[Series]:
    """Return the learning rate of every stage if it is recorded, otherwise that of the schedule of all stages."""
    recorded = [r for r in run.metrics if isinstance(r.get("learning_rates"), list)]
    if not recorded:
        return [Series("all stages", run.curve("lr", x), "s0", "o")]
    count = max(len(r["learning_rates"]) for r in recorded)
    found = []
    for i, stage in enumerate(some_stages(list(range(count)))):
        points = [(number(r.get(x)), [*numbers(r["learning_rates"]), *[None] * count][stage]) for r in recorded]
        found.append(Series(f"stage {stage}", points, f"s{i}", MARKERS[i]))
    return found


def _correction_note(run: RunRecord) -> str:
    names = run.config.get("corrections")
    if not isinstance(names, list) or not names:
        return ""
    return f"Before corrections of staleness ({', '.join(map(str, names))}), which may change the steps of stages."


def staleness_of(run: RunRecord) -> list[int]:
    """Return the micro-batches between forward and backward of each stage; an empty list if they are not known."""
    schedule = schedule_of(run)
    if schedule is not None and schedule.exact:
        return [0] * schedule.stages
    if recorded := [int(n) for n in numbers(run.summary.get("staleness")) if n is not None]:
        return recorded
    return [] if schedule is None else [schedule.staleness(stage) for stage in range(schedule.stages)]


def schedule_of(run: RunRecord) -> PipelineSchedule | None:
    """Return the schedule of the run, or None if the options do not tell."""
    method = METHODS.get(run.method)
    accumulate = number(run.config.get("accumulate"))
    if method is None or run.stages < 1 or accumulate is None:
        return None
    ranks = int(number(run.summary.get("ranks")) or 1)
    try:
        return choose_schedule(method, run.stages, int(accumulate), run.config.get("schedule"), None, ranks)
    except (ValueError, TypeError):
        return None


def memory_rows(run: RunRecord) -> list[dict[str, float]]:
    """Return the bytes of each stage by purpose; an empty list if they are not recorded."""
    rows = run.summary.get("memory_bytes")
    if not isinstance(rows, list):
        return []
    return [{name: number(size) or 0.0 for name, size in row.items()} for row in rows if isinstance(row, dict)]


def stages_section(run: RunRecord) -> Html:
    """Return staleness and memory of each stage."""
    staleness, memory = staleness_of(run), memory_rows(run)
    layers = run.summary.get("stages") if isinstance(run.summary.get("stages"), list) else []
    count = max(run.stages, len(staleness), len(memory))
    if count == 0:
        return missing("The number of stages is not known, because config.json and summary.json are missing.")
    note = "" if memory else "Memory is recorded in summary.json when a run finishes."
    points = [(float(stage), float(n)) for stage, n in enumerate(staleness)]
    late = line_chart(
        "staleness: micro-batches between forward and backward",
        [Series("staleness", points, "s0", "o")],
        "stage",
        "integer",
        "integer",
        zero=True,
    )
    bars = stage_bars(
        "memory of each stage, activations at their peak", [(f"stage {i}", row) for i, row in enumerate(memory)]
    )
    names = [name for name in dict.fromkeys(n for row in memory for n in row) if any(row.get(name) for row in memory)]
    header = ["stage", "layers", "staleness", *(name.replace("_", " ") for name in names), *["all"] * bool(memory)]

    def cell(values: Sequence[object], stage: int) -> object:
        return values[stage] if stage < len(values) else "–"

    rows = []
    for stage in range(count):
        own: Mapping[str, float] = memory[stage] if stage < len(memory) else {}
        sizes = [format_bytes(own.get(name, 0.0)) for name in names] + [format_bytes(sum(own.values()))] * bool(memory)
        rows.append([stage, cell(layers or [], stage), cell(staleness, stage), *sizes])
    details = tag("details", tag("summary", "Table of all stages"), table(header, rows))
    return join([tag("div", late, bars, class_="charts"), missing(note) if note else NOTHING, details])


def timeline_section(run: RunRecord) -> Html:
    """Return the measured timeline, if there is one, and the drawing of the schedule."""
    found = []
    if run.trace is not None and run.trace.events:
        found.append(timeline_chart(run.trace, "measured: some ticks of the full pipeline"))
        if idle := run.trace.idle():
            rows = [[name, f"{share:.1%}"] for name, share in zip(run.trace.names, idle, strict=True)]
            found.append(table(["process", "idle"], rows))
    else:
        found.append(missing("No timeline was measured. To record one, add", tag("code", "--trace 100")))
    schedule = schedule_of(run)
    if schedule is not None:
        fill = max((schedule.staleness(stage) for stage in range(schedule.stages)), default=0)
        microbatches = min(fill + 4, _MOST_ACTIONS // (3 * schedule.stages), 12)
        if microbatches >= 2:
            drawn = Html(draw_svg(ScheduleTable.of(schedule, microbatches)))
            name = run.summary.get("schedule") or schedule.name
            caption = tag("figcaption", f"schedule {name}: the first {microbatches} micro-batches")
            found.append(tag("figure", caption, tag("div", drawn, class_="scroll schedule")))
    return join(found)


def config_section(run: RunRecord) -> Html:
    """Return the options of the run; those that differ from the defaults come first."""
    if not run.config:
        return missing(FIT_HAS_NO_OPTIONS if written_by_fit(run.folder) else "config.json is missing or damaged.")
    defaults = {f.name: f.default for f in fields(RunConfig) if f.default is not MISSING}
    usual = {name: list(value) if isinstance(value, tuple) else value for name, value in defaults.items()}
    shown = {name for name, value in run.config.items() if name not in usual or usual[name] != value} | _ALWAYS
    chosen = [(name.replace("_", " "), show(value)) for name, value in run.config.items() if name in shown]
    others = [(name.replace("_", " "), show(value)) for name, value in run.config.items() if name not in shown]
    hidden = tag("details", tag("summary", "Options at their defaults"), definitions(others)) if others else NOTHING
    return join([definitions(chosen), hidden])


def environment_section(run: RunRecord) -> Html:
    """Return versions and hardware."""
    found = run.summary.get("environment")
    if not isinstance(found, dict):
        return missing("The environment is recorded in summary.json when a run finishes.")
    rows = [*found.items(), *((n, run.summary[n]) for n in ("ranks", "replicas", "weights_sha256") if n in run.summary)]
    return definitions([(name.replace("_", " "), show(value)) for name, value in rows])


def processes(run: RunRecord) -> dict[str, int]:
    """Return the number of processes; an empty dictionary if the run has not finished."""
    ranks = number(run.summary.get("ranks"))
    return {} if ranks is None else {"ranks": int(ranks)}


def show(value: Any) -> str:
    """Return an option in words."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(show, value)) or "none"
    if isinstance(value, dict):
        return ", ".join(f"{name} = {show(inner)}" for name, inner in value.items()) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
