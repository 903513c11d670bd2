"""The order of PaReprop's work on two CUDA streams, tested with fake streams and events that only keep clocks."""

from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, repeat
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from petra.reversible import reverse_pass
from petra.reversible.coupling import Reconstructed


@dataclass(eq=False)
class Stream:
    """Counts its launches, and how many launches of the other streams it has waited for."""

    capturing: ClassVar[bool] = False
    clock: dict = field(default_factory=dict)
    device: str = "fake"

    def launch(self):
        self.clock[self] = self.clock.get(self, 0) + 1
        return Event(self, dict(self.clock))

    def record_event(self):
        return Event(self, dict(self.clock))

    def wait_event(self, event):
        for stream, time in event.clock.items():
            self.clock[stream] = max(time, self.clock.get(stream, 0))

    def wait_stream(self, other):
        if Stream.capturing and not other.clock:
            raise RuntimeError("the other stream is not part of the graph")
        self.wait_event(other.record_event())


@dataclass(frozen=True)
class Event:
    """A point in time on a stream."""

    stream: Stream
    clock: dict

    def query(self):
        return next(GPU.answers)

    def before(self, other):
        return self.clock.get(self.stream, 0) <= other.clock.get(self.stream, 0)


class GPU:
    """Stands in for ``torch.cuda``."""

    def __init__(self, answers, capturing=False):
        GPU.answers = iter(answers)
        self.now = self.caller = Stream()
        self.now.launch()
        Stream.capturing = capturing

    def current_stream(self, device=None):
        return self.now

    def is_current_stream_capturing(self):
        return Stream.capturing

    @staticmethod
    def Stream(device):
        return Stream()

    @contextmanager
    def stream(self, stream):
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before

    def install(self, monkeypatch):
        fake = SimpleNamespace(cuda=self, autograd=SimpleNamespace(graph=None))
        monkeypatch.setattr(reverse_pass, "torch", fake)
        monkeypatch.setattr(reverse_pass, "_SIDE_STREAMS", {})
        monkeypatch.setattr(reverse_pass, "_CAUGHT_UP", {})


class LoggedCoupling:
    """A coupling that logs when and on which stream it is evaluated and differentiated."""

    def __init__(self, number, gpu, log, fails=False):
        self.number, self.gpu, self.log, self.fails = number, gpu, log, fails

    def reconstruct(self, streams):
        assert streams == f"inputs of {self.number + 1}"
        self.log.append(("evaluate", self.number, self.gpu.now.launch()))

        def backward(gradients):
            assert gradients == f"gradients of {self.number + 1}"
            self.log.append(("differentiate", self.number, self.gpu.now.launch()))
            if self.fails:
                raise ValueError("broken")
            return f"gradients of {self.number}", {self.number: torch.ones(())}

        return Reconstructed(f"inputs of {self.number}", backward)


class Outputs(str):
    device = "fake"

    def __getitem__(self, index):
        return self


def run(monkeypatch, depth, answers, capturing=False, fails=None):
    gpu, log, prepared = GPU(answers, capturing), [], []
    with monkeypatch.context() as patched:
        gpu.install(patched)
        couplings = [LoggedCoupling(i, gpu, log, i == fails) for i in range(depth)]
        streams, gradients = Outputs(f"inputs of {depth}"), f"gradients of {depth}"
        try:
            found = reverse_pass._reverse_pass_overlapped(couplings, streams, gradients, prepared.append)
        except ValueError:
            found = None
    assert gpu.now is gpu.caller
    return found, log, prepared, gpu.caller.launch()


def check(log, depth, after):
    """Check the required order of launches, whatever their streams."""
    at = {(kind, i): (place, event) for place, (kind, i, event) in enumerate(log)}
    for kind in ("evaluate", "differentiate"):
        for i in range(depth - 1):
            assert at[kind, i + 1][1].before(at[kind, i][1])
    for i in range(depth):
        assert at["evaluate", i][1].before(at["differentiate", i][1])
        # Autograd differentiates on the stream of the evaluation.
        assert at["evaluate", i][1].stream is at["differentiate", i][1].stream
    # A stream may reuse its memory as soon as the host has freed it, which is after the launch of the last reader. So
    # its next launch must wait for that reader.
    for i in range(1, depth):
        stream = at["evaluate", i][1].stream
        for reader, others in (
            (("evaluate", i - 1), [("differentiate", i)]),
            (("differentiate", i - 1), []),
        ):
            free = max(at[key][0] for key in (reader, *others))
            for place, event in at.values():
                if place > free and event.stream is stream:
                    assert at[reader][1].before(event)
    assert all(event.before(after) for _, event in at.values())


