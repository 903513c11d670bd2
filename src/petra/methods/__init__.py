"""The family of training methods: backprop, PETRA, delayed gradients, Features Replay, DDG and DNI.

A method is a small stateless object that answers three questions: what a stage saves between forward and backward,
which weights the backward uses, and which schedule the stages follow. It knows nothing of processes or of the engine.

Start with `method.py`, the interface, and read each method next to its paper: `synchronous.py` (backprop),
`petra.py` (PETRA, reversible backprop, PaReprop), `delayed.py` (PipeDream, DSP), `features_replay.py` (Features Replay,
DDG) and `dni.py` with `synthesizer.py`. `stage_layers.py` evaluates the layers of a stage for all of them. It splits
them into segments (`segment.py`), records graphs (`tape.py`) and checks buffers (`buffer_guard.py`).
"""

from petra.formatting import unknown
from petra.methods.delayed import Checkpointed, Delayed
from petra.methods.dni import DNI
from petra.methods.features_replay import DDG, FeaturesReplay
from petra.methods.method import BackwardMessage, Method, SavedState
from petra.methods.petra import PaReprop, Petra, ReversibleBackprop, StashedPetra
from petra.methods.segment import LayerError, Segment
from petra.methods.stage_layers import Settings, StageLayers
from petra.methods.synchronous import Backprop
from petra.methods.synthesizer import Synthesizer
from petra.methods.tape import Tape
from petra.schedule import SCHEDULES

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
        FeaturesReplay(),
        DDG(),
        DNI(),
    )
}
"""All methods by name."""


def find(name: str) -> Method:
    """Return the method with a given name.

    Args:
        name: A key of `METHODS`.

    Returns:
        The method.

    Raises:
        ValueError: There is no such method. The message suggests a similar name.
    """
    if name in SCHEDULES:
        raise ValueError(f"{name} is a schedule: choose it as schedule, and a method such as backprop or reversible")
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    return METHODS[name]


__all__ = [
    "DDG",
    "DNI",
    "METHODS",
    "Backprop",
    "BackwardMessage",
    "Checkpointed",
    "Delayed",
    "FeaturesReplay",
    "LayerError",
    "Method",
    "PaReprop",
    "Petra",
    "ReversibleBackprop",
    "SavedState",
    "Segment",
    "Settings",
    "StageLayers",
    "StashedPetra",
    "Synthesizer",
    "Tape",
    "find",
]
