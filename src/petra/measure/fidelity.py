"""How near the gradients that a method trains with are to those of backprop, stage by stage, during training.

The PETRA paper shows it in Figures 5 and 6, the Features Replay paper as the σ of Assumption 1 in Figure 3. Neither
says to the last detail what is compared with what. Here, of an update of stage s in tick t, made from the
micro-batches M (one, or k with accumulation), three gradients of the stage's parameters are compared:

- used: the mean of what the stage's backward passes gave, before clipping and before corrections that scale it;
- exact: the mean gradient of the losses of M through the whole network, end to end, with the weights w^t that all
  stages had when tick t began. All updates of a tick count as simultaneous, as in the papers;
- delayed: the mean gradient of the losses of M through the whole network, where each micro-batch meets in every stage
  the weights that the stage had at its forward. The method `delayed` (PipeDream) would have used it.

All three see the same samples and the same dropout masks, so that the noise of the data does not count as distance.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from petra.execution import LocalExecutor, RankExecutor, Stage
from petra.measure.likeness import Likeness
from petra.reversible.gradients import ParameterGradients, add_gradients, vjp
from petra.reversible.randomness import forked
from petra.reversible.streams import Streams, leaves, single
from petra.schedule import Action, Kind, Tick


@dataclass(frozen=True)
class Measurement:
    """The gradients of one update of a stage, or of all stages together."""

    update: int
    """Counted from 1."""
    stage: int | None
    """None for all: the sum over the stages of the update with the same micro-batches."""
    microbatches: tuple[int, ...]
    likeness: Likeness

    def row(self) -> dict[str, Any]:
        """As a line of JSON."""
        where = "all" if self.stage is None else self.stage
        last = self.microbatches[-1]
        return {"update": self.update, "stage": where, "microbatch": last, **self.likeness.figures()}


@dataclass(frozen=True)
class Batch:
    """A micro-batch as it was read."""

    number: int
    inputs: Streams
    targets: Any
    weight: float


@dataclass
class _Sample:
    """A watched update: its micro-batches, and what is known of its gradients."""

    update: int
    batches: dict[int, Batch]
    delayed: ParameterGradients
    found: dict[int, Likeness]


class Fidelity(AbstractContextManager["Fidelity"]):
    """Watches an executor while it is open, and compares the gradients of every ``every``-th update.

    Training is the same with and without it, bit for bit, and ticks that no micro-batch of such an update has a part in
    can be replayed from a recording. ``report`` is given each measurement when it is made; without it they are
    collected in ``measurements``. Of the micro-batches that are in flight when it is opened nothing is measured.
    """

    def __init__(
        self, executor: LocalExecutor, every: int = 1, report: Callable[[Measurement], None] | None = None
    ) -> None:
        if every < 1:
            raise ValueError(f"every is {every}: give the number of updates from one measurement to the next")
        if isinstance(executor, RankExecutor) or any(stage.average is not None for stage in executor.stages):
            raise ValueError("exact gradients need all weights and samples: measure in one process, without replicas")
        self.executor, self.every = executor, every
        self.measurements: list[Measurement] = []
        self._report = report if report is not None else self.measurements.append
        self._trained = [stage for stage in executor.stages if any(p.requires_grad for p in stage.parameters)]

    def __enter__(self) -> Fidelity:
        state = self.executor.state_dict()
        done = state["fed"] - len(self.executor.targets)  # by the last stage, since the pipeline was last empty
        self._start = state["start"]
        self._base = self.executor.stages[-1].updates - done // self.executor.order.accumulate
        self._read_so_far = self.executor.microbatches
        self._samples: dict[int, _Sample] = {}  # by micro-batch
        self._pending: dict[int, list[int]] = {stage.index: [] for stage in self.executor.stages}
        self._due: dict[int, tuple[tuple[int, ...], ParameterGradients]] = {}  # stage -> its update in this tick
        self._weights: dict[int, dict[int, list[Tensor]]] = {}  # micro-batch -> stage -> of its forward
        self._copies: dict[int, tuple[int, list[Tensor]]] = {}  # stage -> its last copy, and of which version
        self.executor.readers.append(self._expect)
        self.executor.announcements.append(self._begin)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.executor.readers.remove(self._expect)
        self.executor.announcements.remove(self._begin)
        self._watch(False)

    def _expect(self, number: int) -> None:
        """Watch as long as a micro-batch of an update that is measured is about to be read, or in the pipeline."""
        if not self.executor.in_flight:  # all updates have been made
            self._start, self._base = number, self.executor.stages[-1].updates
            self._samples.clear()
        group = (number - self._start) // self.executor.order.accumulate
        self._watch(bool(self._samples) or (self._base + group + 1) % self.every == 0)

    def _watch(self, watching: bool) -> None:
        observers, observe = self.executor.observers, self._observe
        if watching and observe not in observers:
            observers.append(observe)
        elif not watching and observe in observers:
            observers.remove(observe)
            for seen in self._pending.values():
                seen.clear()  # their updates will not be seen

    def _begin(self, start: int, tick: Tick) -> None:
        """Before a tick: all stages have the weights w^t, and what they will do is known."""
        self._read()
        due: dict[tuple[int, ...], list[int]] = {}  # stages by the micro-batches of their updates
        for stage in self._trained:
            used = self._used(stage, start, tick)
            if self._sample_of(used) is not None:
                due.setdefault(used, []).append(stage.index)
        self._due.clear()
        for used, stages in due.items():
            exact = self._exact(used, stages)
            self._due.update((stage, (used, exact)) for stage in stages)
        for stage in self._trained:
            self._compare(stage)  # at once, if it only waits for its update

    def _used(self, stage: Stage, start: int, tick: Tick) -> tuple[int, ...]:
        """The micro-batches whose gradients are in the stage's update of this tick; none if there is none."""
        used = list(self._pending[stage.index])
        for action in (action for phase in tick for action in phase if action.stage == stage.index):
            if action.kind is Kind.UPDATE:
                return tuple(used)
            if action.kind is Kind.BACKWARD:
                used.append(start + action.microbatch)
        return ()

    def _read(self) -> None:
        """Keep the new micro-batch if it belongs to an update that is to be measured."""
        executor = self.executor
        if executor.microbatches == self._read_so_far:  # none is read while the pipeline is drained
            return
        self._read_so_far = executor.microbatches
        number = executor.microbatches - 1
        group, place = divmod(number - self._start, executor.order.accumulate)
        update = self._base + group + 1
        sample = self._samples.get(number - 1) if place else _Sample(update, {}, {}, {})
        if update % self.every or sample is None:  # None: it was opened after the first of them
            return
        sample.batches[number] = Batch(number, executor.ups[0][number], *executor.targets[number])
        self._samples[number] = sample

    def _observe(self, tick: int, action: Action, stage: Stage) -> None:
        number = action.microbatch
        if action.kind is Kind.UPDATE:
            self._pending[stage.index].clear()
        elif action.kind is Kind.BACKWARD:
            self._pending[stage.index].append(number)
            self._compare(stage)
        elif action.kind is Kind.FORWARD and number in self._samples and stage.method.stale:
            self._weights.setdefault(number, {})[stage.index] = self._copy(stage)
            if stage.last:
                self._delay(self._samples[number], self._weights.pop(number), number)

    def _sample_of(self, microbatches: Sequence[int]) -> _Sample | None:
        """The sample that is made of just these micro-batches."""
        sample = self._samples.get(microbatches[-1]) if microbatches else None
        return sample if sample is not None and sorted(sample.batches) == sorted(microbatches) else None

    def _copy(self, stage: Stage) -> list[Tensor]:
        """The stage's weights of now, copied once a version."""
        version, copy = self._copies.get(stage.index, (-1, []))
        if version != stage.updates:
            copy = [p.detach().clone() for p in stage.parameters]
            self._copies[stage.index] = stage.updates, copy
        return copy

    def _delay(self, sample: _Sample, weights: dict[int, list[Tensor]], number: int) -> None:
        """Once a micro-batch has come up: its gradient with the weights that it has met on the way."""
        with ExitStack() as stack:
            for stage in self.executor.stages:
                stack.enter_context(stage.chain.using(weights[stage.index]))
            wanted = [stage.index for stage in self._trained]
            add_gradients(sample.delayed, exact_gradients(self.executor.stages, sample.batches[number], wanted))

    def _exact(self, microbatches: Sequence[int], stages: Sequence[int]) -> ParameterGradients:
        total: ParameterGradients = {}
        for number in microbatches:
            batch = self._samples[number].batches[number]
            add_gradients(total, exact_gradients(self.executor.stages, batch, stages))
        return total

    def _compare(self, stage: Stage) -> None:
        """When the last gradient of an update is there, and the update is not."""
        if stage.index not in self._due or tuple(self._pending[stage.index]) != self._due[stage.index][0]:
            return
        used, exact = self._due.pop(stage.index)
        sample = self._samples[used[-1]]
        # Where nothing is stale, all forwards had the weights w^t; DNI compares before the last of them.
        delayed = sample.delayed if stage.method.stale else exact
        likeness = Likeness.of(_triples(stage, exact, delayed, len(used)))
        self._report(Measurement(sample.update, stage.index, used, likeness))
        sample.found[stage.index] = likeness
        if len(sample.found) == len(self._trained):
            first, *others = (sample.found[stage.index] for stage in self._trained)
            self._report(Measurement(sample.update, None, used, sum(others, start=first)))
            for number in used:
                del self._samples[number]


