"""Chooses the storage of every layer so that a training step is as fast as possible and fits into memory."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from tqdm import tqdm

from petra.formatting import memory_size, parse_bytes
from petra.memory.memory_plan import DoesNotFit, MeasuredPlan, MemoryPlan
from petra.memory.plan_cache import cache_key, read_plan, write_plan
from petra.memory.step_cost import StepCost, measure_step
from petra.memory.upgrades import Gain, Upgrade, upgrades
from petra.reversible import Network, ReversibleLayer
from petra.reversible.module_state import held_tensors
from petra.reversible.randomness import forked
from petra.reversible.storage import set_storage, storage_of
from petra.reversible.streams import copied, plain_parts

Storages = tuple[str, ...]
EAGER_STORAGES = ("selective", "store")
COMPILED_STORAGES = ("store:0", "store:0.2", "store:0.5", "store:0.7", "store:1")
_FINALISTS = 3
"""The number of fastest plans that are measured twice."""
_CLOSE = 0.01
"""The share of a step's time below which a possible improvement is not measured."""


def fit_memory(
    network: Network,
    limit: str | int,
    step: Callable[..., object],
    *,
    optimizer: torch.optim.Optimizer | None = None,
    compile: bool | None = None,
    storages: Sequence[str] | None = None,
    max_parts: int = 16,
    capture: bool = False,
    cache: bool = True,
    quiet: bool = False,
) -> MemoryPlan:
    """Find the fastest training step whose peak memory stays under a limit.

    Measures your training step with different storages of the layers: stored, partly recomputed, or reconstructed.
    Predicts from these the best combination for the limit, and measures it. Afterwards, the network has the storages of
    the plan, and weights, gradients, optimizer and random state are restored.

    Args:
        network: The network, on the device on which it is trained.
        limit: The memory, such as `"8 GiB"` or a number of bytes: weights, gradients, optimizer state and activations,
            as PyTorch's allocator counts them.
        step: A function that makes one training step with the network: forward, backward and update. If it takes an
            argument, this is the number of parts into which it splits the batch. Parts are processed one after
            another, so more parts need less memory.
        optimizer: The optimizer of the step, if there is one; its state is restored.
        compile: Compile layers with `torch.compile`, which lets the compiler choose what is computed again. The default
            is true on a GPU.
        storages: The storages to try besides the one that needs the least memory, by default `"store:0"`,
            `"store:0.2"`, `"store:0.5"`, `"store:0.7"` and `"store:1"` if layers are compiled, and `"selective"` and
            `"store"` otherwise. Reversible layers leave out `"store:0"`: it stores their inputs.
        max_parts: The largest number of parts.
        capture: Measure times of the step as a CUDA graph, as when you train by replaying it. This takes a step that
            does not wait for the GPU, and an optimizer with `capturable=True`. A step that cannot be captured is
            measured as it is, with a warning.
        cache: Reuse the plan of an earlier call, and store a new one, in the user's cache folder.
        quiet: Show no progress bar.

    Returns:
        The plan; `print` shows what was measured.

    Raises:
        DoesNotFit: If no step fits; the error says how much memory is needed.
        ValueError: If the network is not a `petra.Network`, or an argument is invalid.
    """
    if not isinstance(network, Network):
        raise ValueError(f"fit_memory needs a petra.Network, not a {type(network).__name__}: use petra.as_network")
    device = next((t.device for t in held_tensors([network])), torch.device("cpu"))
    compiled = device.type == "cuda" if compile is None else compile
    if compiled:
        network.compile_functions()
    splits = any(
        p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)
        for p in inspect.signature(step).parameters.values()
    )
    with _restored(network, optimizer, device), _with_hint(splits):
        search = PlanSearch(
            network,
            parse_bytes(limit),
            step if splits else lambda parts: step(),
            device,
            allocated=lambda: allocated_bytes(network, [] if optimizer is None else [optimizer]),
            storages=(COMPILED_STORAGES if compiled else EAGER_STORAGES) if storages is None else tuple(storages),
            max_parts=max_parts if splits else 1,
            capture=capture,
            quiet=quiet,
        )
        return search.run(cache)


@contextmanager
def _with_hint(splits: bool) -> Iterator[None]:
    """Add to the error that the step could split the batch, if it does not."""
    try:
        yield
    except DoesNotFit as error:
        hint = "" if splits else ", or let the step take a number of parts to split the batch into"
        raise DoesNotFit(f"{error}{hint}") from error


def _reset_storage(network: Network, storages: Sequence[str | None]) -> None:
    for layer, storage in zip(network, storages, strict=True):
        if storage is None:
            layer.__dict__.pop("storage", None)
        else:
            set_storage([layer], [storage])


@dataclass(frozen=True)
class _Group:
    """Layers of the same kind."""

    layers: tuple[int, ...]
    least: str
    """The storage that needs the least memory."""
    others: Storages


