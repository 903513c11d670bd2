"""The layers of a stage as functions of streams, weights and micro-batch: evaluate, record, reverse.

All evaluations of a micro-batch draw the same random numbers and run under the same autocast state. Exactly one of them
updates running statistics: the one that records a graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from petra.methods.buffer_guard import BufferGuard
from petra.methods.segment import LayerError, Segment
from petra.methods.tape import Aliases, Tape
from petra.reversible.coupling import AdditiveCoupling, Coupling
from petra.reversible.gradients import ParameterGradients, Reversal, add_gradients, trainable, vjp
from petra.reversible.graph_leaks import GraphLeaks, leak_message
from petra.reversible.layer import ReversibleLayer
from petra.reversible.module_state import frozen_statistics, normalisations, submodules
from petra.reversible.network import segments
from petra.reversible.randomness import derived_seed, forked, random_state, seed_generators
from petra.reversible.rearrange import Rearrangement
from petra.reversible.reverse_pass import reverse_pass
from petra.reversible.streams import Gradients, Streams, autocasting, leaves


@dataclass(frozen=True)
class Settings:
    """Settings for the evaluation of layers."""

    device: torch.device
    """The device that the layers are on."""
    seed: int = 0
    """The seed of the training run."""
    autocast: torch.dtype | None = None
    """The dtype of `torch.autocast`; None disables it."""
    replica: int = 0
    """The index of the data-parallel replica."""

    @property
    def replica_seed(self) -> int:
        """The seed of random layers such as dropout, which differs between replicas."""
        return self.seed if self.replica == 0 else derived_seed(self.seed, self.replica)


class StageLayers:
    """The layers of one stage.

    Args:
        layers: The layers.
        first: The index of the first of them in the network.
        settings: Settings for their evaluation.
        next_layer: The layer that takes the outputs, where a method needs to know it.
    """

    def __init__(
        self, layers: Sequence[nn.Module], first: int, settings: Settings, next_layer: nn.Module | None = None
    ) -> None:
        self.layers = tuple(layers)
        self.next_layer = next_layer
        self.settings = settings
        self.all_layers = Segment(False, self.layers, first)
        """All layers as one segment that is not reversed."""
        self.stop = first + len(self.layers)
        """The index of the layer after the last one."""
        self.segments: list[Segment] = []
        """The layers, split where their storage changes."""
        self.find_segments()
        self._norms = normalisations(self.layers)
        with_buffers = [m for m in self.modules() if m._buffers and m not in self._norms]
        self._buffer_guard = BufferGuard(self.layers, self.all_layers.first, with_buffers)
        self._checked_for_leaks: set[Segment] = set()
        self._aliased_ids: set[int] = set()  # ids of the parameters that aliases stand in for at the moment
        self.seeds_generators = True
        """True if generators are seeded for every evaluation; not needed if no layer draws random numbers."""
        self.detect_randomness = False
        """True if evaluations check whether a layer draws random numbers."""
        self.uses_randomness = False
        """True if a layer drew random numbers in an evaluation that checked it."""
        self._seeded: list[Tensor] | None = None  # generator states right after seeding

    def find_segments(self) -> None:
        """Split the layers by their storage, at the beginning and after it has changed."""
        self.segments.clear()
        first = self.all_layers.first
        for storage, segment in segments(self.layers):
            self.segments.append(Segment(storage == "reconstruct", tuple(segment), first, storage))
            first += len(segment)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.layers)

    def __getitem__(self, index: int) -> nn.Module:
        return self.layers[index]

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def is_additive_layer(self) -> bool:
        """True if the stage is a single additive or non-reversible layer."""
        couplings = self.layers[0].couplings() if isinstance(self.layers[0], ReversibleLayer) else ()
        return len(self.layers) == 1 and all(
            type(c) is AdditiveCoupling or isinstance(c, Rearrangement) for c in couplings
        )

    def parameters(self) -> list[nn.Parameter]:
        """Return all parameters of the stage.

        Returns:
            Each parameter once, including frozen ones.
        """
        return list(dict.fromkeys(p for layer in self.layers for p in layer.parameters()))

    def modules(self) -> list[nn.Module]:
        """Return all modules of the stage.

        Returns:
            The layers and their submodules, each once.
        """
        return submodules(self.layers)

    def evaluate(self, segment: Segment, streams: Streams, microbatch: int) -> Streams:
        """Compute outputs without a graph; running statistics do not change.

        Args:
            segment: The layers to evaluate.
            streams: The inputs.
            microbatch: The number of the micro-batch, from which random numbers are derived.

        Returns:
            The outputs.
        """
        with torch.no_grad(), self._evaluation(), frozen_statistics(self._norms), self._buffer_guard.watch(first=True):
            for part in segment.parts():
                self._seed(part.key, microbatch)
                streams = part(streams)
        return streams

    def prune_inputs(self, streams: Streams) -> Streams:
        """Replace inputs whose values no gradient depends on by placeholders that take no memory.

        A stage with a single additive coupling only adds to its target stream. Its gradients do not depend on the
        values of that stream.

        Args:
            streams: The inputs of the stage.

        Returns:
            The streams, with a zero of the same shape and stride 0 for each that is not needed.
        """
        functions = [part.function for part in self.all_layers.parts()]
        if len(functions) > 1 or not isinstance(functions[0], Coupling):
            return streams
        unread = functions[0].unread
        return tuple(x.new_zeros(()).expand_as(x) if i in unread else x for i, x in enumerate(streams))

    def predict(self, streams: Streams) -> Streams:
        """Compute outputs in evaluation mode, then restore the mode of every module.

        Args:
            streams: The inputs.

        Returns:
            The outputs.
        """
        training = [m for m in self.modules() if m.training]
        for module in training:
            module.training = False
        try:
            with torch.no_grad(), self._evaluation():
                for part in self.all_layers.parts():
                    streams = part(streams)
        finally:
            for module in training:
                module.training = True
        return streams

    def record(self, segment: Segment, streams: Streams, microbatch: int, update_statistics: bool = True) -> Tape:
        """Compute outputs with their autograd graph.

        Args:
            segment: The layers to evaluate.
            streams: The inputs.
            microbatch: The number of the micro-batch, from which random numbers are derived.
            update_statistics: True to update running statistics.

        Returns:
            The evaluation, ready for one backward.

        Raises:
            LayerError: A layer uses a tensor that it neither owns nor takes as an argument, so that gradients would be
                lost, or changes its buffers twice for the same micro-batch.
        """
        # The gradient of the network's input is not needed.
        inputs = streams = leaves(streams) if segment.first > 0 else tuple(x.detach() for x in streams)
        parameters = trainable(segment.layers)
        leaks = None if segment in self._checked_for_leaks else GraphLeaks((*inputs, *parameters))
        norms = [] if update_statistics else self._norms
        guard = self._buffer_guard.watch(update_statistics=update_statistics)
        with torch.enable_grad(), self._evaluation(), frozen_statistics(norms), guard:
            for part in segment.parts():
                self._seed(part.key, microbatch)
                streams = part(streams)
                leak = None if leaks is None else leaks.find_leak(streams)
                if leak is not None and id(leak) in self._aliased_ids:
                    raise LayerError(
                        f"{part.name} reads a parameter of shape {tuple(leak.shape)} from elsewhere than its module, "
                        "such as a list, so that a saved graph could not keep its value: read it as an attribute of "
                        "the module, or choose delayed"
                    )
                if leak is not None:
                    raise LayerError(leak_message(part.name, leak, self._parameter_name(leak)))
        self._checked_for_leaks.add(segment)
        return Tape(inputs, streams, parameters)

    def reverse(
        self, segment: Segment, streams: Streams, gradients: Gradients, microbatch: int, overlap: bool = False
    ) -> Reversal:
        """Compute inputs and gradients of a reversible segment from its outputs, one coupling after the other.

        Args:
            segment: A reversible segment.
            streams: Its outputs.
            gradients: The gradients of its outputs.
            microbatch: The number of the micro-batch.
            overlap: True to reconstruct each coupling concurrently with the gradient of the one above it.

        Returns:
            The reconstructed inputs, and the gradients of inputs and parameters.
        """
        parts = segment.parts()
        keys, couplings = [p.key for p in parts], [p.function for p in parts if isinstance(p.function, Coupling)]
        with self._evaluation(), self._buffer_guard.watch():
            found = reverse_pass(
                couplings, leaves(streams), gradients, lambda i: self._seed(keys[i], microbatch), overlap
            )
        return found._replace(inputs=tuple(x.detach() for x in found.inputs))

    def reverse_with_weights(
        self,
        weights: Sequence[Tensor],
        segment: Segment,
        streams: Streams,
        gradients: Gradients,
        microbatch: int,
    ) -> Reversal:
        """Reconstruct inputs with the current weights, but compute gradients with other weights.

        Args:
            weights: The weights for the gradients, one for each of `parameters()`.
            segment: A reversible segment.
            streams: Its outputs.
            gradients: The gradients of its outputs.
            microbatch: The number of the micro-batch.

        Returns:
            The reconstructed inputs, and the gradients of inputs and parameters.
        """
        total: ParameterGradients = {}
        with self._evaluation():
            for part in reversed(segment.parts()):
                key, coupling = part.key, part.function
                assert isinstance(coupling, Coupling)
                self._seed(key, microbatch)
                with torch.no_grad(), frozen_statistics(self._norms):
                    streams = coupling.inverse(streams)
                inputs = leaves(streams)
                self._seed(key, microbatch)
                with self.using(weights), torch.enable_grad():
                    outputs = coupling.forward(inputs)
                    _, gradients, found = vjp(outputs, inputs, trainable(coupling.modules), gradients)
                add_gradients(total, found)
        return Reversal(streams, gradients, total)

    @contextmanager
    def using(self, weights: Sequence[Tensor] | None) -> Iterator[None]:
        """Give the parameters other values inside a `with` block.

        Args:
            weights: A value for each of `parameters()`; None keeps the current ones.
        """
        if weights is None:
            yield
            return
        parameters = self.parameters()
        current = [p.data for p in parameters]
        for parameter, value in zip(parameters, weights, strict=True):
            parameter.data = value
        try:
            yield
        finally:
            for parameter, value in zip(parameters, current, strict=True):
                parameter.data = value

    @contextmanager
    def aliased(self, aliases: Aliases | None = None) -> Iterator[Aliases]:
        """Replace the parameters by aliases inside a `with` block, so that a graph recorded there survives an update.

        Autograd rejects a graph whose weights were overwritten since it was recorded. Aliases share the memory of the
        parameters but not their version counter. Whoever updates the weights has to move them to other memory first.

        Args:
            aliases: The aliases of an earlier block to use again; None creates new ones.

        Yields:
            The aliases in use.
        """
        originals = [(module._parameters, dict(module._parameters)) for module in self.modules()]
        if aliases is None:
            aliases = {p: nn.Parameter(p.data, p.requires_grad) for p in self.parameters()}
        for registered, parameters in originals:
            registered.update({name: aliases[p] for name, p in parameters.items() if p is not None})
        self._aliased_ids = {id(p) for p in aliases}
        try:
            yield aliases
        finally:
            self._aliased_ids = set()
            for registered, parameters in originals:
                registered.update(parameters)

    @contextmanager
    def _evaluation(self) -> Iterator[None]:
        """Set up random generators, autocast and norms for an evaluation."""
        device = self.settings.device
        random = forked(device) if self.seeds_generators else nullcontext()
        # On "meta", batch norm with momentum=None cannot compute a cumulative average: the count has no value.
        norms = self._norms if device.type == "meta" else ()
        with random, autocasting(device, self.settings.autocast), frozen_statistics(norms):
            yield
            self._detect_draws()

    def _seed(self, key: tuple[int, int], microbatch: int) -> None:
        """Seed the generators for one part and micro-batch."""
        if not self.seeds_generators:
            return
        self._detect_draws()
        seed_generators(self.settings.device, derived_seed(self.settings.replica_seed, *key, microbatch))
        if self.detect_randomness:
            self._seeded = random_state(self.settings.device)

    def _detect_draws(self) -> None:
        """Set `has_drawn` if random numbers were drawn since the generators were last seeded."""
        if self._seeded is not None:
            now = random_state(self.settings.device)
            self.uses_randomness |= any(not a.equal(b) for a, b in zip(self._seeded, now, strict=True))
            self._seeded = None

    def _parameter_name(self, tensor: Tensor) -> str | None:
        """Return the name of a parameter of the stage in the network."""
        named = (
            (f"{i}.{name}", p)
            for i, x in enumerate(self.layers, self.all_layers.first)
            for name, p in x.named_parameters()
        )
        return next((name for name, p in named if p is tensor), None)
