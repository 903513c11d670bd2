"""Reversible layers, and exact backpropagation through them without stored activations.

Start with `coupling.py`: a coupling is one invertible step, with its forward, inverse and reverse computation. Then:

- `layer.py`: layers made of couplings, and the base class for your own reversible layers.
- `network.py`: `Network`, a sequence of layers, whose reversible layers are differentiated without stored activations.
- `backprop.py`: reversible layers as nodes of the autograd graph.
- `reverse_pass.py`: how the backward pass goes through a segment, on one CUDA stream or overlapped on two.
- `segment_graph.py`: a segment captured as CUDA graphs.
- `invertibility.py`: `check_invertible`, which compares inverse and gradients with plain autograd.
- `fixed_point.py`, `rearrange.py`: a bit-exact coupling, and invertible layers without parameters (i-RevNet).

The remaining files are tools: `streams.py` (the tensors between layers), `gradients.py`, `graph_leaks.py`,
`keyword_arguments.py`, `module_state.py`, `randomness.py` and `weight_versions.py`.
"""

from petra.reversible.backprop import pareprop, plain_autograd, reversible_segment
from petra.reversible.coupling import AdditiveCoupling, AffineCoupling, Coupling, TwoStreamCoupling
from petra.reversible.fixed_point import FixedPointCoupling
from petra.reversible.gradients import Reversal
from petra.reversible.invertibility import Invertibility, check_invertible
from petra.reversible.layer import CoupledLayer, ReversibleBlock, ReversibleLayer, ReversibleResidual
from petra.reversible.network import Network
from petra.reversible.rearrange import InjectiveStem, InvertibleDownsampling, Rearrangement, SpaceToDepth
from petra.reversible.streams import Gradients, Streams

__all__ = [
    "AdditiveCoupling",
    "AffineCoupling",
    "CoupledLayer",
    "Coupling",
    "FixedPointCoupling",
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
    "TwoStreamCoupling",
    "check_invertible",
    "pareprop",
    "plain_autograd",
    "reversible_segment",
]