@given(st.integers(1, 9), st.lists(st.booleans(), max_size=30), st.booleans())
def test_every_order_of_catching_up_is_safe(depth, answers, then):
    with pytest.MonkeyPatch.context() as monkeypatch:
        found, log, prepared, after = run(monkeypatch, depth, chain(answers, repeat(then)))
    assert (found.inputs, found.gradients) == ("inputs of 0", "gradients of 0")
    assert sorted(found.parameters) == list(range(depth))
    assert prepared == list(reversed(range(depth)))
    check(log, depth, after)


@pytest.mark.parametrize("depth", range(1, 8))
def test_a_busy_gpu_overlaps_evaluations_with_gradients(monkeypatch, depth):
    _, log, _, after = run(monkeypatch, depth, repeat(False))
    check(log, depth, after)
    for i in range(depth - 1):  # neither waits for the other
        ahead = next(m for kind, number, m in log if (kind, number) == ("evaluate", i))
        gradient = next(m for kind, number, m in log if (kind, number) == ("differentiate", i + 1))
        assert not gradient.before(ahead)
        assert not ahead.before(gradient)


def test_a_gpu_that_waits_for_the_host_gets_one_stream(monkeypatch):
    _, log, _, _ = run(monkeypatch, 9, repeat(True))
    assert len({event.stream for kind, i, event in log if i < 7}) == 1


@pytest.mark.parametrize(("behind", "streams"), [(0, 1), (3, 1), (4, 2), (9, 2)])
def test_a_gpu_gets_two_streams_when_it_is_a_coupling_behind(monkeypatch, behind, streams):
    gpu, log = GPU([]), []
    gpu.install(monkeypatch)
    monkeypatch.setitem(reverse_pass._CAUGHT_UP, "fake", True)
    monkeypatch.setattr(Event, "query", lambda e: e.clock[e.stream] <= e.stream.clock[e.stream] - behind)
    couplings = [LoggedCoupling(i, gpu, log) for i in range(5)]  # each launches an evaluation and a gradient
    reverse_pass._reverse_pass_overlapped(couplings, Outputs("inputs of 5"), "gradients of 5", lambda i: None)
    assert len({event.stream for _, _, event in log}) == streams


def test_events_are_not_queried_during_capture(monkeypatch):
    _, log, _, after = run(monkeypatch, 6, [], capturing=True)
    check(log, 6, after)
    assert len({event.stream for _, _, event in log}) == 2


@pytest.mark.parametrize("fails", range(6))
def test_after_an_error_the_caller_waits_for_both_streams(monkeypatch, fails):
    found, log, _, after = run(monkeypatch, 6, repeat(False), fails=fails)
    assert found is None
    assert all(event.before(after) for _, _, event in log)


def test_the_next_segment_begins_as_the_last_one_ended(monkeypatch):
    gpu, log = GPU(repeat(True)), []
    gpu.install(monkeypatch)
    couplings = [LoggedCoupling(i, gpu, log) for i in range(2)]
    for streams in (2, 1):
        log.clear()
        reverse_pass._reverse_pass_overlapped(couplings, Outputs("inputs of 2"), "gradients of 2", lambda i: None)
        assert len({event.stream for _, _, event in log}) == streams


def test_an_error_during_capture_is_not_hidden(monkeypatch):
    gpu = GPU([], capturing=True)
    gpu.install(monkeypatch)
    with pytest.raises(AssertionError, match="inputs of 3"):
        reverse_pass._reverse_pass_overlapped(
            [LoggedCoupling(i, gpu, []) for i in range(3)], Outputs("wrong"), "", lambda i: None
        )
