"""One stage of a pipeline. It does not know its neighbours.

The executor calls `forward`, `backward` and `update` in the order of the schedule and carries the messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from petra.corrections import PeakLearningRates, StageCorrections, scaled_learning_rates
from petra.methods import BackwardMessage, Method, SavedState, StageLayers, Synthesizer
from petra.optim import CapturableOptimizer, optimizers_of
from petra.pipeline.accumulation import accumulate, set_zero_gradients
from petra.pipeline.results import MicrobatchResult, check_finite, check_loss, evaluate_loss
from petra.pipeline.weight_average import WeightAverage
from petra.pipeline.weight_stash import WeightStash
from petra.reversible.gradients import vjp
from petra.reversible.streams import Streams, leaves, plain_parts, single
from petra.schedule import Action, Kind

Loss = Callable[[Any, Any], Tensor]
"""A function of outputs and targets."""


class Stage:
    """One stage of a pipeline: its layers, what it saves between forward and backward, its gradients, its optimizer.

    Args:
        index: Its place in the pipeline, counted from 0.
        count: The number of stages.
        layers: Its layers.
        method: The training method.
        optimizer: The optimizer of its parameters; None if all are frozen.
        scheduler: The learning-rate scheduler of the optimizer, stepped after every update.
        loss: The loss, on the last stage.
        clip_norm: The largest norm of the stage's gradient; None does not clip.
        sends_streams: Whether the stage below needs its outputs back.
        average: Replaces tensors by their mean over the replicas of the stage.
        corrections: The corrections of staleness; None where nothing is stale.
        peak_lrs: The highest learning rates so far, where a correction may ask for them, here or at another cut.
        synthesizer: Predicts the gradient of the outputs, if the stage does not wait for it.
    """

    def __init__(
        self,
        index: int,
        count: int,
        layers: StageLayers,
        method: Method,
        optimizer: torch.optim.Optimizer | None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        loss: Loss | None = None,
        clip_norm: float | None = None,
        sends_streams: bool = True,
        average: Callable[[Sequence[Tensor]], None] | None = None,
        corrections: StageCorrections | None = None,
        peak_lrs: PeakLearningRates | None = None,
        synthesizer: Synthesizer | None = None,
    ) -> None:
        self.index = index
        self.last = index == count - 1
        self.layers = layers
        self.method = method
        self.optimizer = optimizer
        for one in optimizers_of(optimizer):
            if isinstance(one, CapturableOptimizer):
                one.refreshes_itself = False  # `finish_update` does it, outside of captured graphs
        self.scheduler = scheduler
        self.loss = loss
        self.clip_norm = clip_norm
        self.parameters = layers.parameters()
        self.needs_outputs = method.needs_outputs(layers)
        self.sends_streams = sends_streams
        self.average = average
        self.corrections = corrections
        self.peak_lrs = peak_lrs
        self.synthesizer = synthesizer
        self.ema: WeightAverage | None = None
        """The moving average of the weights, where there is one."""
        self.free_gradients = False
        """True if gradients are freed after each update."""
        self.saved: dict[int, SavedState] = {}
        """The saved state of each micro-batch between its forward and its backward."""
        self.stash = WeightStash(self.parameters, method.saves_graphs) if method.stashes_weights else None
        self.updates = 0
        self.accumulated = 0
        """Backwards since the last update."""
        self.capturing = False
        """True if the work is being captured: the host may neither read device values nor change its own state."""
        self._output_gradients: dict[int, BackwardMessage] = {}  # of the loss, or predicted
        self._sums: dict[Tensor, Tensor] = {}  # gradients that only this stage refers to
        self._loss_checked = False
        predicted = index > 0 and method.synthesizer(layers) is not None  # so stages below do not wait for a loss
        self._if_lost = "stages below were updated with predicted gradients" if predicted else "no weights were updated"

    @property
    def predicts(self) -> bool:
        """True if the backward needs no message: gradients come from the loss or from a prediction."""
        return self.last or self.synthesizer is not None

    def accepts(self, dtype: torch.dtype | None) -> bool:
        """Return whether the stage can compute with streams of this dtype without converting them to float32.

        Args:
            dtype: The dtype of messages; None for float32.

        Returns:
            True for a single additive layer that autocasts to the dtype anyway: one sum is rounded once, to be sent.
            Fixed point, and couplings of several operations, need float32.
        """
        return dtype == self.layers.settings.autocast and self.layers.is_additive_layer and self.synthesizer is None

    def forward(self, microbatch: int, inputs: Streams) -> Streams:
        """Compute the outputs of the stage, and save what the backward will need.

        Args:
            microbatch: The number of the micro-batch.
            inputs: The streams from the stage below, or the data.

        Returns:
            The output streams.
        """
        delay, weights = 0, None
        if self.corrections is not None:
            delay, weights = self.corrections.before_forward(microbatch, self.accumulated)
        with self.layers.using(weights):
            outputs, self.saved[microbatch] = self.method.forward(self.layers, microbatch, inputs, self.last)
        if self.stash is not None and self.corrections is not None and weights is not None:
            self.stash.keep_predicted(microbatch, delay, weights, self.corrections.prediction_settings())
        elif self.stash is not None:
            self.stash.keep(microbatch)
        return outputs

    def predict_gradient(self, microbatch: int, outputs: Streams) -> None:
        """Predict the gradient of the outputs for `backward` (DNI).

        Args:
            microbatch: The number of the micro-batch.
            outputs: The outputs of its forward.
        """
        assert self.synthesizer is not None
        self._output_gradients[microbatch] = BackwardMessage(None, self.synthesizer.predict(outputs))

    def compute_loss(self, microbatch: int, outputs: Streams, targets: Any, weight: float = 1.0) -> MicrobatchResult:
        """On the last stage: compute the loss, and its gradient for `backward` (Alg. 1, lines 28-29).

        Args:
            microbatch: The number of the micro-batch.
            outputs: The outputs of its forward.
            targets: The targets of the loss.
            weight: The weight of the gradient.

        Returns:
            The loss with outputs and targets.

        Raises:
            NonFiniteLoss: If the loss is NaN or infinite.
            ValueError: If the loss is not one number that depends on the outputs alone.
        """
        assert self.loss is not None
        leaf = leaves(outputs)
        with torch.enable_grad():
            loss = evaluate_loss(self.loss, single(leaf), targets)
        if not self._loss_checked:
            check_loss(loss, leaf)
            self._loss_checked = True
        if not loss.is_meta and not self.capturing:
            check_finite(loss.detach(), microbatch, self.index, self._if_lost)
        gradients = vjp((loss,), leaf, [], (torch.full_like(loss, weight),)).gradients
        streams = outputs if self.needs_outputs else None
        self._output_gradients[microbatch] = BackwardMessage(streams, gradients)
        return MicrobatchResult(microbatch, loss.detach(), single(outputs), targets, weight)

    def backward(self, microbatch: int, message: BackwardMessage | None) -> BackwardMessage:
        """Compute the gradients of inputs and parameters, and accumulate those of parameters.

        Args:
            microbatch: The number of the micro-batch.
            message: The message from the stage above; None where the gradient comes from the loss or a prediction.

        Returns:
            The message for the stage below.
        """
        if message is None:
            message = self._output_gradients.pop(microbatch)
        saved = self.saved.pop(microbatch)
        if self.stash is not None:
            saved.weights = self.stash.take(microbatch)
        weights = None if self.corrections is None else self.corrections.before_backward(microbatch)
        with self.layers.using(weights):
            inputs, gradients, parameters = self.method.backward(self.layers, microbatch, saved, message)
        if self.accumulated == 0:
            self._clear_gradients()
        accumulate(parameters, (*message.gradients, *gradients), self._sums)
        self.accumulated += 1
        return BackwardMessage(inputs if self.sends_streams else None, gradients)

    def _clear_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def train_synthesizer(self, message: BackwardMessage) -> None:
        """Train the synthesizer with the gradient that the stage above has computed (DNI).

        Args:
            message: The message from the stage above.
        """
        assert self.synthesizer is not None
        self.synthesizer.learn(message.gradients, self.average)

    def update(self) -> None:
        """Update the weights with the mean of the gradients since the last update (Alg. 1, lines 20-22).

        Unless `free_gradients` is set, gradients stay readable until the next backward, as the optimizer leaves them.
        """
        self.prepare_update()
        self.clip_and_update()

    def finish_averaged_update(self) -> None:
        """Finish an update whose gradients have been averaged over the replicas."""
        if self.corrections is not None:
            self.corrections.change_gradients()
        self.clip_and_update()

    def clip_and_update(self) -> None:
        """Update the weights with the gradients, after clipping them."""
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.clip_norm)
        self.apply_update()

    def prepare_update(self) -> None:
        """Compute the mean of the gradients since the last update, over all replicas, before it is clipped."""
        self.average_microbatches()
        if self.average is not None:
            self.average_over_replicas()
        if self.corrections is not None:
            self.corrections.change_gradients()

    def average_microbatches(self) -> None:
        """Compute the mean of the gradients since the last update."""
        if self.accumulated == 0:  # zero features (Features Replay, Section 3.2) have a gradient of zero
            set_zero_gradients(self.parameters, self.layers.modules())
            if self.corrections is not None:
                self.corrections.count_zero_gradient_update()
        elif self.accumulated > 1:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad / self.accumulated
        self._sums.clear()
        self.accumulated = 0

    def apply_update(self) -> None:
        """Update the weights with the gradients."""
        if self.stash is not None:
            self.stash.before_update()
        if self.corrections is not None:
            self.corrections.step()
        elif self.optimizer is not None:
            with scaled_learning_rates(self.optimizer):
                self.optimizer.step()
        if self.ema is not None:
            self.ema.update()
        if not self.capturing:
            self.finish_update()
        self.updates += 1

    def finish_update(self) -> None:
        """Do what follows an update and is never captured: refresh the optimizer, and step the scheduler."""
        for optimizer in optimizers_of(self.optimizer):
            if isinstance(optimizer, CapturableOptimizer):
                optimizer.refresh()
        self.step_scheduler()
        if self.free_gradients:
            self._clear_gradients()

    def step_scheduler(self) -> None:
        """Step the learning-rate scheduler, which sets the learning rate of the next update."""
        if self.scheduler is not None:
            self.scheduler.step()
        self.observe_lr()

    def observe_lr(self) -> None:
        """Let corrections read the learning rate, which the caller may have changed."""
        if self.corrections is not None:
            self.corrections.observe_lr()
        elif self.peak_lrs is not None:
            self.peak_lrs.observe()

    def average_over_replicas(self) -> None:
        """Replace gradients and running statistics by their means over all replicas."""
        assert self.average is not None
        trained = [p for p in self.parameters if p.requires_grad]
        # A replica without a gradient contributes zero; a parameter without a gradient on any replica keeps None.
        has = [p.grad is not None for p in trained]
        there = torch.tensor(has, dtype=torch.float64, device=self.layers.settings.device)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in trained]
        # Graphs that wait for their backward hold statistics too, but do not read them, so .data is safe here.
        self.average([*gradients, *(b.data for b in self.statistics()), there])
        for parameter, gradient, some in zip(trained, gradients, there.tolist(), strict=True):
            parameter.grad = gradient if some else None

    def statistics(self) -> list[Tensor]:
        """Return the running statistics: buffers that training changes.

        Returns:
            The floating-point buffers.
        """
        return [b for b in self._buffers() if b.is_floating_point()]

    def predict(self, inputs: Streams) -> Streams:
        """Compute the outputs in evaluation mode; nothing is changed.

        Args:
            inputs: The streams from the stage below, or the data.

        Returns:
            The output streams.
        """
        return self.layers.predict(inputs)

    def advance(self, action: Action, first: int) -> None:
        """Do the host's part of an action whose device work was launched as a captured graph.

        Args:
            action: An action of this stage.
            first: The micro-batch that counts as 0 in it.
        """
        if self.corrections is not None:
            self.corrections.advance_counters(action.shifted(first))
        if action.kind is Kind.BACKWARD:
            self.accumulated += 1
        elif action.kind is Kind.UPDATE:
            self.accumulated = 0
            self.updates += 1
            self.finish_update()

    @contextmanager
    def capture_mode(self) -> Iterator[None]:
        """A context in which the work of the stage is captured: host values that change every tick are left out."""
        self.capturing, self.layers.seeds_generators = True, False
        if self.corrections is not None:
            self.corrections.context.lr_factor = 1.0  # the captured learning rate contains it
        try:
            yield
        finally:
            self.capturing, self.layers.seeds_generators = False, True
            if self.corrections is not None:
                self.corrections.update_lr_factor()

    def host_state(self) -> Any:
        """Return everything that the host remembers between two ticks, without copying tensors.

        Returns:
            The argument of `load_host_state`.
        """
        parts = [part.host_state() for part in self._parts()]
        saved = {microbatch: replace(state) for microbatch, state in self.saved.items()}
        gradients = dict(self._output_gradients)
        return saved, gradients, self.accumulated, self.updates, [p.grad for p in self.parameters], parts

    def load_host_state(self, state: Any) -> None:
        """Return to an earlier `host_state`, to undo a tick that did nothing on the device.

        Args:
            state: What `host_state` returned.
        """
        saved, gradients, self.accumulated, self.updates, parameter_gradients, parts = state
        self.saved = {microbatch: replace(own) for microbatch, own in saved.items()}
        self._output_gradients = dict(gradients)
        for parameter, gradient in zip(self.parameters, parameter_gradients, strict=True):
            parameter.grad = gradient
        for part, own in zip(self._parts(), parts, strict=True):
            part.load_host_state(own)

    def _parts(self) -> list[WeightStash | StageCorrections | Synthesizer]:
        return [part for part in (self.stash, self.corrections, self.synthesizer) if part is not None]

    def trained(self) -> list[Tensor]:
        """Return the tensors that training changes in place.

        Returns:
            Parameters, buffers and optimizer state.
        """
        return [*self.parameters, *self._buffers(), *self._states()]

    def _buffers(self) -> list[Tensor]:
        return [b for layer in self.layers for b in layer.buffers()]

    def _states(self) -> list[Tensor]:
        """Return the state of the optimizer and of the corrections, and averaged weights."""
        optimizer = self.optimizer.state.values() if self.optimizer is not None else ()
        averages = self.ema.averages if self.ema is not None else []
        stage_corrections = self.corrections.tensors() if self.corrections is not None else []
        return (
            [part for state in optimizer for v in state.values() if isinstance(v, Tensor) for part in plain_parts(v)]
            + stage_corrections
            + averages
        )

    def gradients(self) -> list[Tensor | None]:
        """Return the gradients of the parameters.

        Returns:
            The gradients being accumulated, or the mean that the last update used.
        """
        return [p.grad for p in self.parameters]

    def tensors_by_category(self) -> dict[str, list[Tensor]]:
        """Return the tensors that live in the stage between actions.

        Returns:
            The tensors by category, such as weights, optimizer and gradients.
        """
        return {
            "weights": [p.detach() for p in self.parameters] + self._buffers(),
            "optimizer": self._states(),
            "gradients": [g for g in self.gradients() if g is not None],
            "stashed weights": [w for copy in self.stash.copies.values() for w in copy] if self.stash else [],
            "inputs": [x for saved in self.saved.values() for streams in saved.inputs for x in streams],
            "graph": [x for saved in self.saved.values() for tape in saved.graphs for x in tape.tensors()],
            "synthesizer": self.synthesizer.tensors() if self.synthesizer is not None else [],
        }

    def waiting(self) -> list[Tensor]:
        """Return the gradients of the stage's outputs, from the loss or predicted, that wait for a backward.

        Returns:
            The gradients; none between ticks.
        """
        return [g for message in self._output_gradients.values() for g in message.gradients if g is not None]

    def in_flight_state_dict(self) -> dict[str, Any]:
        """Return what belongs to micro-batches in flight: saved inputs, and gradients being accumulated.

        Returns:
            A state for `load_in_flight_state_dict`.
        """
        assert not self._output_gradients
        return {
            "saved": {microbatch: _savable(saved) for microbatch, saved in self.saved.items()},
            "gradients": self.gradients(),
            "accumulated": self.accumulated,
        }

    def load_in_flight_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `in_flight_state_dict` returned.

        Args:
            state: The state, with tensors on the device.
        """
        self.saved = {microbatch: SavedState(inputs=list(inputs)) for microbatch, inputs in state["saved"].items()}
        self._output_gradients.clear()
        for parameter, gradient in zip(self.parameters, state["gradients"], strict=True):
            parameter.grad = gradient
        self.accumulated = state["accumulated"]


def _savable(saved: SavedState) -> list[Streams]:
    """Return the inputs from which a graph can be recomputed."""
    if saved.tape is None:
        return saved.inputs
    assert not saved.inputs
    return [tuple(x.detach() for x in saved.tape.inputs)]
