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
_CAUGHT_UP: dict[torch.device, bool] = {}
"""Whether the GPU had caught up with the host at the end of the last run, which is how the next one begins."""


def _unwind_overlapped(
    couplings: Sequence[Coupling], streams: Streams, gradients: Gradients, prepare: Prepare
) -> Reversal:
    """Two couplings at a time, unless the GPU has caught up with the host that launches its kernels.

    There is nothing to hide then, and a second lane would only cost the host time. One that is behind by less than a
    coupling has caught up: whatever is launched last takes its time in any case.
    """
    here = torch.cuda.current_stream(streams[0].device)
    recording = torch.cuda.is_current_stream_capturing()  # when an event may not be asked
    caught_up = not recording and _CAUGHT_UP.get(here.device, False)
    total: ParameterGradients = {}
    left = len(couplings)
    evaluated: torch.cuda.Event | None = None
    while left:
        if caught_up or left == 1:
            left -= 1
            prepare(left)
            rewound = couplings[left].rewind(streams)
            before, evaluated = evaluated, here.record_event()
            gradients, found = rewound.take(gradients)
            streams = rewound.inputs
            add_gradients(total, found)
            if before is not None:
                caught_up = not recording and before.query()  # type: ignore[no-untyped-call]
        else:
            evaluated = None
            left, caught_up, streams, gradients = _two_lanes(
                here, recording, couplings[:left], streams, gradients, prepare, total
            )
    if not recording:
        _CAUGHT_UP[here.device] = caught_up
    return Reversal(streams, gradients, total)


def _two_lanes(
    here: torch.cuda.Stream,
    recording: bool,
    couplings: Sequence[Coupling],
    streams: Streams,
    gradients: Gradients,
    prepare: Prepare,
    total: ParameterGradients,
) -> tuple[int, bool, Streams, Gradients]:
    """Couplings take turns on two CUDA streams, each with its evaluation and its gradient on the same one.

    Autograd runs a gradient on the stream of its evaluation, so the two cannot be kept apart by stream; but while one
    lane differentiates coupling i, the other evaluates i-1. Events order evaluations among themselves and gradients
    among themselves, and the host never waits. They also make memory safe that one lane frees and the other still
    reads: whatever a lane is given next comes after an event of the other lane that follows the last such reading.

    Ends early if the GPU catches up. Returns how many couplings are left, whether the GPU has caught up, and the
    outputs of those that are left with their gradients.
    """
    if here.device not in _SIDES:
        _SIDES[here.device] = torch.cuda.Stream(here.device)  # type: ignore[no-untyped-call]
        # The same parameters are used on both lanes on purpose; newer versions of PyTorch would warn.
        warn = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None)
        if warn is not None:
            warn(False)
    lanes = here, _SIDES[here.device]
    lanes[1].wait_stream(here)
    evaluated = differentiated = before = here.record_event()
    pending: tuple[torch.cuda.Stream, Rewound] | None = None
    left = len(couplings)

    def caught_up() -> bool:  # never mind what was launched last, for that takes its time in any case
        return not recording and evaluated.query() and before.query()

    def differentiate(lane: torch.cuda.Stream, rewound: Rewound) -> None:
        nonlocal gradients, differentiated, before
        with torch.cuda.stream(lane):
            lane.wait_event(differentiated)
            gradients, found = rewound.take(gradients)
            add_gradients(total, found)
            before, differentiated = differentiated, lane.record_event()

    try:
        for turn in range(len(couplings)):
            if turn > 1 and caught_up():
                break
            left -= 1
            lane = lanes[turn % 2]
            with torch.cuda.stream(lane):
                lane.wait_event(evaluated)
                prepare(left)
                rewound = couplings[left].rewind(streams)
                evaluated = lane.record_event()
            if pending is not None:
                differentiate(*pending)
            pending, streams = (lane, rewound), rewound.inputs
        assert pending is not None
        differentiate(*pending)
    finally:  # also after an error, for what the other lane still reads is about to be freed
        here.wait_stream(lanes[1])
    return left, caught_up(), streams, gradients
