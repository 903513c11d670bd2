"""Plots activation memory over the number of stages: Figure 5 of the Features Replay paper."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path


def draw_memory(methods: Mapping[str, Mapping[int, int]], path: Path, title: str = "") -> bool:
    """Plot the activations of several methods into a PNG file.

    Args:
        methods: For each method, the bytes of activations by number of stages.
        path: The file.
        title: The title of the figure.

    Returns:
        Whether matplotlib is installed, so that the figure was drawn.
    """
    if find_spec("matplotlib") is None:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for name, sizes in methods.items():
        axis.plot(list(sizes), [size / 2**20 for size in sizes.values()], "o-", label=name)
    axis.set(xlabel="stages K", ylabel="activations of all stages, MiB", title=title, ylim=(0, None))
    axis.set_xticks(sorted({k for sizes in methods.values() for k in sizes}))
    axis.legend(fontsize="small")
    temporary = path.with_name(path.name + ".tmp")
    figure.savefig(temporary, format="png", dpi=120)
    temporary.replace(path)
    return True
