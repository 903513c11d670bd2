"""Petra trains reversible neural networks in parallel."""

from petra import models
from petra.execution import Finished, NonFiniteLoss
from petra.methods import METHODS, LayerError, Method
from petra.reversible import (
    Invertibility,
    Network,
    ReversibleBlock,
    ReversibleLayer,
    ReversibleResidual,
    check_invertible,
    plain_autograd,
)
from petra.training import Evaluation, Trainer

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "Evaluation",
    "Finished",
    "Invertibility",
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
    "models",
    "plain_autograd",
]
