"""Corrections that compensate for staleness in pipelined methods.

`correction.py` has the interface and `stage_corrections.py` applies the corrections of a stage. Each correction is next
to the paper it comes from: `predict.py` (weight prediction), `inertia.py` (more momentum for stale stages), `spike.py`,
`shrink.py`, `damp.py` (smaller learning rates) and `pipemare.py`. `lookup.py` finds them by name and checks
combinations; `learning_rates.py` tracks and scales the learning rates of a stage. Corrections whose benefit the
project's measurements do not show are marked `experimental`.
"""

from petra.corrections.correction import Correction, StageContext
from petra.corrections.damp import Damp
from petra.corrections.inertia import Inertia
from petra.corrections.learning_rates import PeakLearningRates, scaled_learning_rates
from petra.corrections.lookup import CORRECTIONS, choose, find
from petra.corrections.pipemare import Discrepancy, Reschedule
from petra.corrections.predict import Coast, Predict
from petra.corrections.shrink import Shrink
from petra.corrections.spike import Spike
from petra.corrections.stage_corrections import StageCorrections

__all__ = [
    "CORRECTIONS",
    "Coast",
    "Correction",
    "Damp",
    "Discrepancy",
    "Inertia",
    "PeakLearningRates",
    "Predict",
    "Reschedule",
    "Shrink",
    "Spike",
    "StageContext",
    "StageCorrections",
    "choose",
    "find",
    "scaled_learning_rates",
]
