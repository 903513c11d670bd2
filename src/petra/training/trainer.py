"""The trainer: a network, a method and a number of stages, driven one micro-batch at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from petra import methods
from petra.corrections import Correction
from petra.execution import (
    Alone,
    CapturedExecutor,
    Finished,
    LocalExecutor,
    RankExecutor,
    Rehearsal,
    Stage,
    Transport,
    partition,
)
from petra.execution.stage import Loss, OptimizerFactory
from petra.methods import Chain, Method, Settings
from petra.reversible.streams import Streams, as_streams, channels_last, single
from petra.schedule import Sequential
from petra.training import state as states
from petra.training.orders import choose_order
from petra.training.preparation import (
    SchedulerFactory,
    check_batch,
    check_device,
    check_network,
    check_parts,
    choose_corrections,
    device_of,
    make_corrected,
    make_optimizer,
    make_recorder,
    make_scheduler,
    place_stages,
    refuse_other_dtypes,
    refuse_sharing,
    refuse_unfrozen,
)
from petra.training.tally import Evaluation, Tally


class Trainer:
    """Trains ``network`` with ``method``, cut into ``stages``.

    ``network`` is an ``nn.Sequential`` or `petra.Network`; it is trained in place, its modules in the modes
    (``train()`` or ``eval()``) they are in. ``stages`` is their
    number, or the number of layers of each. ``optimizer`` makes one for the parameters of a stage that are not frozen,
    ``scheduler`` a learning-rate scheduler for it, stepped after every update of the stage. An update
    uses the mean gradient of ``accumulate`` micro-batches, clipped to ``clip_norm`` stage by stage.
    ``order`` is ``"low-staleness"``, ``"lock-step"``, ``"locked-forward"`` or the numbers of micro-batches in
    flight of the stages, for pipelined methods. ``autocast`` is the dtype of residual functions, and of sums in
    blocks of ResNets; other streams stay in float32. ``seed`` decides dropout masks, which depend on layer and
    micro-batch, not on the cut.
    ``transport`` spreads the stages over ranks: every rank makes the same calls, and holds the weights of its
    own stages only. ``placement`` is the rank of each stage; if left out, each holds about as many in a row. Where
    the transport has replicas, each of them trains on its own share of every micro-batch, and updates use the
    mean gradient of all. ``message_dtype`` is what float32 travels as between stages, to send half as much
    with ``torch.bfloat16``; if that is ``autocast`` too, stages of one layer take streams as they come.
    ``corrections`` make up for staleness: names like ``"predict"`` or ``"shrink:0.9"``, or objects of
    `petra.corrections`. On a GPU, in one process and with a fused optimizer, ticks of a full pipeline are
    recorded as CUDA graphs and replayed, unless ``capture`` is False; True refuses devices where that cannot be.
    ``executor.refusal`` says why, where ticks of this network cannot be.

    >>> trainer = Trainer(network, loss=nn.functional.cross_entropy, stages=4,
    ...                   optimizer=lambda p: torch.optim.SGD(p, 0.1))       # doctest: +SKIP
    >>> for x, y in loader:
    ...     trainer.step(x, y)                                               # doctest: +SKIP
    >>> trainer.drain()                                                      # doctest: +SKIP
    """

    def __init__(
        self,
        network: nn.Sequential,
        *,
        loss: Loss,
        optimizer: OptimizerFactory,
        method: str | Method = "petra",
        stages: int | Sequence[int] = 1,
        scheduler: SchedulerFactory | None = None,
        accumulate: int = 1,
        order: str | Sequence[int] | None = None,
        clip_norm: float | None = None,
        autocast: torch.dtype | None = None,
        seed: int = 0,
        device: torch.device | str | None = None,
        transport: Transport | None = None,
        placement: Sequence[int] | None = None,
        message_dtype: torch.dtype | None = None,
        corrections: Sequence[str | Correction] = (),
        capture: bool | None = None,
    ) -> None:
        check_network(network)
        if clip_norm is not None and not (isinstance(clip_norm, Real) and clip_norm > 0):
            raise ValueError(f"clip_norm is {clip_norm!r}: give a positive norm, or None for no clipping")
        self.device = torch.device(device) if device is not None else device_of(network)
        check_parts(loss, optimizer, scheduler, accumulate, {"autocast": autocast, "message_dtype": message_dtype})
        check_device(self.device)
        self.method = methods.find(method) if isinstance(method, str) else method
        if not isinstance(self.method, Method):
            raise ValueError(f"method is {method!r}: give a name such as 'petra', or an object like DNI()")
        cuts = partition(len(network), stages)
        self.order = choose_order(self.method, len(cuts), accumulate, order)
        self.corrections = choose_corrections(corrections, self.method)
        self.network = network
        self.loss = loss
        self.transport = transport = transport if transport is not None else Alone(self.device)
        place = transport.place
        recorder = make_recorder(self.device, place, capture)
        self.layout = {
            "method": self.method.name,
            "stages": [len(cut) for cut in cuts],
            "accumulate": accumulate,
            "order": self.order.name,
            "in_flight": [self.order.staleness(stage) for stage in range(len(cuts))],
            "seed": seed,
            "replicas": place.replicas,
            "messages": str(message_dtype or torch.float32),
            "corrections": [str(correction) for correction in self.corrections],
        }
        """What has to be the same for a state to be taken up as it is."""
        refuse_sharing(network, cuts)
        if message_dtype is not None:
            refuse_other_dtypes(network)
        in_channels_last = any(channels_last(p) for p in network.parameters())
        self.placement = place_stages(len(cuts), place.ranks, placement)
        """The rank of each stage."""
        if place.ranks * place.replicas > 1:
            names = {
                "placement": self.placement,
                "weights": weights_hash(network.state_dict()),
                "torch": torch.__version__,
                "channels_last": in_channels_last,
            }
            transport.agree({**self.layout, **names})
        crossings = [(a, b) for a, b in pairwise(self.placement) if a != b]
        transport.connect([*crossings, *((b, a) for a, b in crossings)])
        settings = Settings(self.device, seed, autocast, place.replica)
        above = [*(network[cut.stop] for cut in cuts[:-1]), None]
        chains = [Chain([network[i] for i in cut], cut.start, settings, a) for cut, a in zip(cuts, above, strict=True)]
        made: list[Stage] = []
        with transport.refusing_together():
            for index, chain in enumerate(chains):
                owned_here = self.placement[index] == place.rank
                for layer in chain.layers:
                    layer.to(self.device if owned_here else "meta")  # another rank holds its weights
                if owned_here:
                    own = make_optimizer(optimizer, chain.parameters())
                    schedule = make_scheduler(scheduler, own)  # which may set the first learning rate
                    corrected, peaks = make_corrected(self.corrections, chain.parameters(), own, self.order, index)
                    stage = Stage(
                        index,
                        len(cuts),
                        chain,
                        self.method,
                        own,
                        scheduler=schedule,
                        loss=loss if index == len(cuts) - 1 else None,
                        clip_norm=clip_norm,
                        sends_streams=index > 0 and self.method.needs_outputs(chains[index - 1]),
                        message_dtype=message_dtype,
                        average=transport.average if place.replicas > 1 else None,
                        corrected=corrected,
                        peaks=peaks,
                        synthesizer=self.method.synthesizer(chain) if index < len(cuts) - 1 else None,
                        channels_last=in_channels_last,
                    )
                    made.append(stage)
        if place.ranks == 1:
            self.executor = (
                LocalExecutor(made, self.order) if recorder is None else CapturedExecutor(made, self.order, recorder)
            )
            self.executor.doing = transport.doing
        else:
            rehearsal = Rehearsal(list(network), cuts, self.method, message_dtype)
            self.executor = RankExecutor(made, self.order, self.placement, transport, rehearsal, in_channels_last)
        self._names: dict[Tensor, str] = {p: name for name, p in network.named_parameters()}
        self._frozen = [p for stage in made for p in stage.parameters if not p.requires_grad]
        layers = list(network._modules)  # named_children would leave a layer out that comes twice
        self._stage_of = {layers[i]: index for index, cut in enumerate(cuts) for i in cut}

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError(
            "a Trainer cannot be copied or pickled, for gradients would be lost: make another one of a copy of the "
            "network, and give the state_dict() of this one to its load_state_dict"
        )

    @property
    def stages(self) -> list[Stage]:
        """The stages, for looking at weights, gradients and what they hold."""
        return self.executor.stages

    def step(self, inputs: Tensor | Streams, targets: Any, weight: float = 1.0) -> list[Finished]:
        """One tick: read one micro-batch; every stage does what is its turn. What reached the loss.

        With replicas, the micro-batch is this replica's share of a larger one. ``weight`` is what its gradient
        counts for in the mean over the replicas: its part of the samples times their number, 1 for equal shares.
        """
        refuse_unfrozen(self._frozen, self.stages, self._names)
        streams = as_streams(inputs)
        check_batch(streams, targets, self.executor.microbatches, self.transport.place.replicas)
        # What waits in the pipeline is a copy, for the caller may use the memory of a batch for the next one.
        waits = not isinstance(self.order, Sequential)
        return self.executor.tick(self._on_device(streams, waits), self._on_device(targets, waits), weight)

    def drain(self) -> list[Finished]:
        """Finish everything in flight, so that every micro-batch has entered an update of every stage."""
        return self.executor.drain()

    def predict(self, inputs: Tensor | Streams) -> Any:
        """Outputs in evaluation mode with the weights of this moment; nothing in flight is disturbed.

        They come out on the last stage's rank; other ranks get None.
        """
        outputs = self.executor.predict(self._on_device(as_streams(inputs)))
        return None if outputs is None else single(outputs)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[tuple[Tensor | Streams, Any]], loss: Loss | None = None) -> Evaluation:
        """Loss and accuracy of ``batches``; nothing in flight is disturbed. ``loss`` stands in for the trainer's own.

        With replicas, each of them gives its own share of the batches, and all hear the result of the whole.
        """
        measure, tally = self.loss if loss is None else loss, Tally()
        for x, y in batches:
            outputs, targets = self.predict(x), self._on_device(y)
            if outputs is not None:
                size = len(y) if isinstance(y, Tensor) and y.ndim else len(as_streams(x)[0])
                tally.add(measure(outputs, targets), outputs, targets, size)
        self.transport.flush()
        return tally.result(self.transport)

    def weights(self) -> dict[str, Tensor] | None:
        """The ``state_dict()`` of the whole network, as copies on the CPU, for a file or a network without a trainer.

        They come out on the last stage's rank, of the first replica; others, which all make this call, get None.
        Micro-batches that are in flight are not in them yet: `drain` first.
        """
        with self.transport.refusing_together():
            own = {stage.index: self._network_of(stage.index) for stage in self.stages}
            extra = [name for part in own.values() for name, value in part.items() if not isinstance(value, Tensor)]
            if extra:
                raise ValueError(f"{extra[0]} is no tensor: take it from the network itself, on the rank that holds it")
        self.transport.doing.now("bringing the weights together")
        found: dict[str, Tensor] = {}
        for stage, rank in enumerate(self.placement):
            found |= self.transport.bring(rank, own.get(stage, {}))
        return found if self.transport.place.speaks else None

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimizers and everything in flight: what `load_state_dict` continues from exactly.

        Of the stages that are here; those of other ranks are the business of their own trainers. The tensors are
        those of the trainer itself, and move on with it: to keep a state in memory, ``copy.deepcopy`` it.
        """
        executor = self.executor.state_dict()
        stages = {}
        for stage in self.stages:
            weights = states.save_weights(stage, self._network_of(stage.index), self._names)
            # Between two updates, replicas have running statistics of their own.
            flight = {**stage.in_flight(), **self.executor.waiting(stage.index), "statistics": stage.statistics()}
            stages[stage.index] = {"weights": weights, "flight": flight}
        return {"layout": self.layout, "executor": executor, "stages": stages}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state`` was taken, with the same layout; ranks may have changed."""
        with self.transport.refusing_together():  # before anything is changed
            states.check_state(state)
            for name, value in self.layout.items():
                if state["layout"].get(name) != value:
                    raise ValueError(
                        f"the checkpoint was written with {name} {state['layout'].get(name)}, not {value}: "
                        f"use the same {name} to resume it, or load_drained with a state that was taken after drain()"
                    )
            states.check_stages(state, [stage.index for stage in self.stages])
            networks = {stage.index: self._network_of(stage.index) for stage in self.stages}
            for stage in self.stages:
                weights = state["stages"][stage.index]["weights"]
                states.check_network(networks[stage.index], weights["network"])
                states.check_weights(stage, [weights], self._names)
        flights = {}
        for stage in self.stages:
            saved = state["stages"][stage.index]
            states.load_network(self.network, networks[stage.index], saved["weights"]["network"])
            states.load_weights(stage, saved["weights"], self._names)
            flights[stage.index] = flight = states.moved(saved["flight"], self.device)
            stage.load_in_flight(flight)
            for own, value in zip(stage.statistics(), flight["statistics"], strict=True):
                own.copy_(value)
        self.executor.load_state_dict(state["executor"], flights)

    def load_drained(self, state: dict[str, Any]) -> None:
        """Continue from the whole state of a trainer with other stages or replicas in which nothing is in flight."""
        with self.transport.refusing_together():
            states.check_state(state)
            if state["executor"]["fed"]:
                raise ValueError("micro-batches are in flight in this state: drain the trainer before it is taken")
            states.check_stages(state, range(len(state["layout"]["stages"])))
            saved = [one["weights"] for one in state["stages"].values()]
            network = {name: value for one in saved for name, value in one["network"].items()}
            networks = {stage.index: self._network_of(stage.index) for stage in self.stages}
            for stage in self.stages:
                states.check_network(networks[stage.index], network)
                states.check_weights(stage, saved, self._names)
        for stage in self.stages:
            states.load_network(self.network, networks[stage.index], network)
            # Zero features come before the first micro-batch of all.
            blank = 0 if state["executor"]["start"] else self.order.blank_updates(stage.index)
            states.load_drained(stage, saved, self._names, blank)
        nothing: dict[int, dict[str, Any]] = {
            stage.index: {"ups": {}, "downs": {}, "targets": {}} for stage in self.stages
        }
        self.executor.load_state_dict(state["executor"], nothing)

    def _network_of(self, stage: int) -> dict[str, Any]:
        """The part of a stage; what belongs to the network itself, not to a layer, is the first one's."""
        found = self.network.state_dict()
        return {name: value for name, value in found.items() if self._stage_of.get(name.split(".")[0], 0) == stage}

    def _on_device(self, data: Any, copy: bool = False) -> Any:
        """The same with its tensors, also those inside lists and dictionaries, on the device."""
        return tree_map_only(Tensor, lambda t: t.to(self.device, non_blocking=True, copy=copy), data)


def weights_hash(network: Mapping[str, Any]) -> str:
    """A fingerprint of all weights and running statistics."""
    digest = hashlib.sha256()
    for name, value in network.items():
        digest.update(name.encode())
        if isinstance(value, Tensor):  # a module's extra state can be anything
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
