"""Runs a schedule on the stages of one process or of one rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from petra.methods import SavedState
from petra.pipeline.activity import Activity
from petra.pipeline.gradient_clipping import GlobalClipping
from petra.pipeline.hooks import Announcement, Clock, HasHostState, Observer, Perform, TickRunner
from petra.pipeline.mailbox import EVALUATION, Incoming, LocalMailbox, Mailbox, Shapes
from petra.pipeline.results import MicrobatchResult
from petra.pipeline.stage import Stage
from petra.reversible.streams import Streams
from petra.schedule import Action, Kind, PipelineSchedule, Tick

_WORDS = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.UPDATE: "update", Kind.LEARN: "synthesizer update"}


class Executor:
    """Runs a schedule: it alone decides which stage acts when. Messages are in the mailbox.

    Args:
        stages: The stages of this process, in order.
        schedule: The schedule of all stages, also those of other ranks.
        mailbox: Where messages wait; by default, all stages are in this process.
    """

    def __init__(self, stages: Sequence[Stage], schedule: PipelineSchedule, mailbox: Mailbox | None = None) -> None:
        self.stages = list(stages)
        self.schedule = schedule
        self.mailbox: Mailbox = mailbox if mailbox is not None else LocalMailbox(schedule.stages)
        self.capture: TickRunner | None = None
        """Runs ticks as captured CUDA graphs, where there is one."""
        self.readers: list[Callable[[int], None]] = []
        """Called with the number of every micro-batch before it is read; they may add or remove observers."""
        self.observers: list[Observer] = []
        """Called after every action; while there are any, ticks do not run as captured graphs."""
        self.announcements: list[Announcement] = []
        """Called before every tick with the index of its first micro-batch and its actions, which may be empty."""
        self.acting: int | None = None
        """The stage that is computing."""
        self.activity = Activity()
        """The current activity of this process, for the watchdog."""
        self.clock: Clock | None = None
        """Called after every action with the times at which it asked for its message, began and ended."""
        self.clipping: GlobalClipping | None = None
        """Clips the gradient of all stages together, where there is one."""
        self._owned = {stage.index: stage for stage in stages}
        self._start = 0  # the first micro-batch since the pipeline was last empty
        self._updates = 0  # of every stage before it
        self._fed = 0  # how many have been read since
        self._tick = 0  # how many ticks have passed since
        self._shapes: dict[int, Shapes] = {}  # inputs of micro-batches in flight
        self._failure: str | None = None  # what stopped a tick half-way
        self._current = schedule  # since the pipeline was last empty

    @property
    def microbatches(self) -> int:
        """The number of micro-batches that have been read."""
        return self._start + self._fed

    @property
    def in_flight(self) -> bool:
        """True if a micro-batch is in the pipeline, or in a gradient that waits for its update."""
        return self._fed > 0

    @property
    def oldest_in_flight(self) -> int:
        """The oldest micro-batch that has not left the pipeline, or the next one if there is none."""
        return min(self._shapes, default=self.microbatches)

    @property
    def position_in_cycle(self) -> Hashable:
        """The position of the next tick in the cycle of the schedule."""
        return self._current.position(self._tick)

    @property
    def next_tick(self) -> Tick:
        """The next tick, if a micro-batch is read in it."""
        return self._current.tick(self._tick, self._fed + 1)

    @property
    def next_actions(self) -> list[Action]:
        """The actions of the next tick, with the numbers of their micro-batches."""
        return [action.shifted(self._start) for phase in self.next_tick for action in phase]

    @property
    def input_shapes(self) -> list[Shapes]:
        """The shapes of the inputs of every micro-batch in flight."""
        return list(self._shapes.values())

    def tick(self, inputs: Streams, targets: Any, weight: float = 1.0) -> list[MicrobatchResult]:
        """Read one micro-batch and let every stage do what the schedule says.

        Args:
            inputs: The inputs of the network; on the device if the first stage is in this process.
            targets: The targets of the loss; on the device if the last stage is in this process.
            weight: The weight of the gradient in the mean over replicas.

        Returns:
            The micro-batches that reached the loss in this tick.
        """
        for reader in self.readers:
            reader(self.microbatches)
        for stage in self.stages:
            stage.observe_lr()
        if self.capture is not None:
            return self.capture.run_tick(inputs, targets, weight)
        return self.run_tick(inputs, targets, weight)

    def run_tick(
        self, inputs: Streams, targets: Any, weight: float = 1.0, perform: Perform | None = None
    ) -> list[MicrobatchResult]:
        """Run one tick action by action.

        Args:
            inputs: The inputs of the network, on the device.
            targets: The targets of the loss.
            weight: The weight of the gradient in the mean over replicas.
            perform: Runs the actions of the tick; by default, one after the other.

        Returns:
            The micro-batches that reached the loss in this tick.
        """
        with self.uninterrupted():
            tick = self.next_tick
            self.read(inputs, targets, weight)
            results = self.perform(tick) if perform is None else perform(tick)
            self.complete_tick()
        return results

    def read(self, inputs: Streams, targets: Any, weight: float = 1.0) -> None:
        """Read the micro-batch of the next tick.

        Args:
            inputs: The inputs of the network, on the device.
            targets: The targets of the loss.
            weight: The weight of the gradient in the mean over replicas.
        """
        self._shapes[self.microbatches] = tuple((x.shape, x.dtype) for x in inputs)
        self.mailbox.read(self.microbatches, inputs, targets, weight)
        self._fed += 1

    def complete_tick(self) -> None:
        """Go on to the next tick."""
        self._tick += 1
        self.activity.now("between ticks")

    def drain(self) -> list[MicrobatchResult]:
        """Finish what is in flight, and update with what is left; the next tick fills the pipeline again.

        Returns:
            The micro-batches that reached the loss.
        """
        if self.capture is not None:
            self.capture.synchronize()
            self.capture.reset()
        results = []
        for stage in self.stages:
            stage.observe_lr()
        with self.uninterrupted():
            for tick in range(self._tick, self._current.ticks(self._fed)):
                self._tick = tick
                results += self.perform(self._current.tick(tick, self._fed))
            results += self.perform(self._current.final_tick(self._fed))
            self._begin_at(self.microbatches, self.stages[0].updates)
            assert self.mailbox.empty
            assert not any(stage.saved for stage in self.stages)
        self.mailbox.flush()
        return results

    def _begin_at(self, microbatch: int, updates: int) -> None:
        """Begin to fill the empty pipeline with this micro-batch, after as many updates."""
        self._start, self._fed, self._tick, self._updates = microbatch, 0, 0, updates
        self._current = self.schedule.after(updates)

    def predict(self, inputs: Streams) -> Streams | None:
        """Compute the outputs of the network in evaluation mode, with the current weights.

        Args:
            inputs: The inputs of the network, on the device.

        Returns:
            The outputs; None where the last stage is on another rank.
        """
        self.mailbox.begin_evaluation(inputs)
        streams: Streams = inputs
        for stage in self.stages:
            self.activity.now(f"evaluation on stage {stage.index}")
            if stage.index > 0:
                streams = self.mailbox.take_forward(stage, EVALUATION)
            streams = stage.predict(self.mailbox.unpack(stage, streams))
            if not stage.last:
                self.mailbox.send_forward(Action(stage.index, Kind.FORWARD, EVALUATION), streams)
        self.activity.now("between ticks")
        return self.mailbox.format.lay_out(streams) if self.stages[-1].last else None

    def uninterrupted(self) -> Uninterrupted:
        """Return a context for a whole tick. After an error inside, training can only continue from a saved state.

        Returns:
            The context.
        """
        return Uninterrupted(self)

    def begin_uninterrupted(self) -> None:
        """Check that a tick can begin.

        Raises:
            RuntimeError: If an earlier tick failed, or where nothing can be trained.
        """
        self._check_no_failure()
        if torch.is_inference_mode_enabled():
            raise RuntimeError("training is not possible inside torch.inference_mode(): call step() outside of it")
        settings = self.stages[0].layers.settings
        device = settings.device.type
        if settings.autocast is None and device != "meta" and torch.is_autocast_enabled(device):
            raise RuntimeError(
                "torch.autocast around step() cannot cover layers that are evaluated in later ticks: "
                "create the trainer with autocast=torch.bfloat16 instead"
            )

    def fail(self, error: BaseException) -> None:
        """Note that a tick has failed half-way.

        Args:
            error: The reason.
        """
        self._failure = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"

    def _check_no_failure(self) -> None:
        if self._failure is not None:
            raise RuntimeError(
                f"an earlier tick failed half-way ({self._failure}), so what is in flight is incomplete: "
                "load a state from before it, or create a new trainer from the weights"
            )

    def perform(self, tick: Tick) -> list[MicrobatchResult]:
        """Run actions one after the other.

        Args:
            tick: The actions of all stages, also those of other ranks.

        Returns:
            The micro-batches that reached the loss.
        """
        self.begin(tick)
        results = [result for phase in tick for action in phase for result in self.perform_action(action)]
        self.activity.now("between ticks")
        return results

    def begin(self, tick: Tick) -> None:
        """Prepare for the messages of a tick, and announce its actions.

        Args:
            tick: The actions of all stages, also those of other ranks.
        """
        self.mailbox.begin_tick(self.mailbox.incoming(tick, self._start, self._shapes))
        if self.clipping is not None:
            self.clipping.begin_tick()
        for announce in self.announcements:
            announce(self._start, tick)

    def perform_action(self, action: Action) -> list[MicrobatchResult]:
        """Run an action of a stage of this process, or note one of another rank.

        Args:
            action: The action; its micro-batch is counted from the one with which the pipeline began to fill.

        Returns:
            The micro-batch, if it reached the loss.
        """
        results: list[MicrobatchResult] = []
        if action.microbatch < 0 and self._start > 0:
            return results  # zero features come before the first micro-batch of all, not of every filling
        if action.stage in self._owned:
            results = self._act(action)
        else:
            if self.clipping is not None and action.kind is Kind.UPDATE:
                self.clipping.announce()
            self.mailbox.begin_remote_action(Action(action.stage, action.kind, self._start + action.microbatch))
        if action.kind is Kind.BACKWARD and action.stage == 0:  # it has left the pipeline
            self._shapes.pop(self._start + action.microbatch)
        return results

    def owns(self, stage: int) -> bool:
        """Return whether a stage is in this process.

        Args:
            stage: The index of the stage.

        Returns:
            True if it is.
        """
        return stage in self._owned

    def incoming(self, shapes: Shapes) -> list[Incoming]:
        """Return the messages that other ranks send to this one in the next tick.

        Args:
            shapes: The shapes and dtypes of the inputs that are read.

        Returns:
            The messages, with micro-batches counted from the one that is read.
        """
        first = self.microbatches
        found = self.mailbox.incoming(self.next_tick, self._start, {**self._shapes, first: shapes})
        return [m._replace(action=m.action.shifted(-first)) for m in found]

    def begin_captured_tick(self, shapes: Shapes, incoming: Sequence[Incoming]) -> None:
        """Post the receives of the next tick, which runs as captured graphs.

        Args:
            shapes: The shapes and dtypes of the inputs that are read.
            incoming: What `incoming` returned for a tick like this one.
        """
        first = self.microbatches
        self._shapes[first] = shapes
        self.activity.now("captured tick", self._start + self._tick)
        self.activity.set_up = True
        self.mailbox.begin_tick(incoming, first)

    def _act(self, action: Action) -> list[MicrobatchResult]:
        stage, mailbox = self._owned[action.stage], self.mailbox
        microbatch = self._start + action.microbatch
        action = Action(stage.index, action.kind, microbatch)
        asked = began = self._begin(action)
        results = []
        if action.kind is Kind.FORWARD:
            assert self.clipping is None or not self.clipping.waits(stage)
            received = mailbox.take_forward(stage, microbatch)
            inputs = mailbox.unpack(stage, received)
            began = self._now()
            outputs = mailbox.format.lay_out(stage.forward(microbatch, inputs))
            if received is not inputs:
                _save_as_received(stage.saved[microbatch], inputs, received)
            if stage.synthesizer is not None:
                stage.predict_gradient(microbatch, outputs)
            if stage.last:
                results.append(stage.compute_loss(microbatch, outputs, *mailbox.take_targets(microbatch)))
            else:
                mailbox.send_forward(action, outputs)
        elif action.kind is Kind.BACKWARD:
            above = None if stage.predicts else mailbox.take_backward(stage, microbatch)
            began = self._now()
            saved = stage.saved[microbatch]
            saved.inputs = [mailbox.unpack(stage, streams) for streams in saved.inputs]
            message = stage.backward(microbatch, above)
            if stage.index > 0:
                mailbox.send_backward(action, message)
        elif action.kind is Kind.LEARN:
            message = mailbox.take_backward(stage, microbatch)
            began = self._now()
            stage.train_synthesizer(message)
        elif self.clipping is not None:
            self.clipping.update(stage)
        else:
            stage.update()
        self.acting = None
        if self.clock is not None:
            self.clock(self._tick, action, asked, began, self._now())
        for observe in self.observers:
            observe(self._tick, action, stage)
        return results

    def _begin(self, action: Action) -> float:
        self.acting = action.stage
        what = f"{_WORDS[action.kind]} of micro-batch {action.microbatch} on stage {action.stage}"
        self.activity.now(what, self._start + self._tick)
        self.activity.set_up = True
        return self._now()

    def _now(self) -> float:
        if self.clock is not None and (device := self.stages[0].layers.settings.device).type == "cuda":
            torch.cuda.synchronize(device)  # a traced action has happened, not only been launched
        return time.perf_counter()

    def advance(self, shapes: Shapes, actions: Sequence[Action]) -> None:
        """Do the host's part of a tick whose device work was launched as a captured graph.

        Args:
            shapes: The shapes and dtypes of the inputs of the micro-batch that was read.
            actions: The actions of the stages of this process, and the backwards of the first stage, in the tick; with
                micro-batches counted from the one that was read.
        """
        first = self.microbatches
        self._shapes[first] = shapes
        self._fed += 1
        self._tick += 1
        self.activity.now("between ticks")
        for stage in self.stages:
            if stage.stash is not None:
                stage.stash.advance()
        for action in actions:
            stage_here = self._owned.get(action.stage)
            if stage_here is not None:
                stage_here.advance(action, first)
            if action.stage == 0 and action.kind is Kind.BACKWARD:
                self._shapes.pop(first + action.microbatch)

    def has_part_in(self, action: Action) -> bool:
        """Return whether `advance` needs to know of an action.

        Args:
            action: The action.

        Returns:
            True if it changes what this process remembers.
        """
        return action.stage in self._owned or (action.stage == 0 and action.kind is Kind.BACKWARD)

    def host_state(self) -> Any:
        """Return everything that the host remembers between two ticks, without copying tensors.

        Returns:
            The argument of `load_host_state`.
        """
        parts: list[HasHostState] = [self.mailbox, *self.stages]
        return dict(self._shapes), self._fed, self._tick, [part.host_state() for part in parts]

    def load_host_state(self, state: Any) -> None:
        """Return to an earlier `host_state`, to undo a tick that did nothing on the device.

        Args:
            state: What `host_state` returned.
        """
        shapes, self._fed, self._tick, parts = state
        self._shapes, self._failure = dict(shapes), None
        owners: list[HasHostState] = [self.mailbox, *self.stages]
        for owner, own in zip(owners, parts, strict=True):
            owner.load_host_state(own)

    def state_dict(self) -> dict[str, Any]:
        """Return the executor's position in the schedule.

        Returns:
            The state without what is in flight, which `stage_state_dict` returns stage by stage.
        """
        if self.capture is not None:
            self.capture.synchronize()
        self._check_no_failure()
        norms = None if self.clipping is None else self.clipping.state_dict()
        position = {"start": self._start, "fed": self._fed, "tick": self._tick, "updates": self._updates}
        return {**position, "norms": norms}

    def stage_state_dict(self, stage: int) -> dict[str, Any]:
        """Return the messages that wait for a stage, and the shapes of the inputs in flight.

        Args:
            stage: The index of the stage.

        Returns:
            The state of the stage in flight.
        """
        shapes = {m: [(tuple(shape), dtype) for shape, dtype in shapes] for m, shapes in self._shapes.items()}
        norm = 0.0 if self.clipping is None else self.clipping.latest(stage)
        return {**self.mailbox.state_dict(stage), "shapes": shapes, "norm": norm}

    def load_state_dict(self, state: dict[str, Any], stages: Mapping[int, dict[str, Any]]) -> None:
        """Continue where a state was taken.

        Args:
            state: What `state_dict` returned.
            stages: What `stage_state_dict` returned for each stage, with tensors on the device; empty if drained.
        """
        self._failure = None
        if self.clipping is not None:
            latest = {index: float(own.get("norm", 0.0)) for index, own in stages.items()}
            drained = not all("norm" in own for own in stages.values())
            self.clipping.load_state_dict(None if drained else state["norms"], latest)
        self._begin_at(state["start"], state["updates"])
        self._fed, self._tick = state["fed"], state["tick"]
        # Shares of replicas may differ in size, so each replica has shapes of its own.
        saved = stages[self.stages[0].index]["shapes"]
        self._shapes = {m: tuple((torch.Size(s), d) for s, d in shapes) for m, shapes in saved.items()}
        for stage in self.stages:
            self.mailbox.load_state_dict(stage.index, stages[stage.index])
        if self.capture is not None:
            self.capture.reset()


class Uninterrupted:
    """A context for a whole tick; a class, because it is faster than a generator.

    Args:
        executor: The executor of the tick.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def __enter__(self) -> None:
        self._executor.begin_uninterrupted()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self._executor.fail(error)


def _save_as_received(saved: SavedState, inputs: Streams, received: Streams) -> None:
    """Save the stage's own inputs in the dtype of messages, which takes half the memory of float32."""
    sent = {id(x): r for x, r in zip(inputs, received, strict=True)}
    saved.inputs = [tuple(sent.get(id(x), x) for x in streams) for streams in saved.inputs]
