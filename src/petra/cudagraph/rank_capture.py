"""Captures the ticks of one rank of several: a graph for each part of a tick between two messages.

A rank waits for a message, computes with it and sends the result, once or several times in a tick. Communication is not
captured. So each of these parts is a graph of its own, which reads messages from static memory and writes messages to
other ranks into static memory. Replicas average their gradients between two graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from petra.cudagraph.graph_capture import GraphCapture, Launch
from petra.cudagraph.tick_capture import TickCapture
from petra.cudagraph.tick_recording import TickRecording
from petra.pipeline import Executor, MicrobatchResult, Stage
from petra.pipeline.mailbox import Outgoing, Shapes, StaticMessage
from petra.reversible.streams import Streams
from petra.schedule import Action, Kind


@dataclass
class TickPart:
    """A part of a tick that is to be captured as one graph."""

    waits_for: Action | None = None
    """The first action, if it needs a message of another rank."""
    averages: Stage | None = None
    """The stage whose gradients are averaged over the replicas before the other work."""
    work: list[Callable[[], list[MicrobatchResult] | None]] = field(default_factory=list)


@dataclass
class Received:
    """A message of another rank in static memory."""

    action: Action
    """The action that takes it; its micro-batch is counted from the one that is read in the tick."""
    message: StaticMessage


@dataclass
class CapturedPart:
    """A part of a tick that was captured as one graph."""

    received: Received | None
    average: Callable[[], None] | None
    """Averages gradients over the replicas before the launch."""
    launch: Launch
    sent: Sequence[Outgoing]
    """Messages in static memory; their micro-batches are counted from the one that is read."""


class PartsLaunch:
    """Launches the parts of a captured tick, with the messages between them.

    Args:
        executor: A weak reference to the executor.
        shapes: The shapes of the inputs of each micro-batch.
    """

    def __init__(self, executor: Executor, shapes: Shapes) -> None:
        self._executor = executor
        self.shapes = shapes
        self.incoming = executor.incoming(shapes)
        """The messages that other ranks send in the tick."""
        self.parts: list[CapturedPart] = []

    def __call__(self) -> None:
        """Do the work of the next tick."""
        executor, mailbox, first = self._executor, self._executor.mailbox, self._executor.microbatches
        executor.begin_captured_tick(self.shapes, self.incoming)
        for part in self.parts:
            if part.received is not None:
                action = part.received.action
                mailbox.take_into(part.received.message, action.stage, action.kind, first + action.microbatch)
            if part.average is not None:
                part.average()
            part.launch()
            for message in part.sent:
                mailbox.transmit(message, first)


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
        return tuple(x.clone() for x in inputs) if self._first else (), targets.clone() if self._last else None

    def _record(self, recording: TickRecording, inputs: Streams, targets: Any) -> bool:
        try:
            self._settle(recording.steady)
        except Exception as error:
            self._give_up(error)
            return False
        launch = PartsLaunch(self._executor, tuple((x.shape, x.dtype) for x in inputs))
        self._executor.begin_captured_tick(launch.shapes, launch.incoming)
        # Messages leave during the tick. So if a part cannot be captured, the rest of the tick follows without graphs.
        try:
            with self._capture_mode() as recording.rates:
                self._executor.mailbox.held = None  # there are no branches
                used = (recording.inputs if self._first else inputs, recording.targets if self._last else targets)
                self._perform_parts(recording, launch, partial(self._executor.read, *used))
        finally:
            self._executor.mailbox.outbox = None
        self._executor.complete_tick()
        recording.launch = launch if self.ineligible_reason is None else None
        return True

    def _perform_parts(self, recording: TickRecording, launch: PartsLaunch, read: Callable[[], None]) -> None:
        """Perform the next tick part by part, and capture the parts."""
        executor, mailbox, first = self._executor, self._executor.mailbox, self._executor.microbatches
        actions = [action for phase in executor.next_tick for action in phase]
        parts = self._split(actions, recording.actions)
        for number, part in enumerate(parts):
            received = None if part.waits_for is None else self._receive(part.waits_for, first, launch.shapes)
            average = None if part.averages is None else self._average(part.averages)
            mailbox.outbox = []
            graph = self._capture_part(part, recording, read if number == 0 else None, ends=part is parts[-1])
            for message in mailbox.outbox:
                mailbox.transmit(message)
            if graph is not None:
                sent = [m._replace(action=m.action.shifted(-first)) for m in mailbox.outbox]
                launch.parts.append(CapturedPart(received, average, graph, sent))
        for action in actions:
            if not executor.owns(action.stage):
                executor.perform_action(action)

    def _split(self, actions: Sequence[Action], absolute: Sequence[Action]) -> list[TickPart]:
        """Split a tick before every receive from another rank and after every send to one.

        After a send, there is another part even if it has no work: its end writes to the ring buffers, in which a
        message may be that has not been copied yet.

        Args:
            actions: The actions as the executor takes them.
            absolute: The same actions with the numbers of their micro-batches.

        Returns:
            The parts, at least one.
        """
        executor = self._executor
        stages = {stage.index: stage for stage in executor.stages}
        parts = [TickPart()]
        for action, numbered in zip(actions, absolute, strict=True):
            stage = stages.get(action.stage)
            if stage is None:
                continue
            if self._takes_message(numbered, stage):
                if parts[-1].work:
                    parts.append(TickPart())
                parts[-1].waits_for = numbered
            if action.kind is Kind.UPDATE and stage.average is not None:
                if not parts[-1].work and len(parts) > 1:
                    parts.pop()  # a graph of this alone would be empty if there is one micro-batch
                parts[-1].work.append(stage.average_microbatches)
                parts.append(TickPart(averages=stage, work=[stage.finish_averaged_update]))
                continue
            parts[-1].work.append(partial(executor.perform_action, action))
            if self._sends_message(action, stage):
                parts.append(TickPart())
        return parts

    def _sends_message(self, action: Action, stage: Stage) -> bool:
        if action.kind is Kind.FORWARD:
            return not stage.last and not self._executor.owns(action.stage + 1)
        return action.kind is Kind.BACKWARD and action.stage > 0 and not self._executor.owns(action.stage - 1)

    def _takes_message(self, action: Action, stage: Stage) -> bool:
        if action.kind is Kind.UPDATE or (action.kind is Kind.BACKWARD and stage.predicts):
            return False
        return self._executor.mailbox.comes_from_other_rank(action.stage, action.kind)

    def _receive(self, action: Action, first: int, shapes: Shapes) -> Received:
        """Wait for the message of an action, and move it into static memory."""
        mailbox, stage, kind = self._executor.mailbox, action.stage, action.kind
        static = mailbox.static_message(stage, kind, shapes)
        mailbox.take_into(static, stage, kind, action.microbatch)
        waiting: list[dict[int, Any]] = [mailbox.forward[stage], mailbox.backward[stage]]
        waiting[kind is not Kind.FORWARD][action.microbatch] = static.message
        return Received(action.shifted(-first), static)

    def _average(self, stage: Stage) -> Callable[[], None] | None:
        """Average the gradients of a stage over the replicas; return a function that does it again."""
        if self.ineligible_reason is None and any(p.grad is None for p in stage.parameters if p.requires_grad):
            self._give_up(ValueError(f"a parameter of stage {stage.index} has no gradient"))
        if self.ineligible_reason is not None:
            stage.average_over_replicas()
            return None
        # In the same order as `Stage.average_over_replicas`, because another replica may run this tick eagerly.
        gradients = [p.grad for p in stage.parameters if p.grad is not None and p.requires_grad]
        statistics = [b.data for b in stage.statistics()]
        has_gradient = torch.ones(len(gradients), dtype=torch.float64, device=stage.layers.settings.device)
        average = stage.average
        assert average is not None

        def average_gradients() -> None:
            average([*gradients, *statistics, has_gradient.fill_(1.0)])

        average_gradients()
        return average_gradients

    def _capture_part(
        self, part: TickPart, recording: TickRecording, read: Callable[[], None] | None, ends: bool
    ) -> Launch | None:
        """Perform a part of a tick; return its graph, or None if it could not be captured.

        Args:
            part: The part.
            recording: The tick.
            read: Reads the micro-batch of the tick, in its first part.
            ends: Whether it is the last part.

        Returns:
            The graph.
        """
        executor, mailbox = self._executor, self._executor.mailbox
        earlier = list(recording.results)

        def work() -> None:
            if read is not None:
                recording.begin()
                read()
            found = [result for one in part.work for result in one() or ()]
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
