"""The page of a report: head, style, the comparison of several runs, and the sections of each."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from petra.formatting import counted
from petra.measure.method_style import styles_of
from petra.report.comparison import comparison
from petra.report.html import NOTHING, Html, join, tag
from petra.report.run_record import RunRecord
from petra.report.run_sections import run_sections
from petra.report.style import style_sheet


def report(runs: Sequence[RunRecord], when: datetime | None = None) -> str:
    """Return the report of one run or several.

    Args:
        runs: The runs.
        when: The time to write into the report; None for now.

    Returns:
        An HTML page that needs no other file and no network.
    """
    title = runs[0].name if len(runs) == 1 else f"{counted(len(runs), 'run')}: {', '.join(run.name for run in runs)}"
    date = (when or datetime.now().astimezone()).strftime("%Y-%m-%d %H:%M")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name_="generator", content="petra report"),
        tag("title", f"Petra report: {title}"),
        tag("style", Html(style_sheet(styles_of([run.method for run in runs])))),
    )
    heading = tag("header", tag("h1", title), tag("p", f"Petra report, {date}", class_="sub"))
    links = [tag("a", "comparison", href="#comparison"), *(_link(i, run) for i, run in enumerate(runs))]
    body = [heading, tag("nav", join(links, " ")), comparison(runs)] if len(runs) > 1 else [heading]
    body += [_run(i, run, len(runs) > 1) for i, run in enumerate(runs)]
    return f"<!DOCTYPE html>\n{tag('html', head, tag('body', *body), lang='en')}\n"


def _link(number: int, run: RunRecord) -> Html:
    return tag("a", run.name, href=f"#run-{number}")


def _run(number: int, run: RunRecord, several: bool) -> Html:
    described = [run.config.get("model"), run.config.get("data"), run.method]
    sub = " · ".join(str(part) for part in described if part)
    title = tag("h2", run.name, id=f"run-{number}") if several else NOTHING
    return tag("article", title, tag("p", sub, class_="sub") if sub else NOTHING, run_sections(run))
