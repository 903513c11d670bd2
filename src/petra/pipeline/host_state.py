"""Copies of a state in host memory that is reused from copy to copy."""

from __future__ import annotations

import copy
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from petra.reversible.streams import copied

State = TypeVar("State")
Key = tuple[Any, ...]


class HostBuffers:
    """Host memory for copies of a state.

    Each copy overwrites the one before it in the same buffers. To keep two copies, alternate between two objects.
    Memory that a copy does not use is released.
    """

    def __init__(self) -> None:
        self._free: dict[Key, list[Tensor]] = {}
        self._used: dict[Key, list[Tensor]] = defaultdict(list)

    @property
    def size(self) -> int:
        """The bytes of the last copy."""
        return sum(tensor.nbytes for tensors in self._used.values() for tensor in tensors)

    def begin(self) -> None:
        """Start a new copy, which may overwrite the last one."""
        self._free, self._used = self._used, defaultdict(list)

    def end(self) -> None:
        """Release the memory that the new copy has not used."""
        self._free = {}

    def empty_like(self, tensor: Tensor) -> Tensor:
        """Return memory for a copy, with the layout that `torch.empty_like` gives: pinned, for a tensor on a GPU.

        Args:
            tensor: The tensor to copy.

        Returns:
            A tensor with undefined values in host memory.
        """
        key = (tensor.is_cuda, tensor.dtype, tensor.shape, tensor.stride())
        free = self._free.get(key)
        memory = free.pop() if free else torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        self._used[key].append(memory)
        return memory


@dataclass(frozen=True)
class HostCopy(Generic[State]):
    """A copy of a state in host memory."""

    state: State
    """The copy. Tensors that were on a GPU may be read after `wait`."""
    events: tuple[torch.cuda.Event, ...] = ()

    def wait(self) -> None:
        """Wait until the copies from GPUs are complete. Any thread may call it."""
        for event in self.events:
            event.synchronize()


@torch.no_grad()
def copy_to_host(state: State, buffers: HostBuffers) -> HostCopy[State]:
    """Copy a state to host memory, so that training can go on while the copy is written or kept.

    Tensors on a CPU have been copied when this returns. Copies from a GPU are queued on its current stream: what is
    launched there afterwards may change the tensors, and the host does not wait.

    Args:
        state: Nested containers of tensors and plain values. Tensors that are the same memory share one copy.
        buffers: The memory for the tensors. What was copied into it before is overwritten.

    Returns:
        The copy, which shares nothing with the state.
    """
    buffers.begin()
    tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
    copies: dict[Key, Tensor] = {}
    memo: dict[int, Any] = {}
    for tensor in tensors:  # the list keeps them alive, so that their ids stay theirs
        memo[id(tensor)] = _copy(tensor.detach(), buffers, copies)
    buffers.end()
    copied = copy.deepcopy(state, memo)
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    return HostCopy(copied, tuple(torch.cuda.current_stream(device).record_event() for device in devices))


def _copy(tensor: Tensor, buffers: HostBuffers, copies: dict[Key, Tensor]) -> Tensor:
    if tensor.is_meta:
        return tensor
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_quantized:
        return copied(tensor, "cpu")  # such as sparse tensors
    key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
    if tensor.numel() == 0 or key not in copies:
        copies[key] = buffers.empty_like(tensor)
        copies[key].copy_(tensor, non_blocking=True)
    return copies[key]
