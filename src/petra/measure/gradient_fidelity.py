"""Compares the gradients that a method trains with to those of backpropagation, stage by stage, during training.

The PETRA paper shows this in Figures 5 and 6, the Features Replay paper as the σ of Assumption 1 in Figure 3. Neither
defines in all detail what is compared. Here, an update of stage s in tick t, from the micro-batches M (one, or k with
accumulation), has three gradients of the parameters of the stage:

- used: the mean of the gradients from the backward passes of the stage, before clipping and before corrections that
  scale it;
- exact: the mean gradient of the losses of M through the whole network, with the weights w^t that all stages had at the
  start of tick t. All updates of a tick count as simultaneous, as in the papers;
- delayed: the mean gradient of the losses of M through the whole network, where each micro-batch uses, in every stage,
  the weights that the stage had in its forward. The method `delayed` (PipeDream) would use this gradient.

All three use the same samples and the same dropout masks, so that noise does not count as a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from petra.measure.gradient_similarity import GradientSimilarity
from petra.pipeline import Executor, Stage
from petra.reversible.gradients import ParameterGradients, add_gradients, vjp
from petra.reversible.randomness import forked
from petra.reversible.streams import Streams, leaves, single
from petra.schedule import Action, Kind, Tick


@dataclass(frozen=True)
class Measurement:
    """The similarity of the gradients of one update of a stage, or of all stages together."""

    update: int
    """The number of the update, from 1."""
    stage: int | None
    """The stage; None for the sum over all stages of the updates with the same micro-batches."""
    microbatches: tuple[int, ...]
    """The micro-batches of the update."""
    similarity: GradientSimilarity
    """Their gradients, compared."""

    def row(self) -> dict[str, Any]:
        """Convert the measurement to plain values.

        Returns:
            Update, stage ("all" for all stages), last micro-batch, and all metrics.
        """
        stage = "all" if self.stage is None else self.stage
        last = self.microbatches[-1]
        return {"update": self.update, "stage": stage, "microbatch": last, **self.similarity.metrics()}


@dataclass(frozen=True)
class Microbatch:
    """A micro-batch as it was read from the data."""

    number: int
    inputs: Streams
    targets: Any
    weight: float


@dataclass
class _MeasuredUpdate:
    """An update that is measured: its micro-batches, the sum of its delayed gradients, and the results by stage."""

    number: int
    batches: dict[int, Microbatch]
    delayed: ParameterGradients
    results: dict[int, GradientSimilarity]


class Fidelity(AbstractContextManager["Fidelity"]):
    """Compares the gradients of every n-th update of an executor while it is entered.

    It does not change the training, bit for bit. Ticks without a micro-batch of a measured update can still run as
    captured CUDA graphs. Micro-batches that are in flight when it is entered are not measured.

    Args:
        executor: The executor to observe. All stages must be in this process.
        every: The number of updates from one measurement to the next.
        report: Called with each measurement; by default, they are appended to `measurements`.

    Raises:
        ValueError: If `every` is less than 1, or if the executor has other ranks or replicas.
    """

    def __init__(self, executor: Executor, every: int = 1, report: Callable[[Measurement], None] | None = None) -> None:
        if every < 1:
            raise ValueError(f"every is {every}: give the number of updates from one measurement to the next")
        if executor.mailbox.exchanges or any(stage.average is not None for stage in executor.stages):
            raise ValueError(
                "exact gradients need all weights and all samples, but this pipeline has several ranks or replicas: "
                "measure in one process"
            )
        schedule = executor.schedule
        for tick in (schedule.tick(i, i + 1) for i in range(schedule.staleness(0) + 2 * schedule.cycle)):
            updated = [action.stage for phase in tick for action in phase if action.kind is Kind.UPDATE]
            if len(updated) > len(set(updated)):
                raise ValueError(
                    f"with the schedule {schedule.name} and k = {schedule.accumulate}, a stage makes several updates "
                    f"in one tick, which cannot be measured: accumulate {schedule.stages} micro-batches or more"
                )
        self.executor, self.every = executor, every
        self.measurements: list[Measurement] = []
        """The measurements so far, if there is no `report`."""
        self._report = report if report is not None else self.measurements.append
        self._trained = [stage for stage in executor.stages if any(p.requires_grad for p in stage.parameters)]

    def __enter__(self) -> Fidelity:
        state = self.executor.state_dict()
        done = state["fed"] - len(self.executor.mailbox.targets)  # of the last stage, since the pipeline was last empty
        self._start = state["start"]
        self._updates_before = self.executor.stages[-1].updates - done // self.executor.schedule.accumulate
        self._microbatches_read = self.executor.microbatches
        self._updates: dict[int, _MeasuredUpdate] = {}  # by micro-batch
        self._pending: dict[int, list[int]] = {stage.index: [] for stage in self.executor.stages}
        # Stage -> the micro-batches and the exact gradients of its update in this tick.
        self._due: dict[int, tuple[tuple[int, ...], ParameterGradients]] = {}
        self._weights: dict[int, dict[int, list[Tensor]]] = {}  # micro-batch -> stage -> weights of its forward
        self._copies: dict[int, tuple[int, list[Tensor]]] = {}  # stage -> version and values of its last copy
        self.executor.readers.append(self._before_read)
        self.executor.announcements.append(self._before_tick)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.executor.readers.remove(self._before_read)
        self.executor.announcements.remove(self._before_tick)
        self._set_observing(False)

    def _before_read(self, number: int) -> None:
        """Observe actions while a micro-batch of a measured update is in the pipeline, or about to be read."""
        if not self.executor.in_flight:  # all updates have been made
            self._start, self._updates_before = number, self.executor.stages[-1].updates
            self._updates.clear()
        group = (number - self._start) // self.executor.schedule.accumulate
        self._set_observing(bool(self._updates) or (self._updates_before + group + 1) % self.every == 0)

    def _set_observing(self, on: bool) -> None:
        observers, observe = self.executor.observers, self._observe
        if on and observe not in observers:
            observers.append(observe)
        elif not on and observe in observers:
            observers.remove(observe)
            for pending in self._pending.values():
                pending.clear()  # their updates are not observed

    def _before_tick(self, start: int, tick: Tick) -> None:
        """Compute the exact gradients of this tick. All stages have the weights w^t, and their actions are known."""
        self._remember_microbatch()
        due: dict[tuple[int, ...], list[int]] = {}  # micro-batches of an update -> stages
        for stage in self._trained:
            microbatches = self._microbatches_of_update(stage, start, tick)
            if self._update_of(microbatches) is not None:
                due.setdefault(microbatches, []).append(stage.index)
        self._due.clear()
        for microbatches, stages in due.items():
            exact = self._exact(microbatches, stages)
            self._due.update((stage, (microbatches, exact)) for stage in stages)
        for stage in self._trained:
            self._compare(stage)  # if it only waits for its update

    def _microbatches_of_update(self, stage: Stage, start: int, tick: Tick) -> tuple[int, ...]:
        """Return the micro-batches of the update of a stage in this tick, or () if it has none."""
        used = list(self._pending[stage.index])
        for action in (action for phase in tick for action in phase if action.stage == stage.index):
            if action.kind is Kind.UPDATE:
                return tuple(used)
            if action.kind is Kind.BACKWARD:
                used.append(start + action.microbatch)
        return ()

    def _remember_microbatch(self) -> None:
        """Keep the new micro-batch if its update is measured."""
        executor = self.executor
        if executor.microbatches == self._microbatches_read:  # no micro-batch is read while the pipeline is drained
            return
        self._microbatches_read = executor.microbatches
        number = executor.microbatches - 1
        group, position = divmod(number - self._start, executor.schedule.accumulate)
        number_of_update = self._updates_before + group + 1
        update = self._updates.get(number - 1) if position else _MeasuredUpdate(number_of_update, {}, {}, {})
        if number_of_update % self.every or update is None:  # None: entered after the first micro-batch of the update
            return
        update.batches[number] = Microbatch(
            number, executor.mailbox.forward[0][number], *executor.mailbox.targets[number]
        )
        self._updates[number] = update

    def _observe(self, tick: int, action: Action, stage: Stage) -> None:
        number = action.microbatch
        if action.kind is Kind.UPDATE:
            self._pending[stage.index].clear()
        elif action.kind is Kind.BACKWARD:
            self._pending[stage.index].append(number)
            self._compare(stage)
        elif action.kind is Kind.FORWARD and number in self._updates and stage.method.stale:
            self._weights.setdefault(number, {})[stage.index] = self._copy(stage)
            if stage.last:
                self._add_delayed(self._updates[number], self._weights.pop(number), number)

    def _update_of(self, microbatches: Sequence[int]) -> _MeasuredUpdate | None:
        """Return the measured update of exactly these micro-batches, if there is one."""
        update = self._updates.get(microbatches[-1]) if microbatches else None
        return update if update is not None and sorted(update.batches) == sorted(microbatches) else None

    def _copy(self, stage: Stage) -> list[Tensor]:
        """Return a copy of the current weights of a stage; there is one copy per version."""
        version, copy = self._copies.get(stage.index, (-1, []))
        if version != stage.updates:
            copy = [p.detach().clone() for p in stage.parameters]
            self._copies[stage.index] = stage.updates, copy
        return copy

    def _add_delayed(self, update: _MeasuredUpdate, weights: dict[int, list[Tensor]], number: int) -> None:
        """Add the gradient of a micro-batch with the weights that its forward used in each stage."""
        with ExitStack() as stack:
            for stage in self.executor.stages:
                stack.enter_context(stage.layers.using(weights[stage.index]))
            wanted = [stage.index for stage in self._trained]
            add_gradients(update.delayed, exact_gradients(self.executor.stages, update.batches[number], wanted))

    def _exact(self, microbatches: Sequence[int], stages: Sequence[int]) -> ParameterGradients:
        total: ParameterGradients = {}
        for number in microbatches:
            batch = self._updates[number].batches[number]
            add_gradients(total, exact_gradients(self.executor.stages, batch, stages))
        return total

    def _compare(self, stage: Stage) -> None:
        """Compare the gradients of a stage, if all gradients of its update have been accumulated."""
        if stage.index not in self._due or tuple(self._pending[stage.index]) != self._due[stage.index][0]:
            return
        microbatches, exact = self._due.pop(stage.index)
        update = self._updates[microbatches[-1]]
        # Without staleness, all forwards use the weights w^t. DNI compares before the last of these forwards.
        delayed = update.delayed if stage.method.stale else exact
        similarity = GradientSimilarity.from_gradients(_triples(stage, exact, delayed, len(microbatches)))
        self._report(Measurement(update.number, stage.index, microbatches, similarity))
        update.results[stage.index] = similarity
        if len(update.results) == len(self._trained):
            first, *others = (update.results[stage.index] for stage in self._trained)
            self._report(Measurement(update.number, None, microbatches, sum(others, start=first)))
            for number in microbatches:
                del self._updates[number]


def exact_gradients(stages: Sequence[Stage], batch: Microbatch, wanted: Collection[int]) -> ParameterGradients:
    """Return the gradients of the loss of a micro-batch through the whole network, for the parameters of some stages.

    Uses the current weights, and the random numbers that the micro-batch has in training. Changes no state.
    """
    device = stages[0].layers.settings.device
    with forked(device):
        inputs, streams = [], batch.inputs
        for stage in stages:
            inputs.append(streams)
            streams = stage.layers.evaluate(stage.layers.all_layers, streams, batch.number)
        leaf, loss = leaves(streams), stages[-1].loss
        assert loss is not None
        with torch.enable_grad():
            value = loss(single(leaf), batch.targets)
        gradients = vjp((value,), leaf, [], (torch.full_like(value, batch.weight),)).gradients
        total: ParameterGradients = {}
        for stage, streams in reversed(list(zip(stages, inputs, strict=True))):
            if stage.index < min(wanted):
                break
            tape = stage.layers.record(stage.layers.all_layers, streams, batch.number, update_statistics=False)
            if stage.index not in wanted:
                tape = replace(tape, parameters=[])
            _, gradients, found = tape.gradients(gradients)
            total |= found
    return total


def _triples(
    stage: Stage, exact: ParameterGradients, delayed: ParameterGradients, count: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the mean used, exact and delayed gradient of every parameter; a missing gradient is zero."""

    def mean(parameter: nn.Parameter, gradient: Tensor | None) -> Tensor:
        return torch.zeros_like(parameter) if gradient is None else gradient.to_dense() / count

    for p in stage.parameters:
        if p.requires_grad:
            yield mean(p, p.grad), mean(p, exact.get(p)), mean(p, delayed.get(p))
