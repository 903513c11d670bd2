"""Device tensors that the host reads later, without waiting for work that was launched after them."""

from __future__ import annotations

import torch
from torch import Tensor


class AsyncCopy:
    """An asynchronous copy of a tensor to the host.

    Reading a tensor on a GPU waits for everything that was launched before the read. This copy starts at once, and is
    usually complete when it is read.

    Args:
        value: The tensor.
    """

    def __init__(self, value: Tensor) -> None:
        self._value = value
        self._arrival: torch.cuda.Event | None = None
        if value.is_cuda:
            self._value = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            self._value.copy_(value, non_blocking=True)
            self._arrival = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # no processor time
            self._arrival.record(torch.cuda.current_stream(value.device))

    def get(self) -> Tensor:
        """Return the tensor in host memory."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._value