def exact_gradients(stages: Sequence[Stage], batch: Batch, wanted: Collection[int]) -> ParameterGradients:
    """Gradients of a micro-batch's loss for the parameters of some stages, by plain autograd from end to end.

    With the weights of now, and the random numbers that the micro-batch has in training. Nothing is changed.
    """
    device = stages[0].chain.settings.device
    with forked(device):
        inputs, streams = [], batch.inputs
        for stage in stages:
            inputs.append(streams)
            streams = stage.chain.evaluate(stage.chain.whole, streams, batch.number)
        leaf, loss = leaves(streams), stages[-1].loss
        assert loss is not None
        with torch.enable_grad():
            value = loss(single(leaf), batch.targets)
        gradients = vjp((value,), leaf, [], (torch.full_like(value, batch.weight),)).gradients
        total: ParameterGradients = {}
        for stage, streams in reversed(list(zip(stages, inputs, strict=True))):
            if stage.index < min(wanted):
                break
            tape = stage.chain.record(stage.chain.whole, streams, batch.number, counts=False)
            if stage.index not in wanted:
                tape = replace(tape, parameters=[])
            _, gradients, found = tape.gradients(gradients)
            total |= found
    return total


def _triples(
    stage: Stage, exact: ParameterGradients, delayed: ParameterGradients, count: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Mean gradients of every parameter: used, exact and delayed; one that is not there is zero."""

    def mean(parameter: nn.Parameter, gradient: Tensor | None) -> Tensor:
        return torch.zeros_like(parameter) if gradient is None else gradient.to_dense() / count

    for p in stage.parameters:
        if p.requires_grad:
            yield mean(p, p.grad), mean(p, exact.get(p)), mean(p, delayed.get(p))
