"""How alike the gradient that a method uses, the exact and the delayed one are: cosine, norm ratio and σ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from math import isfinite, sqrt

import torch
from torch import Tensor

from petra.tables import render


@dataclass(frozen=True)
class Likeness:
    """The inner products of three gradients: used (u), exact (e) and delayed (d).

    They add up over stages, so the sum over all stages is the likeness of the gradients of the whole network.
    """

    uu: float
    ee: float
    dd: float
    ue: float
    ud: float
    de: float

    @classmethod
    def of(cls, gradients: Iterable[tuple[Tensor, Tensor, Tensor]]) -> Likeness:
        """From the three gradients of every parameter, in double precision whatever they are in."""
        total: Tensor | None = None
        for triple in gradients:
            u, e, d = (g.detach().flatten().double() for g in triple)
            found = torch.stack([u @ u, e @ e, d @ d, u @ e, u @ d, d @ e])
            total = found if total is None else total + found
        return cls(*([0.0] * 6 if total is None else total.tolist()))

    def __add__(self, other: Likeness) -> Likeness:
        return Likeness(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def figures(self) -> dict[str, float | None]:
        """Every quantity by its name; None where it is not defined because a gradient is zero, or not finite."""
        return {
            "cosine": _ratio(self.ue, sqrt(self.uu) * sqrt(self.ee)),
            "norm_ratio": _ratio(sqrt(self.uu), sqrt(self.ee)),
            "sigma": _ratio(self.ue, self.ee),
            "cosine_to_delayed": _ratio(self.ud, sqrt(self.uu) * sqrt(self.dd)),
            "norm_ratio_to_delayed": _ratio(sqrt(self.uu), sqrt(self.dd)),
            "delayed_cosine": _ratio(self.de, sqrt(self.dd) * sqrt(self.ee)),
            "delayed_norm_ratio": _ratio(sqrt(self.dd), sqrt(self.ee)),
            "delayed_sigma": _ratio(self.de, self.ee),
        }


def _ratio(a: float, b: float) -> float | None:
    return a / b if isfinite(a) and isfinite(b) and b > 0 else None


FIGURES = tuple(Likeness(*[0.0] * 6).figures())
"""The names of the quantities: of the gradient used against the exact one (Cos-Sim and Norm-Ratio of the PETRA
paper's Appendix B, σ of Assumption 1 of the Features Replay paper), of it against the delayed one, and of the delayed
one against the exact one."""


Row = Mapping[str, float | int | str | None]
"""A measurement: the update, the stage (or "all"), and every figure by its name."""


def summarise(rows: Iterable[Row]) -> list[dict[str, float | int | str | None]]:
    """For every stage and for all together, the mean of every figure and the lowest σ."""
    by_stage: dict[object, list[Row]] = {}
    for row in rows:
        by_stage.setdefault(row["stage"], []).append(row)
    result = []
    for stage, own in sorted(by_stage.items(), key=lambda item: (item[0] == "all", item[0])):
        found: dict[str, float | int | str | None] = {"stage": stage, "measurements": len(own)}  # type: ignore[dict-item]
        for name in FIGURES:
            values = [value for row in own if isinstance(value := row[name], int | float)]
            found[name] = sum(values) / len(values) if values else None
        found["lowest_sigma"] = min((s for row in own if isinstance(s := row["sigma"], int | float)), default=None)
        result.append(found)
    return result


def table(rows: Iterable[Row]) -> str:
    """A line a stage: means over the measurements."""
    names = (*FIGURES[:3], "lowest_sigma", *FIGURES[3:7])
    header = ["stage", *(name.replace("sigma", "σ").replace("_", " ") for name in names)]
    cells = [[row["stage"], *(_cell(row[name]) for name in names)] for row in summarise(rows)]
    return render(header, cells)


def _cell(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) else "-"