class PlanSearch:
    """A search for the fastest training step whose peak memory stays under a limit.

    Args:
        network: The network.
        limit: The bytes.
        step: A training step; its argument is the number of parts into which it splits the batch.
        device: The device.
        allocated: Returns the bytes of weights, gradients and optimizer state.
        storages: The storages to try.
        recompute: Also choose the storage of repeated layers that are not reversible, which may be recomputed.
        max_parts: The largest number of parts.
        capture: Measure the times of steps as CUDA graphs.
        quiet: Show no progress bar.
    """

    def __init__(
        self,
        network: Network,
        limit: int,
        step: Callable[[int], object],
        device: torch.device,
        *,
        allocated: Callable[[], int],
        storages: Storages,
        recompute: bool = True,
        max_parts: int,
        capture: bool = False,
        quiet: bool,
    ) -> None:
        self.network, self.limit, self.device, self._capture = network, limit, device, capture
        self._step, self._allocated, self._max_parts = step, allocated, max_parts
        self._groups = list(_groups(network, storages, recompute))
        self._measured: dict[tuple[Storages, int], MeasuredPlan] = {}
        self._bar = tqdm(desc="fitting memory", unit=" plans", disable=quiet or not sys.stderr.isatty(), leave=False)

    def run(self, cache: bool) -> MemoryPlan:
        """Find the plan, and set the storages of the network.

        Args:
            cache: Read and store plans in the cache.

        Returns:
            The plan.
        """
        before = [storage_of(layer) for layer in self.network]
        try:
            plan = self._find(cache)
        except BaseException:
            _reset_storage(self.network, before)
            raise
        finally:
            self._bar.close()
        plan.apply(self.network)
        return plan

    def _find(self, cache: bool) -> MemoryPlan:
        least = self._least()
        parts = 1
        cost = self._measure(least, parts)
        while cost is None and parts < self._max_parts:
            parts *= 2
            cost = self._measure(least, parts)
        # The peak of this first step depends on the batch and on the step, so it identifies both in the cache.
        peak = None if cost is None else cost.peak
        choices = [peak, parts, self._max_parts, self._capture, [group.others for group in self._groups]]
        key = cache_key(self.network, self.device, self.limit, choices)
        kept = read_plan(key, len(self.network)) if cache else None
        if kept is not None:
            again = self._measure(kept.storages, kept.parts)
            if again is not None and again.peak <= self.limit:
                return MemoryPlan(self.limit, kept.storages, kept.parts, again, ())
        if cost is not None:
            self._choose(self._order(least, parts, cost), parts)
        self._measure_finalists()
        plan = self._fastest()
        if cache:
            write_plan(key, plan)
        return plan

    def _least(self) -> Storages:
        found = ["store"] * len(self.network)
        for group in self._groups:
            for layer in group.layers:
                found[layer] = group.least
        return tuple(found)

    def _order(self, least: Storages, parts: int, cost: StepCost) -> list[Upgrade]:
        """Measure what each storage changes, for all layers of a group at a time, and return the upgrades in order."""
        gains: list[dict[str, Gain]] = [{} for _ in self.network]
        for group in self._groups:
            for storage in group.others:
                layers = group.layers
                while layers:
                    changed = _with(least, dict.fromkeys(layers, storage))
                    found = self._measure(changed, parts)
                    if found is not None:
                        gain = Gain(
                            (found.peak - cost.peak) / len(layers), (cost.seconds - found.seconds) / len(layers)
                        )
                        for layer in group.layers:
                            gains[layer][storage] = gain
                        break
                    layers = layers[: len(layers) // 2]
        return upgrades(gains)

    def _choose(self, order: Sequence[Upgrade], parts: int) -> None:
        """Measure the best combinations for the limit, with increasing numbers of parts."""
        least = self._least()
        while parts <= self._max_parts:
            full = self._measure_first(least, order, len(order), parts)
            if full is not None and not self._is_fast(full):
                return  # with more parts, even the step that stores everything is slower
            if full is None or full.peak > self.limit:
                self._approach(least, order, parts)
            parts *= 2

    def _is_fast(self, cost: StepCost) -> bool:
        """Return whether a step is faster than all that fit."""
        fitting = [plan.cost.seconds for plan in self._fitting() if plan.cost is not None and plan.cost is not cost]
        return cost.seconds < (1 - _CLOSE) * min(fitting, default=float("inf"))

    def _approach(self, least: Storages, order: Sequence[Upgrade], parts: int) -> None:
        """Find the largest number of upgrades that fits, or give up when steps that do not fit are too slow."""
        below, above = 0, len(order)
        cost = self._measure_first(least, order, below, parts)
        if cost is None or cost.peak > self.limit:
            return
        over = self._measure_first(least, order, above, parts)
        for turn in count():
            if above - below <= 1 or (over is not None and not self._is_fast(over)):
                return
            middle = (below + above) // 2
            # Interpolation alone would be slow where many upgrades need no memory.
            if over is not None and turn % 2 == 0:
                share = (self.limit - cost.peak) / max(over.peak - cost.peak, 1)
                middle = min(max(below + int(share * (above - below)), below + 1), above - 1)
            found = self._measure_first(least, order, middle, parts)
            if found is None or found.peak > self.limit:
                above, over = middle, found
            else:
                below, cost = middle, found

    def _measure_first(self, least: Storages, order: Sequence[Upgrade], count: int, parts: int) -> StepCost | None:
        return self._measure(_with(least, {upgrade.layer: upgrade.storage for upgrade in order[:count]}), parts)

    def _measure(self, storages: Storages, parts: int) -> StepCost | None:
        if (storages, parts) not in self._measured:
            self.network.use_storage(*storages)
            cost = measure_step(lambda: self._step(parts), self.device, self._allocated, self._capture)
            plan = self._measured[storages, parts] = MeasuredPlan(storages, parts, cost)
            self._bar.update()
            self._bar.set_postfix_str(plan.describe() + (f", {memory_size(cost.peak)}" if cost else ", out of memory"))
        return self._measured[storages, parts].cost

    def _measure_finalists(self) -> None:
        """Measure the fastest plans once more, because times vary."""
        finalists = sorted(self._fitting(), key=_seconds)[:_FINALISTS]
        for plan in finalists if len(finalists) > 1 else ():
            first = self._measured.pop((plan.storages, plan.parts)).cost
            again = self._measure(plan.storages, plan.parts)
            if first is not None and again is not None:
                cost = StepCost(min(first.seconds, again.seconds), max(first.peak, again.peak))
                self._measured[plan.storages, plan.parts] = replace(plan, cost=cost)

    def _fitting(self) -> list[MeasuredPlan]:
        return [plan for plan in self._measured.values() if plan.cost is not None and plan.cost.peak <= self.limit]

    def _fastest(self) -> MemoryPlan:
        fitting = self._fitting()
        if not fitting:
            peaks = [plan.cost.peak for plan in self._measured.values() if plan.cost is not None]
            least = f"the smallest needs {memory_size(min(peaks))}" if peaks else "none fits into the device"
            more = "give more memory or a smaller batch"
            raise DoesNotFit(f"no training step fits into {memory_size(self.limit)}: {least}; {more}")
        best = min(fitting, key=_seconds)
        assert best.cost is not None
        return MemoryPlan(self.limit, best.storages, best.parts, best.cost, tuple(self._measured.values()))


def _seconds(plan: MeasuredPlan) -> float:
    return float("inf") if plan.cost is None else plan.cost.seconds


def _with(storages: Storages, changes: Mapping[int, str]) -> Storages:
    return tuple(changes.get(index, storage) for index, storage in enumerate(storages))


def _groups(network: Network, storages: Storages, recompute: bool) -> Iterator[_Group]:
    """Yield the layers whose storage is chosen: reversible layers, and repeated other layers if they may recompute."""
    kinds: dict[Any, list[int]] = {}
    for index, layer in enumerate(network):
        kinds.setdefault(_kind(layer), []).append(index)
    for layers in kinds.values():
        if isinstance(network[layers[0]], ReversibleLayer):
            yield _Group(tuple(layers), "reconstruct", tuple(name for name in storages if name != "store:0"))
        elif recompute and len(layers) > 1 and any(True for _ in network[layers[0]].parameters()):
            yield _Group(tuple(layers), "recompute", storages)


def _kind(layer: nn.Module) -> tuple[Any, ...]:
    shapes = Counter((name, tuple(p.shape), p.requires_grad) for name, p in layer.named_parameters())
    return type(layer), frozenset(shapes)


def allocated_bytes(network: Network, optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Return the bytes of weights, gradients and optimizer state.

    Args:
        network: The network.
        optimizers: Its optimizers.

    Returns:
        The bytes, each storage once.
    """
    tensors = held_tensors([network])
    tensors += [p.grad for p in network.parameters() if p.grad is not None]
    for optimizer in optimizers:
        values = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
        tensors += [part for x in values for part in plain_parts(x)]
    return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}.values())


@contextmanager
def _restored(network: Network, optimizer: torch.optim.Optimizer | None, device: torch.device) -> Iterator[None]:
    """Restore weights, buffers, gradients, optimizer and random numbers at the end."""
    tensors = held_tensors([network])
    copies = [x.detach().to("cpu", copy=True) for x in tensors]
    gradients = [(p, p.grad) for p in network.parameters()]
    state = None if optimizer is None else tree_map_only(Tensor, lambda x: copied(x, "cpu"), optimizer.state_dict())
    try:
        with forked(device):
            yield
    finally:
        with torch.no_grad():
            for tensor, copy in zip(tensors, copies, strict=True):
                tensor.copy_(copy)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        if optimizer is not None and state is not None:
            optimizer.load_state_dict(state)
