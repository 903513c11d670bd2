"""Draws activation memory against the number of modules: Figure 5 of the Features Replay paper."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path


def draw_memory(methods: Mapping[str, Mapping[int, int]], path: Path, title: str = "") -> bool:
    """Draw the bytes of every method against K into a PNG; False if matplotlib is not there."""
    if find_spec("matplotlib") is None:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for name, found in methods.items():
        axis.plot(list(found), [size / 2**20 for size in found.values()], "o-", label=name)
    axis.set(xlabel="modules K", ylabel="activations of all modules, MiB", title=title, ylim=(0, None))
    axis.set_xticks(sorted({k for found in methods.values() for k in found}))
    axis.legend(fontsize="small")
    whole = path.with_name(path.name + ".tmp")
    figure.savefig(whole, format="png", dpi=120)
    whole.replace(path)
    return True
