"""Records work on a GPU once, as a CUDA graph, and repeats it with a single launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Protocol

import torch

Repeat = Callable[[], object]


class Recorder(Protocol):
    """Something that can repeat work without the host's part in it."""

    def record(self, work: Callable[[], None]) -> Repeat:
        """Do ``work`` once, and return what does it again in the same memory.

        If it raises, nothing has been written to any memory.
        """

    def branch(self, number: int) -> AbstractContextManager[None]:
        """Inside, work does not wait for that in other branches, until `join`."""

    def after(self, number: int, other: int) -> None:
        """What comes next in branch ``number`` waits for what was done in branch ``other``."""

    def join(self) -> None:
        """What comes next waits for all branches."""


class GraphRecorder:
    """CUDA graphs, with a stream for each branch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._lanes: dict[int, torch.cuda.Stream] = {}
        self._open: list[torch.cuda.Stream] = []

    def record(self, work: Callable[[], None]) -> Repeat:
        graph = torch.cuda.CUDAGraph()
        failure: Exception | None = None
        try:
            with (
                torch.cuda.device(self._device),
                torch.cuda.stream(torch.cuda.current_stream(self._device)),  # to come back to, which a failure forgets
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                try:
                    work()
                except Exception as error:
                    failure = error
                    raise
        except Exception as error:
            self._open.clear()
            self._tidy_up()
            raise (failure or error) from None  # not what the graph says of being left half-way
        graph.replay()
        return graph.replay

    def _tidy_up(self) -> None:
        """What PyTorch leaves undone where CUDA itself ends a recording: otherwise nobody could draw random numbers."""
        device = torch.cuda.current_device() if self._device.index is None else self._device.index
        generator = torch.cuda.default_generators[device]
        generator.graphsafe_set_state(generator.clone_state())  # the same numbers to come, and not recording
        name = "_cuda_endAllocateToPool"
        if not hasattr(torch._C, name):  # before PyTorch 2.8
            name = "_cuda_endAllocateCurrentStreamToPool"
        with suppress(RuntimeError):  # where PyTorch has done it
            getattr(torch._C, name)(device, self._pool)
            torch._C._cuda_releasePool(device, self._pool)

    @contextmanager
    def branch(self, number: int) -> Iterator[None]:
        with torch.cuda.stream(self._lane(number)):
            yield

    def after(self, number: int, other: int) -> None:
        if self._lanes.get(other) in self._open:
            self._lane(number).wait_stream(self._lanes[other])

    def _lane(self, number: int) -> torch.cuda.Stream:
        if number not in self._lanes:
            self._lanes[number] = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        lane = self._lanes[number]
        if lane not in self._open:
            lane.wait_stream(torch.cuda.current_stream(self._device))
            self._open.append(lane)
        return lane

    def join(self) -> None:
        here = torch.cuda.current_stream(self._device)
        for lane in self._open:
            here.wait_stream(lane)
        self._open.clear()
