"""Reversible layers, exact backprop through them without stored activations, and a check that they invert."""

from petra.reversible.backprop import pareprop, plain_autograd, reversible_run
from petra.reversible.check import Invertibility, check_invertible
from petra.reversible.coupling import Additive, Affine, Coupling, TwoStream
from petra.reversible.fixed_point import FixedPoint
from petra.reversible.gradients import Reversal
from petra.reversible.layer import CoupledLayer, ReversibleBlock, ReversibleLayer, ReversibleResidual
from petra.reversible.network import Network
from petra.reversible.rearrange import InjectiveStem, InvertibleDownsampling, Rearrangement, SpaceToDepth
from petra.reversible.streams import Gradients, Streams

__all__ = [
    "Additive",
    "Affine",
    "CoupledLayer",
    "Coupling",
    "FixedPoint",
    "Gradients",
    "InjectiveStem",
    "Invertibility",
    "InvertibleDownsampling",
    "Network",
    "Rearrangement",
    "Reversal",
    "ReversibleBlock",
    "ReversibleLayer",
    "ReversibleResidual",
    "SpaceToDepth",
    "Streams",
    "TwoStream",
    "check_invertible",
    "pareprop",
    "plain_autograd",
    "reversible_run",
]
