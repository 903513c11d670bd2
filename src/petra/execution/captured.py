"""Carries a schedule out in one process on a GPU, where the tick of a full pipeline is recorded once and replayed.

A tick launches some thousand small kernels, and a GPU that waits for the host to launch them is idle most of the time.
Once the pipeline is full, every tick does the same to other numbers. What waits between two ticks lies in rings
(`queues`), so ordinary ticks can go on where replayed ones have stopped, and the other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import count, groupby
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from petra.errors import first_line
from petra.execution.fixed import Fixed
from petra.execution.later import Later
from petra.execution.local import LocalExecutor
from petra.execution.queues import Copy, carry_out
from petra.execution.rates import Rates
from petra.execution.recorder import Recorder, Repeat
from petra.execution.refusal import groups_of, refusal
from petra.execution.stage import Finished, Stage, check_finite
from petra.execution.steady import Program, Steady, Versions
from petra.execution.undo import Remembered
from petra.methods import BackwardMessage
from petra.reversible.streams import Streams
from petra.schedule import Action, Kind, Order, Tick

_LATE = 8
"""Ticks after which the host looks at a loss, and how far it runs ahead of the device at most."""

_ENOUGH = 2**25
"""Elements in the streams of stages that are at work side by side; more of them only take more memory."""


class CapturedExecutor(LocalExecutor):
    """A `LocalExecutor` that records and replays ticks where it can; `refusal` says why, where it cannot."""

    def __init__(self, stages: Sequence[Stage], order: Order, recorder: Recorder) -> None:
        super().__init__(stages, order)
        self._recorder = recorder
        self.refusal = refusal(stages, order)
        self.replayed = 0
        """How many ticks have been."""
        self._steady: dict[Any, Steady] = {}
        self._settled: Steady | None = None  # whose places everything waits at
        self._history: dict[int, tuple[Any, int]] = {}  # place in the cycle -> what it was like, how often in a row
        self._recording = False
        self._held: list[Any] = []  # read by a branch, so not to be given to another before they meet
        self._losses: list[tuple[int, Later]] = []  # that nobody has looked at
        self._gradients: dict[Tensor, Tensor] = {}
        self._fixed = Fixed(self.stages)

    def _step(self, inputs: Streams, targets: Any, weight: float) -> list[Finished]:
        kind = tuple(_kind(x) for x in (*inputs, targets))
        shapes = tuple((x.shape, x.dtype) for x in inputs)
        if (
            self.refusal is not None
            or weight != 1.0
            or any(other != 1.0 for _, other in self.targets.values())  # it is left out of what waits in rings
            or not isinstance(targets, Tensor)
            or self.observers
            or self.clock is not None
            or any(shape != shapes for shape in self._shapes.values())
        ):
            self._history.clear()
            return self._ordinary(inputs, targets, weight)
        steady = self._steady.get(kind)
        if steady is None:
            steady = self._steady[kind] = Steady(self)
        place, fixed = self._tick % self.order.accumulate, self._fixed()
        program = steady.programs.get(place)
        known = self._settled is steady
        before = program.before if program is not None and known else self._waiting()
        if program is not None and program.fixed == fixed and program.before == before:
            return self._replay(steady, program, inputs, targets)
        like, times = self._history.get(place, (None, 0))
        times = times + 1 if like == (kind, fixed, before) else 0
        self._history[place] = (kind, fixed, before), times
        if times < 2:  # the first time, libraries choose their kernels; the second, draws are looked out for
            return self._ordinary(inputs, targets, weight, watching=times == 1)
        return self._record(steady, place, fixed, before, inputs, targets)

    def drain(self) -> list[Finished]:
        self._look_at_losses(0)
        self._history.clear()
        self._settled = None
        return super().drain()

    def state_dict(self) -> dict[str, Any]:
        self._look_at_losses(0)
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any], waiting: Any) -> None:
        super().load_state_dict(state, waiting)
        self._losses.clear()
        self._history.clear()
        self._settled = None

    def _ordinary(self, inputs: Streams, targets: Any, weight: float, watching: bool = False) -> list[Finished]:
        self._settled = None
        chains = [stage.chain for stage in self.stages]
        for chain in chains:
            chain.watching = watching
        finished = super()._step(inputs, targets, weight)
        for chain in chains:
            chain.watching = False
        if any(chain.has_drawn for chain in chains):
            self.refusal = "a layer draws random numbers, as dropout does, and a recorded tick would repeat them"
        elif any(p.grad is not None and p.grad.is_sparse for stage in self.stages for p in stage.parameters):
            self.refusal = "some gradients are sparse"
        elif any(stage.synthesizer is not None and not stage.synthesizer.recordable for stage in self.stages):
            self.refusal = "the optimizer of a synthesizer is not fused"
        return finished

    def _settle(self, steady: Steady) -> None:
        if self._settled is not steady:
            steady.settle(self.stages[0].chain.settings.device)
            for stage in self.stages:
                for parameter in stage.parameters:
                    if parameter.requires_grad:
                        self._gradients.setdefault(parameter, torch.zeros_like(parameter))
            carry_out(self._keep_gradients())
        self._settled = steady

    def _record(
        self, steady: Steady, place: int, fixed: Any, before: Any, inputs: Streams, targets: Any
    ) -> list[Finished]:
        first = self.microbatches
        own, wanted = tuple(x.clone() for x in inputs), targets.clone()
        actions = [action for phase in self.order.tick(self._tick, self._fed + 1) for action in phase]
        found: list[Finished] = []

        def work() -> None:
            steady.fetch()
            # The newcomer's targets may be about to take the place of these.
            found.extend(replace(f, targets=f.targets.clone()) for f in LocalExecutor._step(self, own, wanted, 1.0))
            steady.store(self._keep_gradients())

        with self._whole():
            recorded = self._try(steady, work)
        if recorded is None:
            return self._ordinary(inputs, targets, 1.0)
        repeat, rates = recorded
        counted = [replace(f, microbatch=f.microbatch - first) for f in found]
        program = Program(repeat, fixed, before, own, wanted, counted, actions, rates)
        steady.programs[place] = program
        for action in actions:
            if action.kind is Kind.UPDATE:
                self._owned[action.stage].schedule()
        return self._results(program, first)

    def _try(self, steady: Steady, work: Callable[[], None]) -> tuple[Repeat, Rates] | None:
        """Record ``work``; if that cannot be done, all is as before and `refusal` says why."""
        remembered = None
        try:
            self._settle(steady)
            remembered = Remembered(self)
            with self._as_recorded() as rates:
                return self._recorder.record(work), rates
        except Exception as error:
            if remembered is not None:
                remembered.restore()
            self._halted = None  # by a tick that was only to be recorded
            reason = first_line(error)
            self.refusal = f"a tick could not be recorded ({reason})"
            self._steady.clear()
            return None

    def _replay(self, steady: Steady, program: Program, inputs: Streams, targets: Any) -> list[Finished]:
        first = self.microbatches
        with self._whole():
            self._settle(steady)
            for to, x in zip((*program.inputs, program.targets), (*inputs, targets), strict=True):
                to.copy_(x, non_blocking=True)
            program.rates.refresh()
            program.repeat()
            self._advance(steady, program, inputs)
        self.replayed += 1
        return self._results(program, first)

    def _advance(self, steady: Steady, program: Program, inputs: Streams) -> None:
        """What the tick does on the host."""
        self._shapes[self.microbatches] = tuple((x.shape, x.dtype) for x in inputs)
        self._fed += 1
        self._tick += 1
        for stage in self.stages:
            if stage.stash is not None:
                stage.stash.advance()
            if stage.corrected is not None:
                updated = any(a.stage == stage.index and a.kind is Kind.UPDATE for a in program.actions)
                stage.corrected.advance(updated)
        for queue in steady.queues:
            queue.advance()
        for action in program.actions:
            stage = self._owned[action.stage]
            if action.kind is Kind.BACKWARD:
                stage.accumulated += 1
                if action.stage == 0:
                    self._shapes.pop(min(self._shapes))
            elif action.kind is Kind.UPDATE:
                stage.accumulated = 0
                stage.updates += 1
                stage.schedule()

    def _results(self, program: Program, first: int) -> list[Finished]:
        """What reached the loss, in memory of its own."""
        results = []
        for f in program.finished:
            loss, outputs, targets = tree_map(Tensor.clone, (f.loss, f.outputs, f.targets))
            results.append(replace(f, microbatch=first + f.microbatch, loss=loss, outputs=outputs, targets=targets))
            self._losses.append((first + f.microbatch, Later(loss)))
        self._look_at_losses(_LATE)
        return results

    def _look_at_losses(self, spared: int) -> None:
        while len(self._losses) > spared:
            microbatch, loss = self._losses.pop(0)
            check_finite(loss.get(), microbatch, self.stages[-1].index, "a few updates have been made since")

    @contextmanager
    def _as_recorded(self) -> Iterator[Rates]:
        """Inside, whatever is a number on the host and changes from tick to tick is left out, or is on the device."""
        device = self.stages[0].chain.settings.device
        rates = Rates(self.stages, device)
        groups = [group for stage in self.stages for group in groups_of(stage)]
        kept = [(group, group["lr"], group.get("capturable")) for group in groups]
        for group, rate in zip(groups, rates.table, strict=True):
            group["lr"] = rate
            if "capturable" in group:
                group["capturable"] = True
        self._recording = True
        for stage in self.stages:
            stage.recording = True
            stage.chain.draws = False
            if stage.corrected is not None:
                stage.corrected.site.rate = 1.0
        try:
            yield rates
        finally:
            self._recording = False
            self._held.clear()
            for stage in self.stages:
                stage.recording = False
                stage.chain.draws = True
                if stage.corrected is not None:
                    stage.corrected.set_rate()
            for group, lr, capturable in kept:
                group["lr"] = lr
                if capturable is not None:
                    group["capturable"] = capturable

    def _perform(self, tick: Tick) -> list[Finished]:
        if not self._recording:
            return super()._perform(tick)
        finished = []
        numbers = _numbered(tick, self._side_by_side())
        for phase in tick:
            begun: set[int] = set()
            for stage, actions in groupby(phase, lambda action: action.stage):
                if numbers[stage] in begun:
                    self._meet(numbers[stage])
                begun.add(numbers[stage])
                before: list[Action] = []
                for action in actions:
                    with self._branch(numbers[stage], action, before):
                        finished += super()._perform(((action,),))
                    before.append(action)
            self._recorder.join()
            self._held.clear()
        return finished

    def _side_by_side(self) -> int:
        """How many stages are to be at work beside each other: large micro-batches fill the device with fewer."""
        sizes = [x.numel() for waiting in self.ups for streams in waiting.values() for x in streams]
        return max(1, _ENOUGH // max(sizes, default=1))

    def _meet(self, number: int) -> None:
        """What a stage has done, forward and backward, comes before the next one's work; it may use its memory."""
        main, side = 2 * number, 2 * number + 1
        self._recorder.after(main, side)
        self._recorder.after(side, main)

    def _branch(self, number: int, action: Action, before: Sequence[Action]) -> AbstractContextManager[None]:
        """A stage goes backward beside its forward if that is of another micro-batch, and updates after both."""
        main, side = 2 * number, 2 * number + 1
        if action.kind is Kind.BACKWARD and self.order.staleness(action.stage) > 0:
            if any(b.kind is not Kind.FORWARD for b in before):
                self._recorder.after(side, main)
            return self._recorder.branch(side)
        if action.kind is not Kind.FORWARD:
            self._recorder.after(main, side)
        return self._recorder.branch(main)

    def _take_up(self, stage: int, microbatch: int) -> Streams:
        streams = super()._take_up(stage, microbatch)
        self._hold(streams)
        return streams

    def _take_down(self, stage: int, microbatch: int) -> BackwardMessage:
        message = super()._take_down(stage, microbatch)
        self._hold(message)
        return message

    def _hold(self, message: Any) -> None:
        if self._recording:
            self._held.append(message)

    def _keep_gradients(self) -> list[Copy]:
        """Gradients in memory that stays, for the next micro-batch to add to and for whoever wants to read them."""
        copies = []
        for stage in self.stages:
            for parameter in stage.parameters:
                if parameter.grad is not None and parameter.grad is not self._gradients[parameter]:
                    copies.append((self._gradients[parameter], parameter.grad))
                    parameter.grad = self._gradients[parameter]
        return copies

    def _waiting(self) -> Any:
        now = self.microbatches
        queues: list[dict[int, Any]] = [*self.ups, *self.downs, *(stage.kept for stage in self.stages), self.targets]
        numbers = [[n - now for n in sorted(waiting)] for waiting in queues]
        stashed = [sorted(v - stage.updates for v in Versions(stage.stash)) for stage in self.stages if stage.stash]
        ages = [stage.corrected.ages for stage in self.stages if stage.corrected is not None]
        return numbers, stashed, ages, [stage.accumulated for stage in self.stages]


def _numbered(tick: Tick, most: int) -> dict[int, int]:
    """A number for every stage, another one for stages of the same phase as long as there are less than ``most``.

    As few as can be: branches have memory of their own, which the next stage in the same branch uses again.
    """
    phases = [{action.stage for action in phase} for phase in tick]
    numbers: dict[int, int] = {}
    for stage in sorted(set().union(*phases)):
        taken = {numbers[other] for phase in phases if stage in phase for other in phase & numbers.keys()}
        numbers[stage] = next(number for number in count() if number not in taken)
    return {stage: number % most for stage, number in numbers.items()}


def _kind(x: Any) -> Any:
    return (x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else type(x)
