"""Static memory for what waits between two ticks: a new entry takes the slot of the oldest one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from petra.reversible.streams import channels_last, storage_id
from petra.schedule import Action

Copy = tuple[Tensor, Tensor]
"""A copy: destination and source."""


class SteadyStateError(RuntimeError):
    """The state after a tick differs in structure from the one before, so the tick cannot be captured."""


class TensorLayout(NamedTuple):
    """Shape, layout, dtype and device of a tensor that has no memory yet."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class RingBuffer:
    """Slots for tensors of one shape, dtype and layout, addressed by a number on the host or on the device."""

    def __init__(self, like: TensorLayout, slots: int) -> None:
        self._shape, self._stride = like.shape, like.stride
        self.flat = torch.empty((slots, like.shape.numel()), dtype=like.dtype, device=like.device)
        self.views = [self._shaped(slot) for slot in self.flat]

    def read(self, slot: Tensor) -> Tensor:
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


@dataclass(frozen=True)
class QueueChange:
    """The change of a queue in a captured tick. Numbers are relative to `RingQueue.reference` before the tick."""

    removed: tuple[int, ...]
    added: tuple[int, ...]


class RingQueue:
    """One kind of object that waits for one stage, stored in ring buffers.

    The queue is a dict of the pipeline, from consecutive numbers (of micro-batches, or of weight versions) to objects,
    which `pack` converts to trees of tensors and `unpack` back. Nobody writes into the trees. With n slots, number m
    is in slot m modulo n. Between two ticks, the device knows the slot of the reference number. The slots of all
    entries follow from it, because a captured tick finds the same numbers relative to the reference in every launch.

    Args:
        waiting: Returns the dict.
        pack: Converts an entry to a tree of tensors.
        unpack: Converts it back.
        reference: Returns the number that increases by one with every captured tick.
        takes: Returns True if an action removes the entry of its micro-batch; None removes the oldest in every tick.
    """

    def __init__(
        self,
        waiting: Callable[[], MutableMapping[int, Any]],
        pack: Callable[[Any], Any],
        unpack: Callable[[Any], Any],
        reference: Callable[[], int],
        takes: Callable[[Action], bool] | None = None,
    ) -> None:
        self.waiting, self._pack, self._unpack = waiting, pack, unpack
        self.reference, self._takes = reference, takes
        self.slots = 0
        self._most = 0  # entries that have waited at the same time
        self._spec: TreeSpec | None = None  # of an entry
        self._layouts: list[Any] = []  # of its tensors; leaves without values, unchanged
        self._leaves: list[Any] = []  # ring buffers; leaves without values, unchanged
        self._trees: list[Any] = []  # what lies in each slot
        self._before: list[int] = []  # numbers at the beginning of the tick that is being captured

    @property
    def numbers(self) -> list[int]:
        """The numbers of the entries, in order."""
        return sorted(self.waiting())

    def observe(self) -> None:
        """Note how many entries wait, and what they look like, after a tick that was not captured."""
        numbers = self.numbers
        self._most = max(self._most, len(numbers))
        if numbers and not self._leaves:
            # The newest one: older ones may come from a loaded state, in which placeholders are zeros.
            leaves, self._spec = tree_flatten(self._pack(self.waiting()[numbers[-1]]))
            self._layouts = [
                TensorLayout(x.shape, x.stride(), x.dtype, x.device) if _has_values(x) else x for x in leaves
            ]

    def needs_memory(self) -> bool:
        """Return True if more entries have waited than there are slots."""
        return self._most > self.slots

    def allocate(self) -> None:
        """Allocate a slot for every entry that may wait."""
        if self.needs_memory():
            self.slots = self._most
            self._leaves = [RingBuffer(x, self.slots) if isinstance(x, TensorLayout) else x for x in self._layouts]
            self._trees = [self._tree_at(slot) for slot in range(self.slots)]

    def settle(self) -> list[Copy]:
        """Return the copies that move every entry to its slot; then call `adopt`."""
        copies: list[Copy] = []
        for number in self.numbers:
            leaves, _ = tree_flatten(self._pack(self.waiting()[number]))
            for leaf, x in zip(self._leaves, leaves, strict=True):
                if isinstance(leaf, RingBuffer) and storage_id(x) != storage_id(leaf.flat):
                    copies.append((leaf.views[number % self.slots], x))
        return copies

    def adopt(self) -> None:
        """Replace every entry of the queue by its slot."""
        for number in self.numbers:
            self.waiting()[number] = self._at(number)

    def fetch(self, cursor: Tensor, actions: Sequence[Action]) -> None:
        """Replace the entries that the tick takes by reads of their slots, which are resolved at launch.

        Args:
            cursor: The slot of the reference number, on the device.
            actions: The actions of the tick.
        """
        self._before = self.numbers
        if self._takes is None:
            taken = self._before[:1]
        else:
            taken = [a.microbatch for a in actions if self._takes(a) and a.microbatch in self.waiting()]
        for number in taken:
            slot = self._slot(cursor, number)
            found = [leaf.read(slot) if isinstance(leaf, RingBuffer) else leaf for leaf in self._leaves]
            assert self._spec is not None
            self.waiting()[number] = self._unpack(tree_unflatten(found, self._spec))

    def store(self, cursor: Tensor, reference: int) -> tuple[QueueChange, list[Copy]]:
        """Write the new entries to their slots.

        Args:
            cursor: The slot of the reference number, on the device.
            reference: The reference number before the tick.

        Returns:
            The change of the queue, and the copies that are left to make.
        """
        after = self.numbers
        added = [number for number in after if number not in self._before]
        removed = [number for number in self._before if number not in after]
        if len(after) > self.slots or (self._takes is None and len(added) != len(removed)):
            raise SteadyStateError(f"entries {self._before} waited, and now {after}")
        copies: list[Copy | None] = []
        for number in added:
            leaves, spec = tree_flatten(self._pack(self.waiting()[number]))
            if spec != self._spec:
                raise SteadyStateError("what waits has another structure than before")
            slot = self._slot(cursor, number, reference)
            pairs = zip(self._leaves, leaves, strict=True)
            copies += [leaf.put(slot, x) for leaf, x in pairs if isinstance(leaf, RingBuffer)]
            self.waiting()[number] = self._at(number)
        change = QueueChange(tuple(n - reference for n in removed), tuple(n - reference for n in added))
        return change, [copy for copy in copies if copy is not None]

    def advance(self, change: QueueChange, reference: int) -> None:
        """Make the change of a tick whose device work was launched as a graph.

        Args:
            change: What `store` returned.
            reference: The reference number before the tick.
        """
        waiting = self.waiting()
        for number in change.removed:
            del waiting[reference + number]
        for number in change.added:
            waiting[reference + number] = self._at(reference + number)

    def _slot(self, cursor: Tensor, number: int, reference: int | None = None) -> Tensor:
        """Return the slot of a number, computed on the device."""
        offset = number - (self.reference() if reference is None else reference)
        return cursor if self.slots == 1 else cursor.add(offset).remainder_(self.slots)

    def _at(self, number: int) -> Any:
        return self._unpack(self._trees[number % self.slots])

    def _tree_at(self, slot: int) -> Any:
        assert self._spec is not None
        leaves = [leaf.views[slot] if isinstance(leaf, RingBuffer) else leaf for leaf in self._leaves]
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
