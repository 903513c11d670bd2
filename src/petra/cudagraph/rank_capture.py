"""Captures the ticks of one rank of several: a graph for each part of a tick between two messages.

A rank waits for a message, computes with it and sends the result, once or several times in a tick. Communication is not
captured. So each of these parts is a graph of its own, which reads messages from static memory and leaves those for
other ranks there. Replicas average their gradients between two graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from petra.cudagraph.graph_capture import GraphCapture, Launch
from petra.cudagraph.steady_state import put_together, take_apart
from petra.cudagraph.tick_capture import TickCapture, shifted
from petra.cudagraph.tick_recording import TickRecording
from petra.pipeline import Executor, MicrobatchResult, Stage
from petra.pipeline.mailbox import Mailbox, Outgoing, Shapes
from petra.reversible.streams import Streams
from petra.schedule import Action, Kind


@dataclass
class Plan:
    """A part of a tick that is to be captured as one graph."""

    waits_for: Action | None = None
    """The action that takes a message of another rank, which comes first."""
    averages: Stage | None = None
    """The stage whose gradients are averaged over the replicas before the other work."""
    work: list[Callable[[], list[MicrobatchResult] | None]] = field(default_factory=list)


@dataclass
class Received:
    """A message of another rank in static memory."""

    action: Action
    """The action that takes it, relative to the micro-batch that is read in the tick."""
    tensors: list[Tensor]


@dataclass
class CapturedPart:
    """A part of a tick that was captured as one graph."""

    received: Received | None
    average: Callable[[], None] | None
    """Averages gradients over the replicas before the launch."""
    launch: Launch
    sent: list[Outgoing]
    """Messages in static memory, relative to the micro-batch that is read."""


class PartsLaunch:
    """Launches the parts of a captured tick, with the messages between them.

    Args:
        executor: A weak reference to the executor.
        shapes: The shapes of the inputs of each micro-batch.
    """

    def __init__(self, executor: Executor, shapes: Shapes) -> None:
        self._executor = executor
        self._shapes = shapes
        self.parts: list[CapturedPart] = []

    def __call__(self) -> None:
        """Do the work of the next tick."""
        executor, mailbox, first = self._executor, self._executor.mailbox, self._executor.microbatches
        executor.begin_captured_tick(self._shapes)
        for part in self.parts:
            if part.received is not None:
                message = _take(mailbox, shifted([part.received.action], first)[0])
                torch._foreach_copy_(part.received.tensors, _tensors(message), non_blocking=True)
            if part.average is not None:
                part.average()
            part.launch()
            for message in part.sent:
                mailbox.transmit(message._replace(action=shifted([message.action], first)[0]))


class RankTickCapture(TickCapture):
    """Runs the ticks of one rank, or of one replica, as captured graphs where that is possible.

    Args:
        executor: The executor.
        graph_capture: Captures work on the device.
    """

    def __init__(self, executor: Executor, graph_capture: GraphCapture) -> None:
        super().__init__(executor, graph_capture)
        self._first, self._last = executor.owns(0), executor.owns(executor.schedule.stages - 1)

    def _used_data(self, inputs: Streams, targets: Any) -> tuple[Any, ...]:
        return (*(inputs if self._first else ()), *((targets,) if self._last else ()))

    def _static_data(self, inputs: Streams, targets: Any) -> tuple[Streams, Any]:
        static = tuple(x.clone() for x in inputs) if self._first else inputs
        return static, targets.clone() if self._last else targets

    def _record(self, recording: TickRecording) -> bool:
        # Messages leave during the tick. So if a part cannot be captured, the rest of the tick follows without graphs.
        self._settle(recording.steady)
        shapes = tuple((x.shape, x.dtype) for x in recording.inputs)
        launch = PartsLaunch(self._executor, shapes)
        self._executor.begin_captured_tick(shapes)
        try:
            with self._capture_mode() as recording.rates:
                self._executor.mailbox.held = None  # there are no branches
                self._perform_parts(recording, launch)
        finally:
            self._executor.mailbox.outbox = None
        self._executor.complete_tick()
        recording.launch = launch if self.ineligible_reason is None else None
        return True

    def _perform_parts(self, recording: TickRecording, launch: PartsLaunch) -> None:
        """Perform the next tick part by part, and capture the parts."""
        executor, mailbox, first = self._executor, self._executor.mailbox, self._executor.microbatches
        actions = [action for phase in executor.next_tick for action in phase]
        plans = self._plan(actions, recording.actions)
        for number, plan in enumerate(plans):
            received = None if plan.waits_for is None else self._receive(plan.waits_for, first)
            average = None if plan.averages is None else self._average(plan.averages)
            mailbox.outbox = []
            part = self._capture_part(plan, recording, begins=number == 0, ends=plan is plans[-1])
            for message in mailbox.outbox:
                mailbox.transmit(message)
            if part is not None:
                sent = [m._replace(action=shifted([m.action], -first)[0]) for m in mailbox.outbox]
                launch.parts.append(CapturedPart(received, average, part, sent))
        for action in actions:
            if not executor.owns(action.stage):
                executor.perform_action(action)

    def _plan(self, actions: Sequence[Action], absolute: Sequence[Action]) -> list[Plan]:
        """Split a tick before actions that take messages of other ranks, and after those that send some.

        Args:
            actions: The actions as the executor takes them.
            absolute: The same actions with the numbers of their micro-batches.

        Returns:
            The parts, at least one.
        """
        executor = self._executor
        stages = {stage.index: stage for stage in executor.stages}
        plans = [Plan()]
        for action, numbered in zip(actions, absolute, strict=True):
            stage = stages.get(action.stage)
            if stage is None:
                continue
            if self._takes_message(numbered, stage):
                if plans[-1].work:
                    plans.append(Plan())
                plans[-1].waits_for = numbered
            if action.kind is Kind.UPDATE and stage.average is not None:
                plans[-1].work.append(stage.average_microbatches)
                plans.append(Plan(averages=stage, work=[stage.update_with_means]))
                continue
            plans[-1].work.append(partial(executor.perform_action, action))
            above, below = action.kind is Kind.FORWARD, action.kind is Kind.BACKWARD
            if (above and not stage.last and not executor.owns(action.stage + 1)) or (
                below and action.stage > 0 and not executor.owns(action.stage - 1)
            ):
                plans.append(Plan())
        return [plan for plan in plans if plan.work] or plans[:1]

    def _takes_message(self, action: Action, stage: Stage) -> bool:
        if action.kind is Kind.UPDATE or (action.kind is Kind.BACKWARD and stage.predicts):
            return False
        return self._executor.mailbox.comes_from_other_rank(action.stage, action.kind)

    def _receive(self, action: Action, first: int) -> Received:
        """Wait for the message of an action, and move it into static memory."""
        mailbox = self._executor.mailbox
        message = _take(mailbox, action)
        static = tree_map_only(Tensor, Tensor.clone, message)
        if action.kind is Kind.FORWARD:
            mailbox.forward[action.stage][action.microbatch] = static
        else:
            mailbox.backward[action.stage][action.microbatch] = put_together(static)
        return Received(shifted([action], -first)[0], _tensors(static))

    def _average(self, stage: Stage) -> Callable[[], None] | None:
        """Average the gradients of a stage over the replicas; return a function that does it again."""
        if self.ineligible_reason is None and any(p.grad is None for p in stage.parameters if p.requires_grad):
            self._give_up(ValueError(f"a parameter of stage {stage.index} has no gradient"))
        if self.ineligible_reason is not None:
            stage.average_over_replicas()
            return None
        # In the order of `Stage.average_over_replicas`, because another replica may not have captured its tick.
        gradients = [p.grad for p in stage.parameters if p.grad is not None and p.requires_grad]
        statistics = [b.data for b in stage.statistics()]
        there = torch.ones(len(gradients), dtype=torch.float64, device=stage.layers.settings.device)
        average = stage.average
        assert average is not None

        def again() -> None:
            average([*gradients, *statistics, there.fill_(1.0)])

        again()
        return again

    def _capture_part(self, plan: Plan, recording: TickRecording, begins: bool, ends: bool) -> Launch | None:
        """Perform a part of a tick; return its graph, or None if it could not be captured."""
        executor, mailbox = self._executor, self._executor.mailbox
        earlier = list(recording.results)

        def work() -> None:
            if begins:
                recording.begin()
                executor.read(recording.inputs, recording.targets)
            found = [result for one in plan.work for result in one() or ()]
            recording.results = [*earlier, *found]
            if ends and self.ineligible_reason is None:
                recording.finish(recording.results, self._keep_gradients())

        if self.ineligible_reason is None:
            before = executor.host_state()
            try:
                return self._graph_capture.capture(work)
            except Exception as error:  # a capture launches nothing, so all tensors have the values they had
                executor.load_host_state(before)
                mailbox.outbox = []
                self._give_up(error)
        work()
        return None


def _take(mailbox: Mailbox, action: Action) -> Any:
    """Wait for the message that an action takes; remove and return its parts."""
    mailbox.collect(action.stage, action.kind, action.microbatch)
    if action.kind is Kind.FORWARD:
        return mailbox.forward[action.stage].pop(action.microbatch)
    return take_apart(mailbox.backward[action.stage].pop(action.microbatch))


def _tensors(message: Any) -> list[Tensor]:
    return [x for x in tree_leaves(message) if isinstance(x, Tensor)]
