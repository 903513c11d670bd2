"""Static memory for what waits between two ticks: a new entry takes the slot of the oldest one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from petra.reversible.streams import channels_last, storage_id

Copy = tuple[Tensor, Tensor]
"""A copy: destination and source."""


class SteadyStateError(RuntimeError):
    """The state after a tick differs in structure from the one before, so the tick cannot be captured."""


class RingBuffer:
    """Slots for tensors of one shape, dtype and layout, addressed by a number on the host or on the device."""

    def __init__(self, like: Tensor, places: int) -> None:
        self._shape, self._stride = like.shape, like.stride()
        self.flat = like.new_empty((places, like.numel()))
        self.views = [self._shaped(place) for place in self.flat]

    def oldest(self, slot: Tensor) -> Tensor:
        """Return the tensor at ``slot``, a number on the device."""
        return self.views[0] if len(self.views) == 1 else self._shaped(self.flat.index_select(0, slot)[0])

    def put(self, slot: Tensor, value: Tensor) -> Copy | None:
        """Write ``value`` to ``slot``; with a single slot, return the copy for the caller to make."""
        if value.shape != self._shape or value.stride() != self._stride or value.dtype != self.flat.dtype:
            raise SteadyStateError("a waiting tensor has another shape or layout than the one before it")
        if len(self.views) == 1:
            return self.views[0], value
        self.flat.index_copy_(0, slot, value.as_strided((1, value.numel()), (value.numel(), 1)))
        return None

    def _shaped(self, flat: Tensor) -> Tensor:
        return flat.as_strided(self._shape, self._stride, flat.storage_offset())


class RingQueue:
    """A first-in first-out queue of one kind of object that waits for one stage, stored in ring buffers.

    The queue is a dict of the pipeline, from numbers (of micro-batches, or of weight versions) to objects, which
    `pack` converts to trees of tensors and `unpack` back. Nobody writes into the trees. With n entries, number m is in
    slot m modulo n.
    """

    def __init__(
        self, waiting: Callable[[], MutableMapping[int, Any]], pack: Callable[[Any], Any], unpack: Callable[[Any], Any]
    ) -> None:
        self.waiting, self._pack, self._unpack = waiting, pack, unpack
        self._numbers: list[int] = []
        self._spec: TreeSpec | None = None
        self._leaves: list[Any] = []  # rings, and what has no values of its own as it is
        self._trees: list[Any] = []  # what lies at each place

    @property
    def numbers(self) -> list[int]:
        """The numbers of the entries, in order."""
        return sorted(self.waiting())

    def settle(self) -> tuple[int, list[Copy]]:
        """Return the slot of the oldest entry, and the copies that move every entry to its slot; then call `adopt`."""
        self._numbers = self.numbers
        copies: list[Copy] = []
        found = [tree_flatten(self._pack(self.waiting()[number])) for number in self._numbers]
        if self._spec is None and found:
            leaves, self._spec = found[-1]  # older ones may come from a loaded state, in which placeholders are zeros
            self._leaves = [RingBuffer(x, len(self._numbers)) if _has_values(x) else x for x in leaves]
            self._trees = [self._tree_at(place) for place in range(len(self._numbers))]
        for number, (leaves, _) in zip(self._numbers, found, strict=True):
            for leaf, x in zip(self._leaves, leaves, strict=True):
                if isinstance(leaf, RingBuffer) and storage_id(x) != storage_id(leaf.flat):
                    copies.append((leaf.views[self._slot(number)], x))
        return (self._slot(self._numbers[0]) if self._numbers else 0), copies

    def adopt(self) -> None:
        """Replace every entry of the queue by its slot."""
        for number in self._numbers:
            self.waiting()[number] = self._at(number)

    def fetch(self, slot: Tensor) -> None:
        """Replace the oldest entry by a read of ``slot``, which is resolved at launch."""
        if self._numbers:
            found = [leaf.oldest(slot) if isinstance(leaf, RingBuffer) else leaf for leaf in self._leaves]
            assert self._spec is not None
            self.waiting()[self._numbers[0]] = self._unpack(tree_unflatten(found, self._spec))

    def store(self, slot: Tensor) -> list[Copy]:
        """Write the new entry to the slot of the oldest one; return the copies that are left to make."""
        after = self.numbers
        if not self._numbers and not after:
            return []
        if after != [number + 1 for number in self._numbers]:
            raise SteadyStateError(f"micro-batches {self._numbers} waited, and now {after}")
        leaves, spec = tree_flatten(self._pack(self.waiting()[after[-1]]))
        if spec != self._spec:
            raise SteadyStateError("what waits has another structure than before")
        pairs = zip(self._leaves, leaves, strict=True)
        copies = [leaf.put(slot, x) for leaf, x in pairs if isinstance(leaf, RingBuffer)]
        self._numbers = after
        self.waiting()[after[-1]] = self._at(after[-1])
        return [copy for copy in copies if copy is not None]

    def advance(self) -> None:
        """Advance the numbers by one tick, whose device work was launched as a graph."""
        if self._numbers:
            newcomer, waiting = self._numbers[-1] + 1, self.waiting()
            del waiting[self._numbers.pop(0)]
            self._numbers.append(newcomer)
            waiting[newcomer] = self._at(newcomer)

    def _slot(self, number: int) -> int:
        return number % len(self._numbers)

    def _at(self, number: int) -> Any:
        return self._unpack(self._trees[self._slot(number)])

    def _tree_at(self, place: int) -> Any:
        assert self._spec is not None
        leaves = [leaf.views[place] if isinstance(leaf, RingBuffer) else leaf for leaf in self._leaves]
        return tree_unflatten(leaves, self._spec)


def make_copies(copies: Iterable[Copy]) -> None:
    """Make the copies in an order in which nothing is overwritten before it is read.

    A stream that a stage passes through is the same tensor in the messages below and above it.
    """
    left = list(copies)
    while left:
        extents = [_extent(source) for _, source in left]
        free = [
            i
            for i, (to, _) in enumerate(left)
            if not any(i != j and _overlap(_extent(to), extent) for j, extent in enumerate(extents))
        ]
        if not free:  # tensors that swap slots
            left[0] = left[0][0], left[0][1].clone()
            continue
        alike: dict[torch.dtype, list[Copy]] = {}
        for i in free:
            alike.setdefault(left[i][0].dtype, []).append(left[i])
        for pairs in alike.values():
            torch._foreach_copy_([to for to, _ in pairs], [source for _, source in pairs])
        left = [copy for i, copy in enumerate(left) if i not in free]


Extent = tuple[int, int, int]


def _extent(x: Tensor) -> Extent:
    begin = int(x.storage_offset())
    return storage_id(x), begin, begin + x.numel()


def _overlap(a: Extent, b: Extent) -> bool:
    return a[0] == b[0] and a[1] < b[2] and b[1] < a[2]


def _has_values(x: Any) -> bool:
    """Return whether this is a tensor with values, and not an expanded zero that stands for unused values."""
    if not isinstance(x, Tensor) or 0 in x.stride():
        return False
    if not (x.is_contiguous() or channels_last(x)):
        raise SteadyStateError("a waiting tensor is not contiguous")
    return True
