"""Reversible layers, exact backprop through them without stored activations, and a check that they invert."""

from petra.reversible.backprop import plain_autograd, reversible_run
from petra.reversible.check import Invertibility, check_invertible
from petra.reversible.coupling import Additive, Coupling
from petra.reversible.gradients import Reversal
from petra.reversible.layer import CoupledLayer, ReversibleBlock, ReversibleLayer, ReversibleResidual
from petra.reversible.network import Network
from petra.reversible.rearrange import InjectiveStem, InvertibleDownsampling, Rearrangement, SpaceToDepth
from petra.reversible.streams import Gradients, Streams

__all__ = [
    "Additive",
    "CoupledLayer",
    "Coupling",
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
    "check_invertible",
    "plain_autograd",
    "reversible_run",
]
