"""Going back through a run of couplings: one after the other, or two at a time on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from petra.reversible.coupling import Coupling, Rewound
from petra.reversible.gradients import ParameterGradients, Reversal, add_gradients
from petra.reversible.streams import Gradients, Streams

Prepare = Callable[[int], None]
"""Called with a coupling's number right before it is evaluated, to repeat its random numbers."""


def unwind(
    couplings: Sequence[Coupling], streams: Streams, gradients: Gradients, prepare: Prepare, overlap: bool = False
) -> Reversal:
    """Inputs and gradients from the outputs of the couplings and their gradients.

    With ``overlap`` and on a GPU, the inputs of one coupling are reconstructed beside the gradient of the one above it
    (PaReprop). Elsewhere it makes no difference, and the numbers are the same in any case.
    """
    if overlap and len(couplings) > 1 and streams[0].is_cuda:
        return _unwind_overlapped(couplings, streams, gradients, prepare)
    total: ParameterGradients = {}
    for i in reversed(range(len(couplings))):
        prepare(i)
        streams, gradients, found = couplings[i].reverse(streams, gradients)
        add_gradients(total, found)
    return Reversal(streams, gradients, total)


_SIDES: dict[torch.device, torch.cuda.Stream] = {}


def _unwind_overlapped(
    couplings: Sequence[Coupling], streams: Streams, gradients: Gradients, prepare: Prepare
) -> Reversal:
    """Couplings take turns on two CUDA streams, each with its evaluation and its gradient on the same one.

    Autograd runs a gradient on the stream of its evaluation, so the two cannot be kept apart by stream; but while one
    lane differentiates coupling i, the other evaluates i-1. Events order evaluations among themselves and gradients
    among themselves, and the host never waits. They also make memory safe that one lane frees and the other still
    reads: whatever a lane is given next comes after an event of the other lane that follows the last such reading.

    Where the GPU has caught up with the host that launches its kernels, there is nothing to hide and a second lane
    would only cost the host time: the run then stays on one until the GPU has work in hand again.
    """
    here = torch.cuda.current_stream(streams[0].device)
    if here.device not in _SIDES:
        _SIDES[here.device] = torch.cuda.Stream(here.device)  # type: ignore[no-untyped-call]
        # The same parameters are used on both lanes on purpose; newer versions of PyTorch would warn.
        warn = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None)
        if warn is not None:
            warn(False)
    lane, other = here, _SIDES[here.device]
    other.wait_stream(here)
    recording = torch.cuda.is_current_stream_capturing()
    total: ParameterGradients = {}
    evaluated = differentiated = earlier = here.record_event()
    pending: tuple[torch.cuda.Stream, Rewound] | None = None

    def differentiate() -> None:
        nonlocal gradients, differentiated, earlier, pending
        if pending is None:
            return
        (stream, rewound), pending = pending, None
        with torch.cuda.stream(stream):
            stream.wait_event(differentiated)
            gradients, found = rewound.take(gradients)
            add_gradients(total, found)
            earlier, differentiated = differentiated, stream.record_event()

    try:
        for i in reversed(range(len(couplings))):
            if not recording and evaluated.query() and earlier.query():
                differentiate()
            elif pending is not None:
                lane, other = other, lane
            with torch.cuda.stream(lane):
                lane.wait_event(evaluated)
                prepare(i)
                rewound = couplings[i].rewind(streams)
                evaluated = lane.record_event()
            differentiate()
            pending, streams = (lane, rewound), rewound.inputs
        differentiate()
    finally:  # also after an error, for what the other lane still reads is about to be freed
        here.wait_stream(_SIDES[here.device])
    return Reversal(streams, gradients, total)
