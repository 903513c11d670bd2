"""One stage: its layers, what it keeps, its gradients and its optimizer. Knows nothing of its neighbours.

Executors call `forward`, `backward` and `update` in the order of the schedule and carry the messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from petra.corrections import Corrected, Peaks, rates
from petra.execution.stash import WeightStash
from petra.methods import BackwardMessage, Chain, Kept, Method, Synthesizer
from petra.reversible.gradients import ParameterGradients, vjp
from petra.reversible.reach import Reach
from petra.reversible.streams import Gradients, Streams, laid_out_like, leaves, ordered, single, storage_id

T = TypeVar("T", Tensor, Tensor | None)

Loss = Callable[[Any, Any], Tensor]
"""Of outputs and targets."""

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Makes the optimizer of a stage from the parameters that are trained there."""


class Diverged(RuntimeError):
    """Training has gone to where numbers end."""


class NonFiniteLoss(Diverged):
    """The loss of a micro-batch is NaN or infinite; no weight has been updated with its gradient.

    Stages that predict their gradients have updated with those before there was a loss.
    """


@dataclass(frozen=True)
class Finished:
    """A micro-batch that has reached the loss."""

    microbatch: int
    loss: Tensor
    outputs: Any
    targets: Any
    weight: float = 1.0
    """Of its gradient in the mean over replicas; 0 for samples that only stand in for a share without any."""


def check_finite(loss: Tensor, microbatch: int, stage: int, consequence: str) -> None:
    """Raise `NonFiniteLoss` unless the loss is a number."""
    if not torch.isfinite(loss):
        raise NonFiniteLoss(
            f"the loss of micro-batch {microbatch} on stage {stage} is {float(loss)}: "
            f"look for NaN in the data, or lower the learning rate; {consequence}"
        )


def _check_loss(loss: Tensor, outputs: Streams) -> None:
    """Raise ValueError unless the gradients of all that the loss depends on go through the outputs."""
    if not loss.requires_grad:
        raise ValueError("the loss does not depend on the outputs of the network: does it detach them, or round them?")
    found = Reach(outputs).foreign((loss,))
    if found is not None:
        raise ValueError(
            f"the loss depends on a tensor of shape {tuple(found.shape)} other than through the network's outputs, "
            "so that its gradient would be lost: have a layer use it, or the optimizer (weight_decay), or detach it"
        )


