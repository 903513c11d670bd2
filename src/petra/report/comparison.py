"""The part of a report that compares several runs: one table, and their curves in the same charts."""

from __future__ import annotations

from collections.abc import Sequence

from petra.measure.gradient_similarity import summarise
from petra.measure.ticks import format_bytes, format_seconds
from petra.report.html import NOTHING, Html, join, table, tag
from petra.report.line_chart import Series, line_chart
from petra.report.run_record import RunRecord, number
from petra.report.run_sections import loss_charts, memory_rows, processes, show, staleness_of, styled
from petra.report.stage_bars import stage_bars


def comparison(runs: Sequence[RunRecord]) -> Html:
    """Return the table and the charts of several runs.

    Args:
        runs: The runs.

    Returns:
        The elements.
    """
    charts = [*loss_charts(runs), _staleness(runs), _memory(runs), _fidelity(runs)]
    parts = [
        tag("h2", "Comparison", id="comparison"),
        _results(runs),
        tag("div", *charts, class_="charts"),
        _differences(runs),
    ]
    return tag("section", join(parts))


def _results(runs: Sequence[RunRecord]) -> Html:
    def value(run: RunRecord, name: str) -> float | None:
        found = number(run.summary.get(name))
        return run.last(name) if found is None else found

    columns = [
        ("test accuracy", "test_accuracy", "{:.2%}".format),
        ("test loss", "test_loss", "{:.4g}".format),
        ("bits per byte", "bits_per_byte", "{:.4f}".format),
        ("training time", "seconds", format_seconds),
        ("samples/s", "samples_per_second", "{:.0f}".format),
        ("peak activations of a process", "activation_peak_bytes", format_bytes),
    ]
    used = [column for column in columns if any(value(run, column[1]) is not None for run in runs)]
    rows = []
    for i, run in enumerate(runs):
        cells = [form(v) if (v := value(run, name)) is not None else "–" for _, name, form in used]
        stages = f"{run.stages or '–'}"
        schedule = str(run.summary.get("schedule") or "–")
        state = "" if run.finished else " (not finished)"
        rows.append([tag("a", run.name, href=f"#run-{i}"), f"{run.method}{state}", schedule, stages, *cells])
    return table(["run", "method", "schedule", "stages", *(title for title, _, _ in used)], rows, left=3)


def _staleness(runs: Sequence[RunRecord]) -> Html:
    lines: dict[tuple[int, ...], Series] = {}
    for run, colour, marker in styled(runs):
        found = tuple(staleness_of(run))
        same = lines.get(found)  # one line for runs with the same staleness
        name = f"{same.name}, {run.name}" if same else run.name
        points = [(float(stage), float(n)) for stage, n in enumerate(found)]
        lines[found] = Series(name, points, same.colour if same else colour, same.marker if same else marker)
    title = "staleness: micro-batches between forward and backward"
    return line_chart(title, list(lines.values()), "stage", y_kind="integer", zero=True, legend=True)


def _memory(runs: Sequence[RunRecord]) -> Html:
    rows = []
    for run in runs:
        if stages := memory_rows(run):
            names = dict.fromkeys(name for row in stages for name in row)
            rows.append((run.name, {name: sum(row.get(name, 0.0) for row in stages) for name in names}))
    return stage_bars("memory of all stages, each at its peak", rows)


def _fidelity(runs: Sequence[RunRecord]) -> Html:
    lines = []
    for run, colour, marker in styled(runs):
        means = [row for row in summarise(run.fidelity) if isinstance(row["stage"], int)] if run.fidelity else []
        lines.append(Series(run.name, [(number(row["stage"]), number(row["cosine"])) for row in means], colour, marker))
    return line_chart("mean cosine to the exact gradient", lines, "stage")


def _differences(runs: Sequence[RunRecord]) -> Html:
    """Return a table of the options that are not the same in all runs."""
    options = [{**run.config, **processes(run)} for run in runs]
    names = dict.fromkeys(name for own in options for name in own)
    different = [name for name in names if any(own.get(name) != options[0].get(name) for own in options)]
    if not different:
        return tag("p", "All runs have the same options.", class_="note")
    rows = [[name, *(show(own.get(name)) for own in options)] for name in different]
    body = table(["option", *(run.name for run in runs)], rows, left=len(runs) + 1)
    return join([tag("h3", "Options that differ"), body]) if rows else NOTHING
