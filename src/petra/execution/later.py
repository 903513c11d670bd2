"""Numbers on a device that the host wants to see without waiting for what the device has been given since."""

from __future__ import annotations

import torch
from torch import Tensor


class Later:
    """A tensor on its way to the host.

    Reading a tensor on a GPU waits for all that was launched before the read. This one sets out at once, and by the
    time that it is asked for it has usually arrived.
    """

    def __init__(self, value: Tensor) -> None:
        self._value, self._arrival = value, None
        if value.is_cuda:
            self._value = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            self._value.copy_(value, non_blocking=True)
            self._arrival = torch.cuda.current_stream(value.device).record_event()

    def get(self) -> Tensor:
        """The tensor in the host's memory."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._value
