"""Optimizers that tolerate delayed gradients, as ordinary `torch.optim.Optimizer`s that also work without Petra.

`capturable.py` has their common base: an update launches few kernels, does not wait for the device and reads its
learning rate from device memory, so it can be part of a CUDA graph. `muon.py` orthogonalises momentum
(`newton_schulz.py`), `soap.py` runs Adam in the eigenbasis of Shampoo's matrices (`eigenbasis.py`), `nadamw.py` is
NAdam with decoupled weight decay, `adamw.py` updates the parameters that the others leave to AdamW, `groups.py`
finds the matrices that Muon should orthogonalise, and `combined.py` makes several optimizers act as one.
`adamw_bf16.py` is AdamW with moments of half the size (`stochastic_rounding.py`).
"""

from petra.optim.adamw_bf16 import AdamWBF16
from petra.optim.capturable import CapturableOptimizer
from petra.optim.combined import CombinedOptimizer, optimizers_of
from petra.optim.groups import hidden_matrices, muon_groups
from petra.optim.muon import Muon
from petra.optim.nadamw import NAdamW
from petra.optim.newton_schulz import orthogonalize
from petra.optim.soap import SOAP

__all__ = [
    "SOAP",
    "AdamWBF16",
    "CapturableOptimizer",
    "CombinedOptimizer",
    "Muon",
    "NAdamW",
    "hidden_matrices",
    "muon_groups",
    "optimizers_of",
    "orthogonalize",
]
