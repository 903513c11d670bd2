"""Captures ticks as CUDA graphs and launches them again when they come round.

A tick launches some thousand small kernels, and a GPU that waits for the host to launch them is idle most of the time.
Once the pipeline is full, every tick does the same with other values. Where it is flushed, the same sequence of ticks
comes round again: those that fill it, those of the full pipeline, and the one that flushes it. What waits between two
ticks is in ring buffers (`ring_buffers`), so eager ticks can follow captured ones and the other way round.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from itertools import count, groupby
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from petra.cudagraph.async_copy import AsyncCopy
from petra.cudagraph.eligibility import groups_of, ineligible_reason
from petra.cudagraph.graph_capture import GraphCapture
from petra.cudagraph.guards import Guards
from petra.cudagraph.lr_tensor import LearningRateTensor
from petra.cudagraph.ring_buffers import Copy, make_copies
from petra.cudagraph.steady_state import CapturedTick, StashVersions, SteadyState
from petra.cudagraph.tick_recording import TickRecording
from petra.formatting import first_line
from petra.pipeline import Executor, MicrobatchResult
from petra.pipeline.mailbox import Shapes
from petra.pipeline.results import check_finite
from petra.reversible.streams import Streams
from petra.schedule import Action, Kind, Tick

_LOSS_CHECK_DELAY = 8
"""Delay of the loss check in ticks; also the maximum lead of the host over the device."""

_ENOUGH_ELEMENTS = 2**25
"""Elements in the streams of stages that run concurrently; more of them only take more memory."""


class TickCapture:
    """Runs the ticks of an executor as captured graphs where that is possible, and eagerly otherwise.

    Args:
        executor: The executor; all stages must be in its process.
        graph_capture: Captures work on the device.
    """

    def __init__(self, executor: Executor, graph_capture: GraphCapture) -> None:
        # The executor owns this object: a reference cycle would keep GPU memory until the garbage collector runs.
        self._executor: Executor = weakref.proxy(executor)
        self._graph_capture = graph_capture
        self.ineligible_reason = ineligible_reason(executor.stages, executor.schedule)
        """Why ticks are not captured; None if there is no known reason."""
        self.captured_ticks = 0
        """The number of ticks that were launched as graphs."""
        self._steady_states: dict[Any, SteadyState] = {}
        self._settled: SteadyState | None = None  # the one whose ring buffers hold everything that waits
        self._history: dict[Hashable, tuple[Any, int]] = {}  # position -> its conditions, how often in a row
        self._losses: list[tuple[int, AsyncCopy]] = []  # not checked yet
        self._gradients: dict[Tensor, Tensor] = {}
        self._guards = Guards(executor.stages)
        self._shapes: Shapes = ()  # of the inputs of the tick before

    def run_tick(self, inputs: Streams, targets: Any, weight: float) -> list[MicrobatchResult]:
        """Run one tick: launch its graph, capture it, or run it eagerly.

        Args:
            inputs: The inputs of the network, on the device.
            targets: The targets of the loss.
            weight: The weight of the gradient in the mean over replicas.

        Returns:
            The micro-batches that reached the loss in this tick.
        """
        executor = self._executor
        used = self._used_data(inputs, targets)
        shapes = tuple((x.shape, x.dtype) for x in inputs)
        if shapes == self._shapes:
            shapes = self._shapes  # the same object is compared faster
        self._shapes = shapes
        kind = (shapes, *(_kind(x) for x in used))
        if (
            self.ineligible_reason is not None
            or weight != 1.0
            or any(other != 1.0 for _, other in executor.mailbox.targets.values())  # ring buffers leave it out
            or not all(isinstance(x, Tensor) for x in used)
            or executor.observers
            or executor.clock is not None
            or (waiting := executor.input_shapes).count(shapes) != len(waiting)
        ):
            self._history.clear()
            return self._run_eagerly(inputs, targets, weight)
        steady = self._steady_states.get(kind)
        if steady is None:
            steady = self._steady_states[kind] = SteadyState(executor)
        position, guards = executor.position_in_cycle, self._guards()
        settled = self._settled is steady
        if not settled:
            steady.observe()
        captured = steady.ticks.get(position)
        before = captured.before if captured is not None and settled else self._waiting()
        if captured is None:
            captured = self._find_equal(steady, guards, before)
        if captured is not None and captured.guards == guards and captured.before == before:
            return self._launch(steady, captured, inputs, targets, shapes)
        conditions, times = self._history.get(position, (None, 0))
        times = times + 1 if conditions == (kind, guards, before) else 0
        self._history[position] = (kind, guards, before), times
        # The first time, libraries choose their kernels; the second, random draws are detected. A captured update reads
        # its learning rate from memory, which the host writes before the tick: two updates would have the same.
        if times < 2 or self._updates_twice():
            return self._run_eagerly(inputs, targets, weight, detect_draws=times == 1)
        return self._capture(steady, guards, before, inputs, targets)

    def synchronize(self) -> None:
        """Check the losses that have not been checked yet.

        Raises:
            NonFiniteLoss: If one of them is NaN or infinite.
        """
        self._check_losses(0)

    def reset(self) -> None:
        """Forget what is assumed about the pipeline: it was drained, or a state was loaded."""
        self._losses.clear()
        self._history.clear()
        self._settled = None

    def _run_eagerly(
        self, inputs: Streams, targets: Any, weight: float, detect_draws: bool = False
    ) -> list[MicrobatchResult]:
        self._settled = None
        stages = self._executor.stages
        for stage in stages:
            stage.layers.detect_randomness = detect_draws
        results = self._executor.run_tick(inputs, targets, weight)
        for stage in stages:
            stage.layers.detect_randomness = False
        if any(stage.layers.uses_randomness for stage in stages):
            self.ineligible_reason = "a layer draws random numbers, as dropout does, and a graph would repeat them"
        elif any(p.grad is not None and p.grad.is_sparse for stage in stages for p in stage.parameters):
            self.ineligible_reason = "some gradients are sparse"
        elif any(saved.graphs for stage in stages for saved in stage.saved.values()):
            self.ineligible_reason = f"{stages[0].method.name} keeps autograd graphs from one tick to the next"
        elif any(stage.synthesizer is not None and not stage.synthesizer.capturable for stage in stages):
            self.ineligible_reason = "the optimizer of a synthesizer is not fused"
        return results

    def _settle(self, steady: SteadyState) -> None:
        """Move everything that waits into the ring buffers."""
        if self._settled is not steady:
            steady.settle(self._executor.stages[0].layers.settings.device)
            for stage in self._executor.stages:
                for parameter in stage.parameters:
                    if parameter.requires_grad:
                        self._gradients.setdefault(parameter, torch.zeros_like(parameter))
            make_copies(self._keep_gradients())
        self._settled = steady

    def _capture(
        self, steady: SteadyState, guards: Any, before: Any, inputs: Streams, targets: Any
    ) -> list[MicrobatchResult]:
        executor = self._executor
        first, position = executor.microbatches, executor.position_in_cycle
        recording = TickRecording(steady, executor.next_actions, *self._static_data(inputs, targets))
        with executor.uninterrupted():
            performed = self._record(recording, inputs, targets)
        if not performed:
            return self._run_eagerly(inputs, targets, 1.0)
        for stage in executor.stages:
            if any(action.stage == stage.index and action.kind is Kind.UPDATE for action in recording.actions):
                stage.finish_update()
        relative = [replace(r, microbatch=r.microbatch - first) for r in recording.results]
        if recording.launch is None:
            return self._results(relative, first)
        actions = [action.shifted(-first) for action in recording.actions]
        steady.ticks[position] = CapturedTick(
            recording.launch,
            guards,
            before,
            recording.inputs,
            recording.targets,
            relative,
            actions,
            [action for action in actions if executor.has_part_in(action)],
            recording.changes,
            recording.rates,
        )
        return self._results(relative, first)

    def _used_data(self, inputs: Streams, targets: Any) -> tuple[Any, ...]:
        """Return the inputs and the targets that are used in this process."""
        return *inputs, targets

    def _static_data(self, inputs: Streams, targets: Any) -> tuple[Streams, Any]:
        """Return the inputs and the targets in memory that the graph will read, where they are used."""
        return tuple(x.clone() for x in inputs), targets.clone()

    def _record(self, recording: TickRecording, inputs: Streams, targets: Any) -> bool:
        """Capture and launch the next tick; if that fails, restore the host's state and set `ineligible_reason`.

        Args:
            recording: The tick, to be completed.
            inputs: The inputs of the network, as given.
            targets: The targets of the loss, as given.

        Returns:
            True if the tick has been performed.
        """
        executor = self._executor

        def work() -> None:
            recording.begin()
            found = executor.run_tick(recording.inputs, recording.targets, 1.0, self._perform_in_branches)
            recording.finish(found, self._keep_gradients())

        before = None
        try:
            self._settle(recording.steady)
            before = executor.host_state()
            with self._capture_mode() as recording.rates:
                recording.launch = self._graph_capture.capture(work)
        except Exception as error:
            if before is not None:  # a capture launches nothing, so all tensors have the values they had
                executor.load_host_state(before)
            self._give_up(error)
            return False
        return True

    def _give_up(self, error: Exception) -> None:
        self.ineligible_reason = f"a tick could not be captured ({first_line(error)})"
        self._steady_states.clear()
        self._settled = None

    def _launch(
        self, steady: SteadyState, captured: CapturedTick, inputs: Streams, targets: Any, shapes: Shapes
    ) -> list[MicrobatchResult]:
        first = self._executor.microbatches
        with self._executor.uninterrupted():
            self._settle(steady)
            static, given = self._used_data(captured.inputs, captured.targets), self._used_data(inputs, targets)
            for to, x in zip(static, given, strict=True):
                to.copy_(x, non_blocking=True)
            captured.rates.refresh()
            captured.launch()
            references = steady.references()
            self._executor.advance(shapes, captured.own)
            steady.advance(captured.changes, references)
        self.captured_ticks += 1
        return self._results(captured.results, first)

    def _results(self, relative: Sequence[MicrobatchResult], first: int) -> list[MicrobatchResult]:
        """Copy the results out of the memory that the next launch overwrites."""
        results = []
        for r in relative:
            loss, outputs, targets = tree_map(Tensor.clone, (r.loss, r.outputs, r.targets))
            results.append(replace(r, microbatch=first + r.microbatch, loss=loss, outputs=outputs, targets=targets))
            self._losses.append((first + r.microbatch, AsyncCopy(loss)))
        self._check_losses(_LOSS_CHECK_DELAY)
        return results

    def _check_losses(self, keep: int) -> None:
        while len(self._losses) > keep:
            microbatch, loss = self._losses.pop(0)
            check_finite(loss.get(), microbatch, self._executor.stages[-1].index, "a few updates were made after it")

    @contextmanager
    def _capture_mode(self) -> Iterator[LearningRateTensor]:
        """Inside, host values that change from tick to tick are skipped, or read from device memory."""
        stages = self._executor.stages
        rates = LearningRateTensor(stages, stages[0].layers.settings.device)
        groups = [group for stage in stages for group in groups_of(stage)]
        kept = [(group, group["lr"], group.get("capturable")) for group in groups]
        for group, rate in zip(groups, rates.table, strict=True):
            group["lr"] = rate
            if "capturable" in group:
                group["capturable"] = True
        # What a branch reads must not be given to another branch before they join.
        self._executor.mailbox.held = []
        try:
            with ExitStack() as stack:
                for stage in stages:
                    stack.enter_context(stage.capture_mode())
                yield rates
        finally:
            self._executor.mailbox.held = None
            for group, lr, capturable in kept:
                group["lr"] = lr
                if capturable is not None:
                    group["capturable"] = capturable

    def _perform_in_branches(self, tick: Tick) -> list[MicrobatchResult]:
        """Run the actions of a tick with concurrent stages in parallel branches of the graph."""
        executor, held = self._executor, self._executor.mailbox.held
        assert held is not None
        results = []
        branches = _assign_branches(tick, self._concurrent_stages())
        for phase in tick:
            begun: set[int] = set()
            for stage, actions in groupby(phase, lambda action: action.stage):
                if branches[stage] in begun:
                    self._join_branch(branches[stage])
                begun.add(branches[stage])
                before: list[Action] = []
                for action in actions:
                    with self._branch(branches[stage], action, before):
                        results += executor.perform(((action,),))
                    before.append(action)
            self._graph_capture.join()
            held.clear()
        return results

    def _concurrent_stages(self) -> int:
        """Return how many stages should run concurrently: large micro-batches fill the device with fewer."""
        waiting = self._executor.mailbox.forward
        sizes = [x.numel() for messages in waiting for streams in messages.values() for x in streams]
        return max(1, _ENOUGH_ELEMENTS // max(sizes, default=1))

    def _join_branch(self, number: int) -> None:
        """Order the next stage of a branch after this one, so that it may reuse its memory."""
        main, side = 2 * number, 2 * number + 1
        self._graph_capture.after(main, side)
        self._graph_capture.after(side, main)

    def _branch(self, number: int, action: Action, before: Sequence[Action]) -> AbstractContextManager[None]:
        """Run a backward concurrently with the stage's forward of another micro-batch, and an update after both."""
        main, side = 2 * number, 2 * number + 1
        if action.kind is Kind.BACKWARD and self._executor.schedule.staleness(action.stage) > 0:
            if any(b.kind is not Kind.FORWARD for b in before):
                self._graph_capture.after(side, main)
            return self._graph_capture.branch(side)
        if action.kind is not Kind.FORWARD:
            self._graph_capture.after(main, side)
        return self._graph_capture.branch(main)

    def _keep_gradients(self) -> list[Copy]:
        """Keep gradients in static memory, for the next micro-batch to accumulate into and for callers to read."""
        copies: list[Copy] = []
        for stage in self._executor.stages:
            for parameter in stage.parameters:
                if parameter.grad is not None and parameter.grad is not self._gradients[parameter]:
                    copies.append((self._gradients[parameter], parameter.grad))
                    parameter.grad = self._gradients[parameter]
        return copies

    def _find_equal(self, steady: SteadyState, guards: Any, before: Any) -> CapturedTick | None:
        """Find a tick that was captured at another position in the cycle and does the same as the next one."""
        first = self._executor.microbatches
        actions = [action.shifted(-first) for action in self._executor.next_actions]
        for captured in steady.ticks.values():
            if (captured.guards, captured.before, captured.actions) == (guards, before, actions):
                steady.ticks[self._executor.position_in_cycle] = captured
                return captured
        return None

    def _updates_twice(self) -> bool:
        """Return True if a stage makes two updates in the next tick, as in a flush with a small k."""
        updated = [action.stage for action in self._executor.next_actions if action.kind is Kind.UPDATE]
        return len(updated) > len(set(updated))

    def _waiting(self) -> Any:
        """Return which micro-batches wait where, relative to the next one."""
        executor, mailbox = self._executor, self._executor.mailbox
        now, stages = executor.microbatches, executor.stages
        # Messages of other ranks are not in the ring buffers, and when they arrive does not matter.
        queues: list[dict[int, Any]] = [
            *(w for s, w in enumerate(mailbox.forward) if not mailbox.comes_from_other_rank(s, Kind.FORWARD)),
            *(w for s, w in enumerate(mailbox.backward) if not mailbox.comes_from_other_rank(s, Kind.BACKWARD)),
            *(s.saved for s in stages),
        ]
        numbers = [[n - now for n in sorted(waiting)] for waiting in (*queues, mailbox.targets)]
        stashed = [sorted(v - stage.updates for v in StashVersions(stage.stash)) for stage in stages if stage.stash]
        ages = [stage.corrections.delays_so_far for stage in stages if stage.corrections is not None]
        # How many gradients have been accumulated matters to an update; to a backward, only whether there are any.
        updated = {action.stage for action in executor.next_actions if action.kind is Kind.UPDATE}
        accumulated = [s.accumulated if s.index in updated else min(1, s.accumulated) for s in stages]
        return numbers, stashed, ages, accumulated


def _assign_branches(tick: Tick, most: int) -> dict[int, int]:
    """Assign each stage a branch; stages of one phase get different ones, up to ``most``.

    As few branches as possible: each has its own memory, which the next stage in the same branch uses again.
    """
    phases = [{action.stage for action in phase} for phase in tick]
    branches: dict[int, int] = {}
    for stage in sorted(set().union(*phases)):
        taken = {branches[other] for phase in phases if stage in phase for other in phase & branches.keys()}
        branches[stage] = next(number for number in count() if number not in taken)
    return {stage: number % most for stage, number in branches.items()}


def _kind(x: Any) -> Any:
    return (x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else type(x)
