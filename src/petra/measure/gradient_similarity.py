"""Similarity of the gradients that a method uses, the exact and the delayed ones: cosine, norm ratio and σ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from math import isfinite, sqrt

import torch
from torch import Tensor

from petra.formatting import render


@dataclass(frozen=True)
class GradientSimilarity:
    """The inner products of three gradients: used (u), exact (e) and delayed (d).

    Inner products add up over stages, so the sum over all stages is the similarity of the gradients of the whole
    network.
    """

    uu: float
    ee: float
    dd: float
    ue: float
    ud: float
    de: float

    @classmethod
    def from_gradients(cls, gradients: Iterable[tuple[Tensor, Tensor, Tensor]]) -> GradientSimilarity:
        """Compute the inner products in double precision.

        Args:
            gradients: For every parameter, the used, the exact and the delayed gradient.

        Returns:
            The inner products of the concatenated gradients.
        """
        total: Tensor | None = None
        for triple in gradients:
            u, e, d = (g.detach().flatten().double() for g in triple)
            products = torch.stack([u @ u, e @ e, d @ d, u @ e, u @ d, d @ e])
            total = products if total is None else total + products
        return cls(*([0.0] * 6 if total is None else total.tolist()))

    def __add__(self, other: GradientSimilarity) -> GradientSimilarity:
        return GradientSimilarity(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def metrics(self) -> dict[str, float | None]:
        """Return all metrics.

        Returns:
            The metrics by name; None where one is undefined, because a gradient is zero or not finite.
        """
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


METRICS = tuple(GradientSimilarity(*[0.0] * 6).metrics())
"""The names of the metrics. The first three compare the used gradient with the exact one: Cos-Sim and Norm-Ratio of
Appendix B of the PETRA paper, and σ of Assumption 1 of the Features Replay paper. The next two compare the used one
with the delayed one, the last three the delayed one with the exact one."""


Row = Mapping[str, float | int | str | None]
"""A measurement: the update, the stage (or "all"), and every metric by its name."""


def summarise(rows: Iterable[Row]) -> list[dict[str, float | int | str | None]]:
    """Return the mean of every metric and the lowest σ, for every stage and for all stages together."""
    by_stage: dict[object, list[Row]] = {}
    for row in rows:
        by_stage.setdefault(row["stage"], []).append(row)
    result = []
    for stage, own in sorted(by_stage.items(), key=lambda item: (item[0] == "all", item[0])):
        summary: dict[str, float | int | str | None] = {"stage": stage, "measurements": len(own)}  # type: ignore[dict-item]
        for name in METRICS:
            values = [value for row in own if isinstance(value := row[name], int | float)]
            summary[name] = sum(values) / len(values) if values else None
        summary["lowest_sigma"] = min((s for row in own if isinstance(s := row["sigma"], int | float)), default=None)
        result.append(summary)
    return result


def table(rows: Iterable[Row], width: int | None = None) -> str:
    """Return a table with the means over all measurements, one line per stage, of at most this width."""
    names = (*METRICS[:3], "lowest_sigma", *METRICS[3:7])
    header = ["stage", *(name.replace("sigma", "σ").replace("_", " ") for name in names)]
    cells = [[row["stage"], *(_cell(row[name]) for name in names)] for row in summarise(rows)]
    return render(header, cells, width=width)


def _cell(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) else "-"
