"""A state of tensors in dictionaries and lists, as two blocks of bytes: its outline and the values of its tensors.

Packing takes little time of the thread that trains: one pass over the state in C, and one copy of all tensors into
memory that is used again. A process that only keeps the state of another one never unpacks it.
"""

from __future__ import annotations

import io
import math
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 64
"""The address of each tensor is a multiple of so many bytes."""
TYPES = {(kind.__module__, kind.__qualname__): kind for kind in (OrderedDict, torch.Size, torch.device)}
"""The types that a state may hold besides tensors, dtypes and the built-in containers and values."""
Place = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]
"""Offset, dtype, shape and strides of a tensor."""


class HostMemory:
    """A block of host memory that is used again and again; what was in it before is overwritten."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)

    def get(self, size: int, pinned: bool = False) -> Tensor:
        """Return bytes of this memory.

        Args:
            size: The number of bytes.
            pinned: Whether a GPU writes to them.

        Returns:
            A tensor of so many bytes.
        """
        available = self._block.numel()
        if not size <= available <= 2 * size or pinned != self._block.is_pinned():
            self._block = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        return self._block[:size]


@dataclass(frozen=True)
class PackedState:
    """A state in host memory."""

    outline: Tensor
    """Bytes that describe the state, but for the values of its tensors."""
    data: Tensor
    """The bytes of the tensors."""
    events: tuple[torch.cuda.Event, ...] = ()

    def wait(self) -> None:
        """Wait until the copies from GPUs are complete. Any thread may call it."""
        for event in self.events:
            event.synchronize()

    def unpack(self) -> Any:
        """Return the state.

        Returns:
            A copy. Tensors that were the same memory share one.

        Raises:
            pickle.UnpicklingError: If the outline holds a type that states do not have.
        """
        return _Unpacker(self).load()


class StatePacker:
    """Packs states, one after the other, into the same memory."""

    def __init__(self) -> None:
        self._memory = HostMemory()
        self._data = self._memory.get(0)
        self._places: list[Place] = []
        self._views: list[Tensor] = []

    @torch.no_grad()
    def pack(self, state: Any) -> PackedState:
        """Copy a state to host memory. What was packed before is overwritten.

        Tensors on a CPU have been copied when this returns. Copies from a GPU are queued on its current stream.

        Args:
            state: Nested containers of tensors and plain values.

        Returns:
            The packed state. Its data may be read after `PackedState.wait`.

        Raises:
            TypeError: If the state holds an object of another type.
        """
        outline = io.BytesIO()
        packer = _Packer(outline)
        packer.dump(state)
        devices = {tensor.device for tensor in packer.tensors if tensor.is_cuda}
        if packer.places != self._places or bool(devices) != self._data.is_pinned():
            self._data = self._memory.get(packer.size, pinned=bool(devices))
            self._places, self._views = packer.places, [_view(self._data, place) for place in packer.places]
        if packer.tensors:
            torch._foreach_copy_(self._views, packer.tensors, non_blocking=True)
        events = tuple(torch.cuda.current_stream(device).record_event() for device in devices)
        return PackedState(torch.frombuffer(outline.getbuffer(), dtype=torch.uint8), self._data, events)


class _Packer(pickle.Pickler):
    """Writes an outline, and collects the tensors of the state."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[Tensor] = []
        self.places: list[Place] = []
        self.size = 0
        self._found: dict[Any, Place] = {}

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        tensor = value.detach()
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            return _saved(tensor)
        strides = tensor.stride() if tensor.is_contiguous() else torch.empty_like(tensor, device="meta").stride()
        key = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        if key not in self._found:
            place = (self.size, tensor.dtype, tuple(tensor.shape), strides)
            self.size += math.ceil(tensor.nbytes / ALIGNMENT) * ALIGNMENT
            self.tensors.append(tensor)
            self.places.append(place)
            self._found[key] = place
        return self._found[key]

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.dtype) and value not in TYPES.values() and type(value) not in TYPES.values():
            raise TypeError(f"a state holds an object of type {type(value).__name__}: give tensors and plain values")
        return NotImplemented


class _Unpacker(pickle.Unpickler):
    def __init__(self, packed: PackedState) -> None:
        super().__init__(io.BytesIO(packed.outline.numpy().tobytes()))
        self._data = packed.data
        self._found: dict[Place, Tensor] = {}

    def persistent_load(self, place: Any) -> Tensor:
        if isinstance(place, bytes):
            loaded: Tensor = torch.load(io.BytesIO(place), weights_only=True)
            return loaded
        if place not in self._found:
            self._found[place] = _view(self._data, place).clone()
        return self._found[place]

    def find_class(self, module: str, name: str) -> Any:
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype):
            return found
        if (module, name) not in TYPES:
            raise pickle.UnpicklingError(f"a state holds {module}.{name}, which is no plain value")
        return TYPES[module, name]


def _view(data: Tensor, place: Place) -> Tensor:
    """Return the tensor at a place; it is dense in memory."""
    offset, dtype, shape, strides = place
    values = data[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype)
    return values.as_strided(shape, strides, values.storage_offset())


def _saved(tensor: Tensor) -> bytes:
    """Return the file of a tensor that is not plain memory, such as a sparse one."""
    file = io.BytesIO()
    torch.save(tensor.cpu() if tensor.is_cuda else tensor, file)
    return file.getvalue()
