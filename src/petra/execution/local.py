"""Carries a schedule out in one process, stage by stage, on one device."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from petra.execution.stage import Finished, Stage
from petra.execution.transport import Doing
from petra.methods import BackwardMessage
from petra.reversible.streams import Streams
from petra.schedule import Action, Kind, Order, Tick

Observer = Callable[[int, Action, Stage], None]
Announcement = Callable[[int, Tick], None]
Shapes = tuple[tuple[torch.Size, torch.dtype], ...]
Clock = Callable[[int, Action, float, float, float], None]


_WORDS = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.UPDATE: "update", Kind.LEARN: "learning"}


class LocalExecutor:
    """All stages in one process. Which stage does what, and when, is the order's word alone.

    Messages wait under the micro-batch they belong to until the schedule has them used, and nobody
    writes into a message, so a stream that is passed through may share its memory with the next.
    """

    def __init__(self, stages: Sequence[Stage], order: Order) -> None:
        self.stages = list(stages)
        self._owned = {stage.index: stage for stage in stages}
        self.order = order
        self.readers: list[Callable[[int], None]] = []
        """Called with the number of every micro-batch before it is read; they may begin or cease to observe."""
        self.observers: list[Observer] = []
        """Called after every action with the tick, the action and its stage; such ticks are not replayed."""
        self.announcements: list[Announcement] = []
        """Called before every tick with the micro-batch that counts as 0 in it and what will happen; () included."""
        self.acting: int | None = None
        """The stage that is at work."""
        self.ups: list[dict[int, Streams]] = [{} for _ in range(order.stages)]
        """For each stage, the inputs that wait for it."""
        self.downs: list[dict[int, BackwardMessage]] = [{} for _ in range(order.stages)]
        """For each stage, what has come back from the stage above."""
        self.targets: dict[int, tuple[Any, float]] = {}
        """For the last stage, each micro-batch's targets and its weight in the mean gradient."""
        self.doing = Doing()
        self.clock: Clock | None = None
        """Told when each action asked for its message, began and ended."""
        self.refusal: str | None = None
        """Why ticks are not replayed, where they could be but for this."""
        self._start = 0  # the first micro-batch since the pipeline was last empty
        self._fed = 0  # how many have been read since
        self._tick = 0  # how many ticks have passed since
        self._shapes: dict[int, Shapes] = {}  # inputs of micro-batches in flight
        self._halted: str | None = None  # what stopped a tick half-way

    @property
    def microbatches(self) -> int:
        """How many micro-batches have been read in all."""
        return self._start + self._fed

    @property
    def in_flight(self) -> bool:
        """Whether a micro-batch is somewhere in the pipeline, or in a gradient that waits for its update."""
        return self._fed > 0

    def tick(self, inputs: Streams, targets: Any, weight: float = 1.0) -> list[Finished]:
        """Read one micro-batch and let every stage do what the order has it do; what reached the loss."""
        for ask in self.readers:
            ask(self.microbatches)
        for stage in self.stages:
            stage.see_rate()
        return self._step(inputs, targets, weight)

    def _step(self, inputs: Streams, targets: Any, weight: float) -> list[Finished]:
        with self._whole():
            self._shapes[self.microbatches] = tuple((x.shape, x.dtype) for x in inputs)
            self._read(inputs, targets, weight)
            self._fed += 1
            finished = self._perform(self.order.tick(self._tick, self._fed))
            self._tick += 1
        return finished

    def drain(self) -> list[Finished]:
        """Finish what is in flight and update with what is left; the next tick fills the pipeline anew."""
        finished = []
        for stage in self.stages:
            stage.see_rate()
        with self._whole():
            for tick in range(self._tick, self.order.ticks(self._fed)):
                self._tick = tick
                finished += self._perform(self.order.tick(tick, self._fed))
            finished += self._perform(self.order.closing(self._fed))
            self._start, self._fed, self._tick = self.microbatches, 0, 0
            assert not any((*self.ups, *self.downs, self.targets, *(stage.kept for stage in self.stages)))
        return finished

    def _read(self, inputs: Streams, targets: Any, weight: float) -> None:
        self.ups[0][self.microbatches] = inputs
        self.targets[self.microbatches] = targets, weight

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """A tick is done whole; once one has stopped half-way, only a checkpoint helps."""
        self._refuse_if_halted()
        if torch.is_inference_mode_enabled():
            raise RuntimeError("nothing can be trained in torch.inference_mode(): leave it before the step")
        settings = self.stages[0].chain.settings
        device = settings.device.type
        if settings.autocast is None and device != "meta" and torch.is_autocast_enabled(device):
            raise RuntimeError(
                "torch.autocast around a step has no effect, for layers are also computed at other times: "
                "make the trainer with autocast=torch.bfloat16 instead"
            )
        try:
            yield
        except BaseException as error:
            self._halted = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
            raise

    def _refuse_if_halted(self) -> None:
        if self._halted is not None:
            raise RuntimeError(
                f"an earlier tick stopped half-way ({self._halted}), so what is in flight is incomplete: "
                "load a state of before it, or make a new trainer from the weights"
            )

    def predict(self, inputs: Streams) -> Streams:
        """Outputs of the network in evaluation mode, with the weights of this moment."""
        for stage in self.stages:
            inputs = stage.predict(inputs)
        return inputs

    def _perform(self, tick: Tick) -> list[Finished]:
        finished = []
        for announce in self.announcements:
            announce(self._start, tick)
        for phase in tick:
            for action in phase:
                if action.microbatch < 0 and self._start > 0:
                    continue  # zero features come before the first micro-batch of all, not of every filling
                if action.stage in self._owned:
                    finished += self._act(action)
                else:
                    self._hear(action)
                if action.kind is Kind.BACKWARD and action.stage == 0:  # it has left the pipeline
                    self._shapes.pop(self._start + action.microbatch)
        self.doing.now("between ticks")
        return finished

    def _hear(self, action: Action) -> None:
        """A stage of another rank does something."""

    def _act(self, action: Action) -> list[Finished]:
        stage = self._owned[action.stage]
        microbatch = self._start + action.microbatch
        action = Action(stage.index, action.kind, microbatch)
        asked = began = self._begin(action)
        finished = []
        if action.kind is Kind.FORWARD:
            inputs = self._take_up(stage.index, microbatch)
            began = self._now()
            outputs = stage.forward(microbatch, inputs)
            if stage.last:
                finished.append(stage.finish(microbatch, outputs, *self.targets.pop(microbatch)))
            else:
                self._send_up(action, outputs)
        elif action.kind is Kind.BACKWARD:
            above = None if stage.predicts else self._take_down(stage.index, microbatch)
            began = self._now()
            message = stage.backward(microbatch, above)
            if stage.index > 0:
                self._send_down(action, message)
        elif action.kind is Kind.LEARN:
            above = self._take_down(stage.index, microbatch)
            began = self._now()
            stage.learn(above)
        else:
            stage.update()
        self.acting = None
        if self.clock is not None:
            self.clock(self._tick, action, asked, began, self._now())
        for observe in self.observers:
            observe(self._tick, action, stage)
        return finished

    def _begin(self, action: Action) -> float:
        self.acting = action.stage
        what = f"{_WORDS[action.kind]} of micro-batch {action.microbatch} on stage {action.stage}"
        self.doing.now(what, self._start + self._tick)
        self.doing.set_up = True
        return self._now()

    def _now(self) -> float:
        if self.clock is not None and (device := self.stages[0].chain.settings.device).type == "cuda":
            torch.cuda.synchronize(device)  # a traced action has happened, not only been launched
        return time.perf_counter()

    def _take_up(self, stage: int, microbatch: int) -> Streams:
        return self.ups[stage].pop(microbatch)

    def _send_up(self, action: Action, streams: Streams) -> None:
        self.ups[action.stage + 1][action.microbatch] = streams

    def _take_down(self, stage: int, microbatch: int) -> BackwardMessage:
        return self.downs[stage].pop(microbatch)

    def _send_down(self, action: Action, message: BackwardMessage) -> None:
        self.downs[action.stage - 1][action.microbatch] = message

    def messages(self, stage: int) -> list[Tensor]:
        """The tensors that wait for a stage; for the first, that is data."""
        ups = [x for streams in self.ups[stage].values() for x in streams]
        downs = [x for m in self.downs[stage].values() for x in (*(m.streams or ()), *m.gradients)]
        return [x for x in (*ups, *downs) if x is not None]

    def state_dict(self) -> dict[str, Any]:
        """Where in the schedule the executor is."""
        self._refuse_if_halted()
        return {"start": self._start, "fed": self._fed, "tick": self._tick, "shapes": self._plain_shapes()}

    def _plain_shapes(self) -> dict[int, list[tuple[tuple[int, ...], torch.dtype]]]:
        return {m: [(tuple(shape), dtype) for shape, dtype in shapes] for m, shapes in self._shapes.items()}

    def waiting(self, stage: int) -> dict[str, Any]:
        """The messages that wait for a stage, and the shapes of inputs here; for the last one also the targets."""
        downs = {m: (d.streams, d.gradients) for m, d in self.downs[stage].items()}
        targets = dict(self.targets) if stage == self.order.stages - 1 else {}
        return {"ups": dict(self.ups[stage]), "downs": downs, "targets": targets, "shapes": self._plain_shapes()}

    def load_state_dict(self, state: dict[str, Any], waiting: Mapping[int, dict[str, Any]]) -> None:
        """Continue where ``state`` and ``waiting``, of each stage here, were taken; tensors are on the device."""
        self._halted = None
        self._start, self._fed, self._tick = state["start"], state["fed"], state["tick"]
        # Shares of replicas may differ in size; older states have the shapes of one replica only.
        saved = waiting[self.stages[0].index].get("shapes", state["shapes"])
        self._shapes = {m: tuple((torch.Size(s), d) for s, d in shapes) for m, shapes in saved.items()}
        for stage in self.stages:
            messages = waiting[stage.index]
            self.ups[stage.index] = dict(messages["ups"])
            self.downs[stage.index] = {m: BackwardMessage(*d) for m, d in messages["downs"].items()}
            if stage.last:
                self.targets = dict(messages["targets"])
