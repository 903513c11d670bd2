"""The section about gradients: how similar those of the method are to exact ones."""

from __future__ import annotations

from shlex import quote

from petra.measure.gradient_similarity import summarise
from petra.measure.similarity_figure import rolling_mean
from petra.report.html import Html, code, join, missing, table, tag
from petra.report.line_chart import MARKERS, Series, line_chart
from petra.report.run_record import RunRecord, number, some_stages

_METRICS = (
    ("cosine", "cosine to the exact gradient"),
    ("norm_ratio", "norm relative to the exact gradient"),
    ("sigma", "σ, the part of the gradient in the exact direction"),
)
_MEANS = (
    ("cosine", "used and exact"),
    ("delayed_cosine", "delayed and exact"),
    ("cosine_to_delayed", "used and delayed"),
)


def fidelity_section(run: RunRecord) -> Html:
    """Return charts and means of the measurements, or how to make them.

    Args:
        run: The run.

    Returns:
        The elements.
    """
    if not run.fidelity:
        how = run.command.replace("petra train", "petra fidelity", 1) if run.command else "petra fidelity …"
        lacking = missing("Gradients were not compared with exact ones. This trains again, and measures on the way:")
        return join([lacking, code(f"{how} --out {quote(f'{run.folder}-fidelity')}")])
    stages = sorted({stage for row in run.fidelity if isinstance(stage := row["stage"], int)})
    chosen = some_stages(stages)
    charts = [line_chart(title, _over_updates(run, chosen, metric), "epoch") for metric, title in _METRICS]
    means = {row["stage"]: row for row in summarise(run.fidelity)}
    over_stages = [
        Series(label, [(float(s), number(means[s][name])) for s in stages], f"s{i}", MARKERS[i], i > 0)
        for i, (name, label) in enumerate(_MEANS)
    ]
    charts.insert(1, line_chart("mean cosine of each stage", over_stages, "stage"))
    header = ["stage", "cosine", "norm ratio", "σ", "lowest σ", "cosine to delayed", "delayed cosine"]
    names = ("cosine", "norm_ratio", "sigma", "lowest_sigma", "cosine_to_delayed", "delayed_cosine")
    rows = [[row["stage"], *(_cell(row[name]) for name in names)] for row in means.values()]
    count = sum(row["stage"] == "all" for row in run.fidelity)
    every = f", every {run.every} updates" if run.every else ""
    some = f" of {len(chosen)} of {len(stages)} stages" if len(chosen) < len(stages) else ""
    note = f"{count} measurements{every}. Lines{some} over epochs are rolling means over a twentieth of them."
    details = tag("details", tag("summary", "Means of all stages"), table(header, rows))
    return join([tag("div", *charts, class_="charts"), tag("p", note, class_="note"), details])


def _over_updates(run: RunRecord, stages: list[int], metric: str) -> list[Series]:
    found = []
    for i, stage in enumerate(stages):
        own = [row for row in run.fidelity if row["stage"] == stage and number(row.get(metric)) is not None]
        values = rolling_mean([float(row[metric]) for row in own])
        points = [(number(row.get("epoch")), value) for row, value in zip(own, values, strict=True)]
        found.append(Series(f"stage {stage}", points, f"s{i}", MARKERS[i]))
    return found


def _cell(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) else "–"
