"""Petra trains reversible neural networks in parallel."""

from petra import models
from petra.conversion import ConversionReport, conversion_report, make_reversible
from petra.execution import Finished, NonFiniteLoss
from petra.methods import METHODS, LayerError, Method
from petra.reversible import (
    Additive,
    Affine,
    FixedPoint,
    InjectiveStem,
    Invertibility,
    InvertibleDownsampling,
    Network,
    ReversibleBlock,
    ReversibleLayer,
    ReversibleResidual,
    check_invertible,
    pareprop,
    plain_autograd,
)
from petra.training import Evaluation, Trainer, load

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "Additive",
    "Affine",
    "ConversionReport",
    "Evaluation",
    "Finished",
    "FixedPoint",
    "InjectiveStem",
    "Invertibility",
    "InvertibleDownsampling",
    "LayerError",
    "Method",
    "Network",
    "NonFiniteLoss",
    "ReversibleBlock",
    "ReversibleLayer",
    "ReversibleResidual",
    "Trainer",
    "__version__",
    "check_invertible",
    "conversion_report",
    "load",
    "make_reversible",
    "models",
    "pareprop",
    "plain_autograd",
]
