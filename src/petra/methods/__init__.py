"""The family of training methods, each a small stateless object."""

from petra.methods.backprop import Backprop, GPipeBackprop, OneForwardOneBackwardBackprop
from petra.methods.chain import Chain, Settings, Tape
from petra.methods.delayed import Checkpointed, Delayed
from petra.methods.dni import DNI
from petra.methods.method import BackwardMessage, Kept, Method
from petra.methods.petra import PaReprop, Petra, ReversibleBackprop, StashedPetra
from petra.methods.replay import DDG, FeaturesReplay
from petra.methods.segment import LayerError, Segment
from petra.methods.synthesizer import Synthesizer
from petra.names import unknown

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Backprop(),
        ReversibleBackprop(),
        PaReprop(),
        Petra(),
        StashedPetra(),
        Checkpointed(),
        Delayed(),
        GPipeBackprop(),
        OneForwardOneBackwardBackprop(),
        FeaturesReplay(),
        DDG(),
        DNI(),
    )
}
"""All methods by name."""


def find(name: str) -> Method:
    """The method of a name, or an error that helps."""
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return METHODS[name]


__all__ = [
    "METHODS",
    "BackwardMessage",
    "Chain",
    "Kept",
    "LayerError",
    "Method",
    "Segment",
    "Settings",
    "Synthesizer",
    "Tape",
    "find",
]
