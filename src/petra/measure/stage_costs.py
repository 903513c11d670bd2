"""The costs of the stages of a network for a simulation: counted on the meta device, or with times of `profile`."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from petra.measure.activations import storages
from petra.measure.profile import Profile
from petra.measure.stage_memory import nbytes
from petra.methods import Method, Settings
from petra.pipeline import ShapeInference, Stage, StageBuilder
from petra.pipeline.fast_meta import FastMetaOperations
from petra.pipeline.message_layout import Template, payload
from petra.pipeline.message_shapes import as_message, shapes_of
from petra.pipeline.optimizer_factory import OptimizerFactory, create_optimizer
from petra.pipeline.stage import Loss
from petra.reversible.streams import Streams, storage_id
from petra.simulation import StageCosts


class StageCounter:
    """Counts what the stages of a network compute, save and send, for any cut.

    A stage runs one micro-batch on the meta device. Counted are the floating-point operations of matrix
    multiplications, convolutions and attention, by the formulas of `torch.utils.flop_counter`.

    Args:
        layers: The layers of the network; they are copied.
        method: The method to train with.
        inputs: The inputs of a micro-batch; only shapes and dtypes matter.
        targets: The targets of a micro-batch.
        loss: The loss.
        optimizer: Creates an optimizer for a list of parameters.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        method: Method,
        inputs: Streams,
        targets: Any,
        *,
        loss: Loss,
        optimizer: OptimizerFactory,
    ) -> None:
        self.layers = [deepcopy(layer).to("meta") for layer in layers]
        self._optimizer = optimizer
        self._targets = torch.empty_like(targets, device="meta") if isinstance(targets, Tensor) else targets
        settings = Settings(torch.device("meta"))
        self._builder = StageBuilder(self.layers, method, settings, loss=loss, optimizer=self._create)
        singles = [range(i, i + 1) for i in range(len(layers))]
        self._shapes = ShapeInference(self.layers, singles, method).shapes(shapes_of(inputs))
        self._kinds = [self._kind(i) for i in range(len(layers))]
        self._counted: dict[Any, _Counts] = {}

    def costs(self, cut: range, flops_per_second: float) -> StageCosts:
        """Return the costs of a stage, whose seconds are its operations divided by the speed of a worker.

        Args:
            cut: The indices of its layers.
            flops_per_second: The floating-point operations of a worker per second.

        Returns:
            The costs. An update takes no time.
        """
        counts = self._count(cut)
        return replace(
            self._sizes(cut, counts),
            forward=counts.forward / flops_per_second,
            backward=counts.backward / flops_per_second,
        )

    def timed_costs(self, cut: range, profile: Profile) -> StageCosts:
        """Return the costs of a stage with measured times.

        Args:
            cut: The indices of its layers.
            profile: The times of the layers.

        Returns:
            The costs.
        """
        own = profile.stage(cut)
        sizes = self._sizes(cut, self._count(cut))
        return replace(sizes, forward=own.forward, backward=own.backward, update=own.update, learn=own.learn)

    def _sizes(self, cut: range, counts: _Counts) -> StageCosts:
        last = cut.stop == len(self.layers)
        return StageCosts(
            forward_bytes=0 if last else _size(self._shapes.forward[cut.stop]),
            backward_bytes=_size(self._shapes.backward[cut.start - 1]) if cut.start else 0,
            gradient_bytes=counts.gradients,
            resident_bytes=counts.resident,
            saved_bytes=counts.saved,
            working_bytes=counts.working,
        )

    def _kind(self, i: int) -> Any:
        """Return a value that is the same for layers with the same structure and shapes, which count the same."""
        parameters = [(name, p.shape, p.requires_grad) for name, p in self.layers[i].named_parameters()]
        messages = (*self._shapes.forward[i], *self._shapes.backward[i])
        shapes = [None if t is None else (t.shape, t.dtype) for t in messages]
        return repr(self.layers[i]), repr(parameters), repr(shapes)

    def _count(self, cut: range) -> _Counts:
        key = tuple(self._kinds[i] for i in cut), cut.start == 0, cut.stop == len(self.layers)
        if key not in self._counted:
            self._counted[key] = self._count_new(cut)
        return self._counted[key]

    def _count_new(self, cut: range) -> _Counts:
        count = len(self.layers)
        layers = [deepcopy(layer) if i in cut else layer for i, layer in enumerate(self.layers)]
        # Only whether a stage is the last one makes a difference.
        index = count - 1 if cut.stop == count else min(cut.start, count - 2)
        stage = replace(self._builder, layers=layers).build(index, count, cut)
        inputs = tuple(torch.empty_like(x) for x in self._shapes.forward[cut.start] if x is not None)
        graph, recomputed = _LiveTensors(stage), _LiveTensors(stage)
        with FastMetaOperations(), _Operations() as forward, graph:
            outputs = stage.forward(0, inputs)
            if stage.synthesizer is not None:
                stage.predict_gradient(0, outputs)
            if stage.last:
                stage.compute_loss(0, outputs, self._targets)
        categories = stage.tensors_by_category()
        weights = storages(stage.trained())
        saved = storages([*categories["inputs"], *categories["graph"]])
        saved_bytes = sum(storage.nbytes() for key, storage in saved.items() if key not in weights)
        message = None
        if not stage.predicts:
            template = self._shapes.backward[cut.stop - 1]
            tensors = tuple(None if t is None else torch.empty_like(t) for t in template)
            message = as_message(tensors, stage.needs_outputs)
        with FastMetaOperations(), _Operations() as backward, recomputed:
            stage.backward(0, message)
        stage.update()
        categories = stage.tensors_by_category()
        resident = sum(nbytes(categories[name]) for name in ("weights", "optimizer", "gradients", "synthesizer"))
        working = max(recomputed.peak, graph.peak - saved_bytes if stage.last else 0)
        return _Counts(
            forward.total,
            backward.total,
            saved_bytes,
            working,
            resident,
            nbytes(categories["gradients"]),
        )

    def _create(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer | None:
        trained = [p for p in parameters if p.requires_grad]
        return create_optimizer(self._optimizer, trained, {}) if trained else None


@dataclass(frozen=True)
class _Counts:
    """Floating-point operations and bytes of a stage."""

    forward: int
    backward: int
    saved: int
    working: int
    resident: int
    gradients: int


class _Operations(TorchDispatchMode):
    """Adds up floating-point operations. PyTorch's `FlopCounterMode` cannot be used with `torch.autograd.grad`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=result)
        return result


class _LiveTensors(torch.autograd.graph.saved_tensors_hooks):
    """The peak bytes of the tensors that autograd saves while it is entered, without weights."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(self._pack, _unpack)
        self._weights = storages(stage.trained()).keys()
        self._users: dict[int, int] = {}
        self._live = 0
        self.peak = 0

    def _pack(self, tensor: Tensor) -> list[Tensor]:
        key, size = storage_id(tensor), tensor.untyped_storage().nbytes()
        saved = _Saved([tensor.detach()])
        if key not in self._weights:
            self._users[key] = self._users.get(key, 0) + 1
            if self._users[key] == 1:
                self._live += size
                self.peak = max(self.peak, self._live)
            weakref.finalize(saved, self._release, key, size).atexit = False
        return saved

    def _release(self, key: int, size: int) -> None:
        self._users[key] -= 1
        if self._users[key] == 0:
            self._live -= size


class _Saved(list[Tensor]):
    """A tensor that autograd has saved; unlike a list, it can be watched."""


def _unpack(saved: list[Tensor]) -> Tensor:
    return saved[0]


def _size(message: Template) -> int:
    return payload([x for x in message if x is not None])