class Stage:
    """Stage ``index`` of ``count``."""

    def __init__(
        self,
        index: int,
        count: int,
        chain: Chain,
        method: Method,
        optimizer: torch.optim.Optimizer | None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        loss: Loss | None = None,
        clip_norm: float | None = None,
        sends_streams: bool = True,
        message_dtype: torch.dtype | None = None,
        average: Callable[[Sequence[Tensor]], None] | None = None,
        corrected: Corrected | None = None,
        peaks: Peaks | None = None,
        synthesizer: Synthesizer | None = None,
        channels_last: bool = False,
    ) -> None:
        self.index = index
        self.last = index == count - 1
        self.chain = chain
        self.method = method
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.loss = loss
        self.clip_norm = clip_norm
        self.parameters = chain.parameters()
        self.needs_outputs = method.needs_outputs(chain)
        self.sends_streams = sends_streams
        """Whether the stage below needs its outputs back."""
        self.message_dtype = message_dtype
        """What float32 travels as to and from the neighbours; None for float32 itself."""
        # What a single layer computes in that precision anyway, it can be given like this: one sum is rounded once, to
        # be sent. Fixed point and couplings of several operations want float32.
        self._as_it_came = message_dtype == chain.settings.autocast and chain.adds and synthesizer is None
        self.average = average
        """Replaces tensors by their mean over the replicas of this stage."""
        self.corrected = corrected
        """What is done about staleness."""
        self.peaks = peaks
        """The highest learning rates so far, where corrections may ask for them, here or at another cut."""
        self.synthesizer = synthesizer
        """What predicts the gradient, if the stage does not wait for it."""
        self.channels_last = channels_last
        """How images lie in messages, in one process as on ranks, whatever layout layers leave them in."""
        self.kept: dict[int, Kept] = {}
        self.stash = WeightStash(self.parameters, method.keeps_graphs) if method.stashes_weights else None
        self.updates = 0
        self.accumulated = 0
        """Backwards since the last update."""
        self.recording = False
        """Whether what is done now will be repeated without the host: it may not read numbers or change its own."""
        self._above: dict[int, BackwardMessage] = {}  # gradients of the loss, or predicted
        self._loss_seen = False
        predicted = index > 0 and method.synthesizer(chain) is not None  # so stages below do not wait for a loss
        self._if_lost = "stages below were updated by predictions" if predicted else "no weight was updated with it"

    @property
    def predicts(self) -> bool:
        """Whether the backward needs no message: gradients come from the loss or from a prediction."""
        return self.last or self.synthesizer is not None

    def forward(self, microbatch: int, inputs: Streams) -> Streams:
        """Outputs of the stage; what its backward will need is kept."""
        packed, inputs = inputs, self._unpacked(inputs)
        delay, weights = 0, None
        if self.corrected is not None:
            delay, weights = self.corrected.before_forward(microbatch, self.accumulated)
        with self.chain.using(weights):
            outputs, kept = self.method.forward(self.chain, microbatch, inputs, self.last)
        if packed is not inputs:  # the stage's own inputs are kept as they came
            came = {id(x): p for x, p in zip(inputs, packed, strict=True)}
            kept.inputs = [tuple(came.get(id(x), x) for x in streams) for streams in kept.inputs]
        self.kept[microbatch] = kept
        if self.stash is not None and self.corrected is not None and weights is not None:
            self.stash.keep_predicted(microbatch, delay, weights, self.corrected.settings())
        elif self.stash is not None:
            self.stash.keep(microbatch)
        outputs = self._ordered(outputs)
        if self.synthesizer is not None:
            self._above[microbatch] = BackwardMessage(None, self.synthesizer.predict(outputs))
        return outputs if self.last else self._packed(outputs)

    def finish(self, microbatch: int, outputs: Streams, targets: Any, weight: float = 1.0) -> Finished:
        """On the last stage: the loss, and its gradient times ``weight`` for `backward` (Alg. 1, lines 28-29)."""
        assert self.loss is not None
        leaf = leaves(outputs)
        with torch.enable_grad():
            loss = self.loss(single(leaf), targets)
        if not isinstance(loss, Tensor):
            raise TypeError(f"the loss is of type {type(loss).__name__}: give one number, as a tensor")
        if loss.numel() != 1:
            raise ValueError(f"the loss is of shape {tuple(loss.shape)}: give one number, like the mean over samples")
        if not self._loss_seen:
            _check_loss(loss, leaf)
            self._loss_seen = True
        if not loss.is_meta and not self.recording:
            check_finite(loss.detach(), microbatch, self.index, self._if_lost)
        gradients = vjp((loss,), leaf, [], (torch.full_like(loss, weight),)).gradients
        streams = outputs if self.needs_outputs else None
        self._above[microbatch] = BackwardMessage(streams, gradients)
        return Finished(microbatch, loss.detach(), single(outputs), targets, weight)

    def backward(self, microbatch: int, message: BackwardMessage | None) -> BackwardMessage:
        """Take the message from above back to the stage's inputs; gradients of parameters are added up."""
        if message is None:
            message = self._above.pop(microbatch)
        elif self.message_dtype is not None:
            streams = None if message.streams is None else self._unpacked(message.streams)
            message = BackwardMessage(streams, self._unpacked(message.gradients))
        kept = self.kept.pop(microbatch)
        kept.inputs = [self._unpacked(streams) for streams in kept.inputs]
        if self.stash is not None:
            kept.weights = self.stash.take(microbatch)
        weights = None if self.corrected is None else self.corrected.before_backward(microbatch)
        with self.chain.using(weights):
            inputs, gradients, parameters = self.method.backward(self.chain, microbatch, kept, message)
        self._accumulate(parameters, (*message.gradients, *gradients))
        below = self._packed(self._ordered(inputs)) if self.sends_streams else None
        return BackwardMessage(below, self._packed(self._ordered(gradients)))

    def learn(self, message: BackwardMessage) -> None:
        """The gradient of the outputs has come from above after all: learn to predict it."""
        assert self.synthesizer is not None
        self.synthesizer.learn(self._unpacked(message.gradients), self.average)

    def _ordered(self, tensors: tuple[T, ...]) -> tuple[T, ...]:
        return tuple(None if t is None else ordered(t, self.channels_last) for t in tensors)

    def _packed(self, tensors: tuple[T, ...]) -> tuple[T, ...]:
        """As they travel."""
        if self.message_dtype is None:
            return tensors
        return tuple(t if t is None or t.dtype != torch.float32 else t.to(self.message_dtype) for t in tensors)

    def _unpacked(self, tensors: tuple[T, ...]) -> tuple[T, ...]:
        if self.message_dtype is None or self._as_it_came:
            return tensors
        return tuple(t if t is None or t.dtype != self.message_dtype else t.float() for t in tensors)

    def _accumulate(self, found: ParameterGradients, messages: Gradients) -> None:
        if self.accumulated == 0:
            for parameter in self.parameters:
                parameter.grad = None
        # A gradient may be the very tensor of a message or of another parameter (a bias that is added to a
        # stream, say). Optimizers and clipping write into gradients, so each parameter gets its own.
        taken = {storage_id(g) for g in messages if g is not None}
        for parameter, gradient in found.items():
            if not gradient.is_sparse:
                gradient = laid_out_like(gradient, parameter)
            if parameter.grad is not None:
                gradient = parameter.grad + gradient
            elif not gradient.is_sparse and storage_id(gradient) in taken:
                gradient = gradient.clone()
            if not gradient.is_sparse:
                taken.add(storage_id(gradient))
            parameter.grad = gradient
        self.accumulated += 1

    def update(self) -> None:
        """One step with the mean of the gradients since the last one (Alg. 1, lines 20-22).

        Gradients stay readable until the next backward, as the optimizer leaves them.
        """
        if self.accumulated == 0:  # zero features (Features Replay, Section 3.2) have a gradient of zero
            sparse = _sparse(self.chain.modules())
            for parameter in self.parameters:
                zero = _no_rows if parameter in sparse else torch.zeros_like
                parameter.grad = zero(parameter) if parameter.requires_grad else None
            if self.corrected is not None:
                self.corrected.skip()
        elif self.accumulated > 1:
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad / self.accumulated
        self.accumulated = 0
        if self.average is not None:
            self._average_over_replicas()
        if self.corrected is not None:
            self.corrected.change_gradients()
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.clip_norm)
        if self.stash is not None:
            self.stash.before_update()
        if self.corrected is not None:
            self.corrected.step()
        elif self.optimizer is not None:
            with rates(self.optimizer):
                self.optimizer.step()
        if not self.recording:
            self.schedule()
        self.updates += 1

    def schedule(self) -> None:
        """Set the learning rate of the next update."""
        if self.scheduler is not None:
            self.scheduler.step()
        self.see_rate()

    def see_rate(self) -> None:
        """Have corrections look at the learning rate, which someone may have set."""
        if self.corrected is not None:
            self.corrected.see_rate()
        elif self.peaks is not None:
            self.peaks.see()

    def _average_over_replicas(self) -> None:
        assert self.average is not None
        trained = [p for p in self.parameters if p.requires_grad]
        # A replica without a gradient takes part all the same; what none has a gradient for is left without.
        has = [p.grad is not None for p in trained]
        there = torch.tensor(has, dtype=torch.float64, device=self.chain.settings.device)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in trained]
        # Graphs that wait for their backward hold statistics too, but do not read them: they need not know of this.
        self.average([*gradients, *(b.data for b in self.statistics()), there])
        for parameter, gradient, some in zip(trained, gradients, there.tolist(), strict=True):
            parameter.grad = gradient if some else None

    def statistics(self) -> list[Tensor]:
        """Running statistics: buffers that training moves."""
        return [b for b in self._buffers() if b.is_floating_point()]

    def predict(self, inputs: Streams) -> Streams:
        """Outputs in evaluation mode; touches nothing."""
        outputs = self._ordered(self.chain.predict(self._unpacked(inputs)))
        return outputs if self.last else self._packed(outputs)

    def trained(self) -> list[Tensor]:
        """The tensors that training changes where they lie."""
        return [*self.parameters, *self._buffers(), *self._states()]

    def _buffers(self) -> list[Tensor]:
        return [b for layer in self.chain.layers for b in layer.buffers()]

    def _states(self) -> list[Tensor]:
        """Of the optimizer and of what corrects it."""
        optimizer = self.optimizer.state.values() if self.optimizer is not None else ()
        corrected = self.corrected.tensors() if self.corrected is not None else []
        return [v for state in optimizer for v in state.values() if isinstance(v, Tensor)] + corrected

    def gradients(self) -> list[Tensor | None]:
        """Gradients of the parameters: those being added up, or the mean that the last update used."""
        return [p.grad for p in self.parameters]

    def held(self) -> dict[str, list[Tensor]]:
        """The tensors that live in the stage between actions, by what they are for."""
        return {
            "weights": [p.detach() for p in self.parameters] + self._buffers(),
            "optimizer": self._states(),
            "gradients": [g for g in self.gradients() if g is not None],
            "stashed weights": [w for copy in self.stash.copies.values() for w in copy] if self.stash else [],
            "inputs": [x for kept in self.kept.values() for streams in kept.inputs for x in streams],
            "graph": [x for kept in self.kept.values() if kept.tape is not None for x in kept.tape.tensors()],
            "synthesizer": self.synthesizer.tensors() if self.synthesizer is not None else [],
        }

    def waiting(self) -> list[Tensor]:
        """Gradients at its own outputs, of the loss or predicted, that wait for a backward; none between ticks."""
        return [g for message in self._above.values() for g in message.gradients if g is not None]

    def in_flight(self) -> dict[str, Any]:
        """What belongs to micro-batches between two ticks: what is kept of them, and gradients being added up."""
        assert not self._above
        return {
            "kept": {microbatch: _savable(kept) for microbatch, kept in self.kept.items()},
            "gradients": self.gradients(),
            "accumulated": self.accumulated,
        }

    def load_in_flight(self, state: dict[str, Any]) -> None:
        """Take up what `in_flight` gave."""
        self.kept = {microbatch: Kept(inputs=list(inputs)) for microbatch, inputs in state["kept"].items()}
        self._above.clear()
        for parameter, gradient in zip(self.parameters, state["gradients"], strict=True):
            parameter.grad = gradient
        self.accumulated = state["accumulated"]


def _sparse(modules: Sequence[nn.Module]) -> set[Tensor]:
    """Parameters of embeddings alone that have sparse gradients, which is all that some optimizers take."""
    tables = [m for m in modules if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse]
    others = {p for m in modules if m not in tables for p in m._parameters.values() if p is not None}
    return {m.weight for m in tables} - others


def _no_rows(table: Tensor) -> Tensor:
    """A sparse gradient of zero."""
    indices, rows = table.new_zeros((1, 0), dtype=torch.long), table.new_zeros((0, *table.shape[1:]))
    return torch.sparse_coo_tensor(indices, rows, table.shape, check_invariants=True)


def _savable(kept: Kept) -> list[Streams]:
    """What a graph can be made from again."""
    if kept.tape is None:
        return kept.inputs
    assert not kept.inputs
    return [tuple(x.detach() for x in kept.tape.inputs)]
