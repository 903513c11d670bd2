"""The reverse pass through a sequence of couplings: one after another, or overlapped on two CUDA streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from petra.reversible.coupling import Coupling, Reconstructed
from petra.reversible.gradients import ParameterGradients, Reversal, add_gradients
from petra.reversible.streams import Gradients, Streams

Prepare = Callable[[int], None]
"""Called with a coupling's index right before the coupling is evaluated, to restore its random state."""


def reverse_pass(
    couplings: Sequence[Coupling], streams: Streams, gradients: Gradients, prepare: Prepare, overlap: bool = False
) -> Reversal:
    """Compute inputs and all gradients from the outputs of the couplings and their gradients.

    With `overlap` and on a GPU, the inputs of one coupling are reconstructed while the gradient of the next one is
    computed (PaReprop). The results are the same in any case.
    """
    if overlap and len(couplings) > 1 and streams[0].is_cuda:
        return _reverse_pass_overlapped(couplings, streams, gradients, prepare)
    total: ParameterGradients = {}
    for i in reversed(range(len(couplings))):
        prepare(i)
        streams, gradients, found = couplings[i].reverse(streams, gradients)
        add_gradients(total, found)
    return Reversal(streams, gradients, total)


_SIDE_STREAMS: dict[torch.device, torch.cuda.Stream] = {}
_CAUGHT_UP: dict[torch.device, bool] = {}
"""True if the GPU had caught up with the host at the end of the last segment; the next segment starts with it."""


def _reverse_pass_overlapped(
    couplings: Sequence[Coupling], streams: Streams, gradients: Gradients, prepare: Prepare
) -> Reversal:
    """Process two couplings at a time, unless the GPU has caught up with the host that launches its kernels.

    In that case there is nothing to overlap, and a second CUDA stream would only cost host time. A GPU counts as caught
    up if it is less than one coupling behind, because the kernels launched last take their time in any case.
    """
    current = torch.cuda.current_stream(streams[0].device)
    capturing = torch.cuda.is_current_stream_capturing()  # events must not be queried then
    caught_up = not capturing and _CAUGHT_UP.get(current.device, False)
    total: ParameterGradients = {}
    left = len(couplings)
    evaluated: torch.cuda.Event | None = None
    while left:
        if caught_up or left == 1:
            left -= 1
            prepare(left)
            reconstructed = couplings[left].reconstruct(streams)
            before, evaluated = evaluated, current.record_event()
            gradients, found = reconstructed.backward(gradients)
            streams = reconstructed.inputs
            add_gradients(total, found)
            if before is not None:
                caught_up = not capturing and before.query()  # type: ignore[no-untyped-call]
        else:
            evaluated = None
            left, caught_up, streams, gradients = _on_two_cuda_streams(
                current, capturing, couplings[:left], streams, gradients, prepare, total
            )
    if not capturing:
        _CAUGHT_UP[current.device] = caught_up
    return Reversal(streams, gradients, total)


def _on_two_cuda_streams(
    current: torch.cuda.Stream,
    capturing: bool,
    couplings: Sequence[Coupling],
    streams: Streams,
    gradients: Gradients,
    prepare: Prepare,
    total: ParameterGradients,
) -> tuple[int, bool, Streams, Gradients]:
    """Alternate couplings between two CUDA streams, each coupling with its evaluation and gradient on the same one.

    Autograd computes a gradient on the CUDA stream of its evaluation, so evaluations and gradients cannot be separated
    by CUDA stream. But while one CUDA stream differentiates coupling i, the other evaluates coupling i-1. Events order
    the evaluations among themselves and the gradients among themselves; the host never waits. The events also protect
    memory that one CUDA stream frees while the other still reads it: whatever the first one launches next waits for an
    event of the other one that follows the last such read.

    Stops early if the GPU catches up. Returns how many couplings are left, whether the GPU has caught up, and the
    outputs of the last coupling that is left with their gradients.
    """
    if current.device not in _SIDE_STREAMS:
        _SIDE_STREAMS[current.device] = torch.cuda.Stream(current.device)  # type: ignore[no-untyped-call]
        # Both CUDA streams use the same parameters on purpose; newer versions of PyTorch would warn.
        warn = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None)
        if warn is not None:
            warn(False)
    cuda_streams = current, _SIDE_STREAMS[current.device]
    cuda_streams[1].wait_stream(current)
    evaluated = differentiated = before = current.record_event()
    pending: tuple[torch.cuda.Stream, Reconstructed] | None = None
    left = len(couplings)

    def caught_up() -> bool:  # ignores the kernels launched last, which take their time in any case
        return not capturing and evaluated.query() and before.query()

    def differentiate(cuda_stream: torch.cuda.Stream, reconstructed: Reconstructed) -> None:
        nonlocal gradients, differentiated, before
        with torch.cuda.stream(cuda_stream):
            cuda_stream.wait_event(differentiated)
            gradients, found = reconstructed.backward(gradients)
            add_gradients(total, found)
            before, differentiated = differentiated, cuda_stream.record_event()

    try:
        for turn in range(len(couplings)):
            if turn > 1 and caught_up():
                break
            left -= 1
            cuda_stream = cuda_streams[turn % 2]
            with torch.cuda.stream(cuda_stream):
                cuda_stream.wait_event(evaluated)
                prepare(left)
                reconstructed = couplings[left].reconstruct(streams)
                evaluated = cuda_stream.record_event()
            if pending is not None:
                differentiate(*pending)
            pending, streams = (cuda_stream, reconstructed), reconstructed.inputs
        assert pending is not None
        differentiate(*pending)
    finally:  # also after an error, because memory that the other CUDA stream still reads is about to be freed
        current.wait_stream(cuda_streams[1])
    return left, caught_up(), streams, gradients
