"""Reports of runs: one HTML file with everything that is recorded in the folders of one run or several.

`run_record.py` reads a folder, and notes what is missing in it. `run_sections.py` and `comparison.py` write the parts
of the page that `page.py` puts together. Charts are SVG, drawn by `line_chart.py`, `stage_bars.py` and
`timeline_chart.py` with the ticks of `petra.measure.ticks`. All text goes through `html.py`, which escapes it.
"""

from petra.report.page import report
from petra.report.run_record import RunRecord, read_run, run_folders

__all__ = ["RunRecord", "read_run", "report", "run_folders"]
