"""A stage's layers as functions of streams, weights and micro-batch: evaluate, record, reverse.

Every evaluation of a micro-batch draws the same random numbers, runs under the same autocast state, and
of its evaluations exactly one counts for running statistics: the one that records a graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from petra.methods.segment import LayerError, Segment, version_of
from petra.reversible.coupling import Additive, Coupling
from petra.reversible.gradients import ParameterGradients, Reversal, add_gradients, saved_tensors, trainable, vjp
from petra.reversible.layer import ReversibleLayer
from petra.reversible.modules import submodules
from petra.reversible.network import runs
from petra.reversible.randomness import derived_seed, forked, random_state, seed_generators
from petra.reversible.reach import Reach, unreached
from petra.reversible.rearrange import Rearrangement
from petra.reversible.statistics import frozen_statistics, normalisations
from petra.reversible.streams import Gradients, Streams, autocasting, leaves
from petra.reversible.unwind import unwind

Aliases = dict[nn.Parameter, nn.Parameter]
"""Other parameters in the same memory, by those that they stand for."""


@dataclass(frozen=True)
class Settings:
    """How layers are evaluated."""

    device: torch.device
    seed: int = 0
    autocast: torch.dtype | None = None
    replica: int = 0

    @property
    def masks(self) -> int:
        """The seed of dropout masks: replicas drop out differently."""
        return self.seed if self.replica == 0 else derived_seed(self.seed, self.replica)


@dataclass(frozen=True)
class Tape:
    """A recorded evaluation, ready to be differentiated once."""

    inputs: Streams
    outputs: Streams
    parameters: list[nn.Parameter]
    aliases: Aliases | None = None
    """What stands for the parameters of the stage in the graph, if not they themselves."""

    def gradients(self, gradients: Gradients) -> Reversal:
        """Take the gradients of the outputs back to inputs and parameters."""
        try:
            return vjp(self.outputs, self.inputs, self.parameters, gradients)
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise LayerError(
                "a tensor that the graph of a micro-batch needs was written into before its backward: if a layer "
                "computes with a buffer that it changes in place, have it take a copy, like self.average.clone()"
            ) from error

    def tensors(self) -> list[Tensor]:
        """Everything that lives because of it: inputs, outputs, and what its graph has saved."""
        return [*self.inputs, *self.outputs, *saved_tensors(self.outputs)]


class Chain:
    """The layers of one stage; ``above`` is the one that takes what comes out, where that matters."""

    def __init__(
        self, layers: Sequence[nn.Module], first: int, settings: Settings, above: nn.Module | None = None
    ) -> None:
        self.layers = tuple(layers)
        self.above = above
        self.settings = settings
        self.whole = Segment(False, self.layers, first)
        self.segments: list[Segment] = []
        """The layers cut where reversible ones begin and end."""
        for reversible, run in runs(self.layers):
            self.segments.append(Segment(reversible, tuple(run), first))
            first += len(run)
        self.stop = first
        """The index of the first layer above."""
        self._norms = normalisations(self.layers)
        self._stateful = [m for m in self.modules() if m._buffers and m not in self._norms]
        self._changed: set[nn.Module] = set()
        self._looked_at: set[Segment] = set()
        self._replaced: set[int] = set()  # parameters that others take the place of for now, by their id
        self.draws = True
        """Whether random numbers are set for every evaluation; without need where nothing draws any."""
        self.watching = False
        """Whether it is noticed that a layer draws."""
        self.has_drawn = False
        self._seeded: list[Tensor] | None = None

    @property
    def adds(self) -> bool:
        """Whether it is one layer that does no more to its streams than to add to them, or no reversible one."""
        couplings = self.layers[0].couplings() if isinstance(self.layers[0], ReversibleLayer) else ()
        return len(self.layers) == 1 and all(type(c) is Additive or isinstance(c, Rearrangement) for c in couplings)

    def parameters(self) -> list[nn.Parameter]:
        """All parameters of the stage, each once."""
        return list(dict.fromkeys(p for layer in self.layers for p in layer.parameters()))

    def modules(self) -> list[nn.Module]:
        """All modules of the stage, each once."""
        return submodules(self.layers)

    def evaluate(self, segment: Segment, streams: Streams, microbatch: int) -> Streams:
        """Outputs alone: no graph, running statistics left as they are."""
        with torch.no_grad(), self._evaluation(), frozen_statistics(self._norms), self._counting_once(True):
            for part in segment.parts():
                self._seed(part.key, microbatch)
                streams = part(streams)
        return streams

    def essential(self, streams: Streams) -> Streams:
        """The inputs, with a placeholder that takes no memory for every stream whose values no gradient needs.

        A stage that is one additive coupling only adds to its target stream; its gradients do not depend on it.
        """
        parts = [part.what for part in self.whole.parts()]
        if len(parts) > 1 or not isinstance(parts[0], Coupling):
            return streams
        unread = parts[0].unread
        return tuple(x.new_zeros(()).expand_as(x) if i in unread else x for i, x in enumerate(streams))

    def predict(self, streams: Streams) -> Streams:
        """Outputs in evaluation mode; the layers are in the mode they were in before afterwards."""
        training = [m for m in self.modules() if m.training]
        for module in training:
            module.training = False
        try:
            with torch.no_grad(), self._evaluation():
                for part in self.whole.parts():
                    streams = part(streams)
        finally:
            for module in training:
                module.training = True
        return streams

    def record(self, segment: Segment, streams: Streams, microbatch: int, counts: bool = True) -> Tape:
        """Outputs with their graph; unless it ``counts``, running statistics are left as they are."""
        # Nobody wants the gradient of the data.
        inputs = streams = leaves(streams) if segment.first > 0 else tuple(x.detach() for x in streams)
        parameters = trainable(segment.layers)
        reach = None if segment in self._looked_at else Reach((*inputs, *parameters))
        norms = [] if counts else self._norms
        with torch.enable_grad(), self._evaluation(), frozen_statistics(norms), self._counting_once(counts=counts):
            for part in segment.parts():
                self._seed(part.key, microbatch)
                streams = part(streams)
                found = None if reach is None else reach.foreign(streams)
                if found is not None and id(found) in self._replaced:
                    raise LayerError(
                        f"{part.name} reads a parameter of shape {tuple(found.shape)} from elsewhere than its module, "
                        "like a list, so that a graph that waits could not keep its value: read it as an attribute of "
                        "the module, or choose delayed"
                    )
                if found is not None:
                    raise LayerError(unreached(part.name, found, self._called(found)))
        self._looked_at.add(segment)
        return Tape(inputs, streams, parameters)

    def reverse(
        self, segment: Segment, streams: Streams, gradients: Gradients, microbatch: int, overlap: bool = False
    ) -> Reversal:
        """Inputs and gradients from the outputs of a reversible segment, one coupling after the other.

        With ``overlap``, one is reconstructed beside the gradient of the one above it.
        """
        parts = segment.parts()
        keys, couplings = [part.key for part in parts], [p.what for p in parts if isinstance(p.what, Coupling)]
        with self._evaluation(), self._counting_once():
            found = unwind(couplings, leaves(streams), gradients, lambda i: self._seed(keys[i], microbatch), overlap)
        return found._replace(inputs=tuple(x.detach() for x in found.inputs))

    def reverse_with(
        self,
        weights: Sequence[Tensor],
        segment: Segment,
        streams: Streams,
        gradients: Gradients,
        microbatch: int,
    ) -> Reversal:
        """Like `reverse`, but only the inputs come from the current weights; gradients from ``weights``."""
        total: ParameterGradients = {}
        with self._evaluation():
            for part in reversed(segment.parts()):
                key, coupling = part.key, part.what
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
        """Inside, the parameters have other values; None stands for their own."""
        if weights is None:
            yield
            return
        parameters = self.parameters()
        own = [p.data for p in parameters]
        for parameter, value in zip(parameters, weights, strict=True):
            parameter.data = value
        try:
            yield
        finally:
            for parameter, value in zip(parameters, own, strict=True):
                parameter.data = value

    @contextmanager
    def aliased(self, aliases: Aliases | None = None) -> Iterator[Aliases]:
        """Inside, the layers have other parameters in the same memory: a graph made of them outlives an update.

        Autograd refuses a graph whose weights were written into since. Those here never are, if whoever updates
        moves the weights to other memory first. Given ``aliases`` of before are used again.
        """
        own = [(module._parameters, dict(module._parameters)) for module in self.modules()]
        if aliases is None:
            aliases = {p: nn.Parameter(p.data, p.requires_grad) for p in self.parameters()}
        for places, parameters in own:
            places.update({name: aliases[p] for name, p in parameters.items() if p is not None})
        self._replaced = {id(p) for p in aliases}
        try:
            yield aliases
        finally:
            self._replaced = set()
            for places, parameters in own:
                places.update(parameters)

    @contextmanager
    def _evaluation(self) -> Iterator[None]:
        device = self.settings.device
        random = forked(device) if self.draws else nullcontext()
        # On "meta" there is no count of batches to make a mean of all of them with.
        norms = self._norms if device.type == "meta" else ()
        with random, autocasting(device, self.settings.autocast), frozen_statistics(norms):
            yield
            self._notice()

    def _seed(self, key: tuple[int, int], microbatch: int) -> None:
        if not self.draws:
            return
        self._notice()
        seed_generators(self.settings.device, derived_seed(self.settings.masks, *key, microbatch))
        if self.watching:
            self._seeded = random_state(self.settings.device)

    @contextmanager
    def _counting_once(self, first: bool = False, counts: bool = True) -> Iterator[None]:
        """Raise if a layer changes its buffers again that did so in the ``first`` of two evaluations of a micro-batch.

        Those that begin with what they take from the first data and then keep may do so. In an evaluation that does not
        count, because another has or will, none may.
        """
        if not self._stateful:
            yield
            return
        held = [(m, name, b) for m in self._stateful for name, b in m._buffers.items() if b is not None]
        versions = [version_of(buffer) for _, _, buffer in held]
        yield
        changed = {
            module
            for (module, name, buffer), version in zip(held, versions, strict=True)
            if module._buffers.get(name) is not buffer or version_of(buffer) != version
        }
        for module in changed & self._changed if counts else changed:
            index, layer = next((i, x) for i, x in enumerate(self.layers, self.whole.first) if module in x.modules())
            why, instead = "this method runs it twice for each micro-batch", "train with backprop, gpipe or 1f1b"
            if not counts:
                why = "it is to run again, to measure gradients or for a graph that was in flight in a checkpoint"
                instead = "do not measure, and take checkpoints after drain()"
            raise LayerError(
                f"layer {index} ({type(layer).__name__}) changes a buffer of its {type(module).__name__} whenever it "
                f"runs, and {why}: leave that out, derive norms from those of torch.nn, or {instead}"
            )
        self._changed |= changed if first else set()

    def _called(self, tensor: Tensor) -> str | None:
        """What a parameter of the stage is called in the network."""
        named = (
            (f"{i}.{name}", p) for i, x in enumerate(self.layers, self.whole.first) for name, p in x.named_parameters()
        )
        return next((name for name, p in named if p is tensor), None)

    def _notice(self) -> None:
        """See whether anything was drawn since generators were seeded last."""
        if self._seeded is not None:
            now = random_state(self.settings.device)
            self.has_drawn |= any(not a.equal(b) for a, b in zip(self._seeded, now, strict=True))
            self._seeded = None
