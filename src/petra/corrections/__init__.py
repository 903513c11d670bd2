"""Ways to make up for staleness, which work in every pipelined method; ``docs/staleness.md`` has their formulas."""

from petra.corrections.corrected import Corrected
from petra.corrections.correction import Correction, Site
from petra.corrections.inertia import Inertia
from petra.corrections.peaks import Peaks
from petra.corrections.pipemare import Discrepancy, Reschedule
from petra.corrections.predict import Coast, Predict
from petra.corrections.rates import rates
from petra.corrections.registry import CORRECTIONS, choose, find
from petra.corrections.shrink import Shrink
from petra.corrections.spike import Spike

__all__ = [
    "CORRECTIONS",
    "Coast",
    "Corrected",
    "Correction",
    "Discrepancy",
    "Inertia",
    "Peaks",
    "Predict",
    "Reschedule",
    "Shrink",
    "Site",
    "Spike",
    "choose",
    "find",
    "rates",
]
