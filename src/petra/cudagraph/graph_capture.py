"""Captures work on a GPU as a CUDA graph, which a single launch repeats."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Protocol

import torch

Launch = Callable[[], object]


class GraphCapture(Protocol):
    """Captures device work, to repeat it without the host's part in it."""

    def capture(self, work: Callable[[], object]) -> Launch:
        """Capture and run ``work``.

        Args:
            work: Launches device work and does not read from the device.

        Returns:
            A function that runs the device work again, in the same memory. If `capture` raises, nothing has been
            written to device memory.
        """

    def branch(self, number: int) -> AbstractContextManager[None]:
        """Return a context whose work does not wait for other branches, until `join`.

        Args:
            number: The number of the branch.

        Returns:
            The context.
        """

    def after(self, number: int, other: int) -> None:
        """Make the following work of a branch wait for the work so far of another.

        Args:
            number: The branch that waits.
            other: The branch that it waits for.
        """

    def join(self) -> None:
        """Make the following work wait for all branches."""


class GraphMemory:
    """The memory pool that captured graphs share.

    PyTorch gives up a pool when the last graph in it is gone, and then rejects its handle. So the first graph after
    that gets a new pool.
    """

    def __init__(self) -> None:
        self.graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        """The captured graphs that still exist."""
        self._pool: Any = None

    def pool(self) -> Any:
        """Return the pool for the next graph."""
        if self._pool is None or not self.graphs:
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool


class CudaGraphCapture(GraphCapture):
    """Captures CUDA graphs, with a CUDA stream for each branch.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = GraphMemory()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._open: list[torch.cuda.Stream] = []

    def capture(self, work: Callable[[], object]) -> Launch:
        graph, pool = torch.cuda.CUDAGraph(), self._memory.pool()
        failure: Exception | None = None
        try:
            with (
                torch.cuda.device(self._device),
                torch.cuda.stream(
                    torch.cuda.current_stream(self._device)
                ),  # to return to, which a failed capture does not restore
                torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                try:
                    work()
                except Exception as error:
                    failure = error
                    raise
        except Exception as error:
            self._open.clear()
            self._reset_after_failure(pool)
            raise (failure or error) from None  # not the error of the graph about its incomplete capture
        self._memory.graphs.add(graph)
        graph.replay()
        return graph.replay

    def _reset_after_failure(self, pool: Any) -> None:
        """Do what PyTorch leaves undone when CUDA ends a capture; otherwise nobody could draw random numbers."""
        device = torch.cuda.current_device() if self._device.index is None else self._device.index
        generator = torch.cuda.default_generators[device]
        generator.graphsafe_set_state(generator.clone_state())  # the same numbers will follow, and it is not capturing
        name = "_cuda_endAllocateToPool"
        if not hasattr(torch._C, name):  # before PyTorch 2.8
            name = "_cuda_endAllocateCurrentStreamToPool"
        with suppress(RuntimeError):  # PyTorch has done it
            getattr(torch._C, name)(device, pool)
            torch._C._cuda_releasePool(device, pool)

    @contextmanager
    def branch(self, number: int) -> Iterator[None]:
        with torch.cuda.stream(self._stream_of(number)):
            yield

    def after(self, number: int, other: int) -> None:
        if self._streams.get(other) in self._open:
            self._stream_of(number).wait_stream(self._streams[other])

    def _stream_of(self, number: int) -> torch.cuda.Stream:
        if number not in self._streams:
            self._streams[number] = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream = self._streams[number]
        if stream not in self._open:
            stream.wait_stream(torch.cuda.current_stream(self._device))
            self._open.append(stream)
        return stream

    def join(self) -> None:
        here = torch.cuda.current_stream(self._device)
        for stream in self._open:
            here.wait_stream(stream)
        self._open.clear()
