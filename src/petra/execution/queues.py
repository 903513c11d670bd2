"""What waits between two ticks, in memory that stays where it is: a newcomer takes the place of the one that left."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from petra.reversible.streams import channels_last, storage_id

Copy = tuple[Tensor, Tensor]
"""Where to, and from where."""


class Unsteady(RuntimeError):
    """A tick that does not leave things as the one before it did."""


class Ring:
    """Places for tensors of one shape, dtype and layout, found by a number on the host or on the device."""

    def __init__(self, like: Tensor, places: int) -> None:
        self._shape, self._stride = like.shape, like.stride()
        self.flat = like.new_empty((places, like.numel()))
        self.views = [self._shaped(place) for place in self.flat]

    def oldest(self, slot: Tensor) -> Tensor:
        """What lies at ``slot``, a number on the device."""
        return self.views[0] if len(self.views) == 1 else self._shaped(self.flat.index_select(0, slot)[0])

    def put(self, slot: Tensor, value: Tensor) -> Copy | None:
        """Lay ``value`` at ``slot``; a copy to a place that the host knows is left to the caller."""
        if value.shape != self._shape or value.stride() != self._stride or value.dtype != self.flat.dtype:
            raise Unsteady("a tensor that waits has another shape or layout than the one before it")
        if len(self.views) == 1:
            return self.views[0], value
        self.flat.index_copy_(0, slot, value.as_strided((1, value.numel()), (value.numel(), 1)))
        return None

    def _shaped(self, flat: Tensor) -> Tensor:
        return flat.as_strided(self._shape, self._stride, flat.storage_offset())


class Queue:
    """One kind of thing that waits for one stage, in a dict from numbers to what `pack` makes a tree of tensors.

    What `unpack` makes of a tree is its own: nobody writes into the tree. The numbers are those of micro-batches, or of
    versions. They leave in the order in which they came. With n of them
    waiting, number m lies at place m modulo n.
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
        """The micro-batches that wait."""
        return sorted(self.waiting())

    def settle(self) -> tuple[int, list[Copy]]:
        """The place of the oldest, and the copies that bring everything to its place; then call `adopt`."""
        self._numbers = self.numbers
        copies: list[Copy] = []
        found = [tree_flatten(self._pack(self.waiting()[number])) for number in self._numbers]
        if self._spec is None and found:
            leaves, self._spec = found[-1]  # older ones may come from a state, in which placeholders are zeros
            self._leaves = [Ring(x, len(self._numbers)) if _has_values(x) else x for x in leaves]
            self._trees = [self._tree_at(place) for place in range(len(self._numbers))]
        for number, (leaves, _) in zip(self._numbers, found, strict=True):
            for leaf, x in zip(self._leaves, leaves, strict=True):
                if isinstance(leaf, Ring) and storage_id(x) != storage_id(leaf.flat):
                    copies.append((leaf.views[self._place(number)], x))
        return (self._place(self._numbers[0]) if self._numbers else 0), copies

    def adopt(self) -> None:
        """Have everything wait at its place."""
        for number in self._numbers:
            self.waiting()[number] = self._at(number)

    def fetch(self, slot: Tensor) -> None:
        """Have the oldest wait as what lies at ``slot``, wherever that is when the tick is replayed."""
        if self._numbers:
            found = [leaf.oldest(slot) if isinstance(leaf, Ring) else leaf for leaf in self._leaves]
            assert self._spec is not None
            self.waiting()[self._numbers[0]] = self._unpack(tree_unflatten(found, self._spec))

    def store(self, slot: Tensor) -> list[Copy]:
        """Lay the newcomer where the oldest was; copies that are left to do."""
        after = self.numbers
        if not self._numbers and not after:
            return []
        if after != [number + 1 for number in self._numbers]:
            raise Unsteady(f"micro-batches {self._numbers} waited, and now {after}")
        leaves, spec = tree_flatten(self._pack(self.waiting()[after[-1]]))
        if spec != self._spec:
            raise Unsteady("what waits has another structure than before")
        pairs = zip(self._leaves, leaves, strict=True)
        copies = [leaf.put(slot, x) for leaf, x in pairs if isinstance(leaf, Ring)]
        self._numbers = after
        self.waiting()[after[-1]] = self._at(after[-1])
        return [copy for copy in copies if copy is not None]

    def advance(self) -> None:
        """What a tick does to the numbers, where a replay has done the rest."""
        if self._numbers:
            newcomer, waiting = self._numbers[-1] + 1, self.waiting()
            del waiting[self._numbers.pop(0)]
            self._numbers.append(newcomer)
            waiting[newcomer] = self._at(newcomer)

    def _place(self, number: int) -> int:
        return number % len(self._numbers)

    def _at(self, number: int) -> Any:
        return self._unpack(self._trees[self._place(number)])

    def _tree_at(self, place: int) -> Any:
        assert self._spec is not None
        leaves = [leaf.views[place] if isinstance(leaf, Ring) else leaf for leaf in self._leaves]
        return tree_unflatten(leaves, self._spec)


def carry_out(copies: Iterable[Copy]) -> None:
    """Copy in an order in which nothing is overwritten before it was read.

    A stream that a stage passes on is the same tensor below and above it.
    """
    left = list(copies)
    while left:
        extents = [_extent(source) for _, source in left]
        free = [
            i
            for i, (to, _) in enumerate(left)
            if not any(i != j and _overlap(_extent(to), extent) for j, extent in enumerate(extents))
        ]
        if not free:  # tensors that change places
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
    """Whether this is a tensor with values of its own, not one that repeats a zero in place of values."""
    if not isinstance(x, Tensor) or 0 in x.stride():
        return False
    if not (x.is_contiguous() or channels_last(x)):
        raise Unsteady("a tensor that waits has gaps in its memory")
    return True
