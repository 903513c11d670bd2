"""The trainer: a network, a method and a number of stages, fed one micro-batch at a time."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from petra import methods
from petra.conversion import as_network
from petra.conversion.module_network import weight_owner
from petra.corrections import Correction
from petra.cudagraph import RankTickCapture, TickCapture
from petra.distributed import RankMailbox, SingleProcess, Transport
from petra.methods import Method, Settings
from petra.pipeline import (
    Executor,
    GlobalClipping,
    LocalMailbox,
    MessageFormat,
    MicrobatchResult,
    ShapeInference,
    Stage,
    StageBuilder,
    WeightAverage,
    partition,
)
from petra.pipeline.optimizer_factory import OptimizerFactory
from petra.pipeline.stage import Loss
from petra.reversible.storage import storage_of
from petra.reversible.streams import Streams, as_streams, channels_last, single
from petra.schedule import SequentialSchedule
from petra.trainer import state as states
from petra.trainer.advisor import Advisor
from petra.trainer.defaults import TrainingDefaults
from petra.trainer.early_loss import check_loss_early
from petra.trainer.early_stopping import EarlyStopping
from petra.trainer.evaluation import Evaluation, device_of, evaluate, to_device
from petra.trainer.schedules import choose_schedule
from petra.trainer.stability import StalenessWarning
from petra.trainer.state import weights_hash
from petra.trainer.validation import (
    DEFAULT_STAGES,
    SchedulerFactory,
    check_batch,
    check_clip,
    check_device,
    check_float32,
    check_frozen,
    check_kinds,
    check_network,
    check_no_sharing,
    check_storage,
    choose_corrections,
    make_graph_capture,
    make_optimizer,
    make_scheduler,
    make_stage_corrections,
    place_stages,
    stages_of_weights,
    warn_if_not_reversible,
)

if TYPE_CHECKING:
    from petra.trainer.callbacks import Callback
    from petra.trainer.fit import FitResult


class Trainer:
    """Trains a network with one of the training methods, cut into stages.

    The same calls train in one process and on many ranks: with a transport, every rank creates the trainer and calls
    its methods with the same arguments, and holds the weights of its own stages only. Where the transport has replicas,
    each replica trains on its own share of every micro-batch, and updates use the mean gradient of all replicas.

    Args:
        network: A `petra.Network`, an `nn.Sequential`, or another module that `petra.as_network` can cut into layers.
            It is trained in place. Its modules keep the modes (`train()` or `eval()`) that they are in; but if all are
            in evaluation mode, as `from_pretrained` and `petra.load` return them, they are put into training mode.
        loss: A function of outputs and targets that returns one number.
        optimizer: Creates the optimizer of a stage from those of its parameters that are not frozen. It may return a
            list of optimizers. A function with an argument `named_parameters` gets pairs of name and parameter; one
            with two required arguments gets the parameters and their names.
            Without it, `defaults` decides about the optimizer, and about the scheduler and the corrections unless they
            are given.
        method: The name of a training method (`petra methods` lists them), or a `petra.Method`.
        stages: The number of stages, or the number of layers of each. By default 4, but at most one per layer; on more
            than 4 ranks, one per rank.
        scheduler: Creates a learning-rate scheduler for an optimizer. It is stepped after every update of the stage.
        accumulate: The number k of micro-batches whose mean gradient makes one update.
        schedule: When stages act; by default, the schedule of the method. With exact gradients: `"sequential"`,
            `"gpipe"`, `"1f1b"`, `"interleaved"` (several stages per rank, `"interleaved:2"` for two). For pipelined
            methods such as PETRA also `"low-staleness"`, `"lock-step"`, `"locked-forward"`, `"flush:4"` (flushed after
            every 4 updates), or the number of micro-batches in flight of each stage.
        flush_until: For asynchronous schedules, a synchronous start: the pipeline is flushed after each of this many
            first updates, so that their gradients are exact.
        clip_norm: The largest norm of the gradient; None does not clip.
        clip: Which norm `clip_norm` limits. `"stage"`: that of each stage. `"global"`: that of the whole network. With
            exact gradients, this is what `torch.nn.utils.clip_grad_norm_` does. In an asynchronous pipeline, a stage
            combines its own norm with those of the other stages' updates J or more ticks ago, for J stages.
        autocast: The dtype of residual functions, and of the sums in blocks of ResNets; other streams stay in float32.
        seed: Decides dropout masks, which depend on the layer and the micro-batch but not on the cut.
        device: The device; by default, that of the network.
        transport: Connects the ranks; by default, there is one process.
        placement: The rank of each stage; by default, each rank holds about as many consecutive stages.
        comm_dtype: The rounding of messages between stages: `"bf16"` or `torch.bfloat16` halves them, `"int8"` and
            `"fp8"` send about a quarter. `"streams=bf16,gradients=int8"` rounds the two parts of a message differently.
            If both `comm_dtype` and `autocast` are bf16, stages of one layer do not convert streams that arrive.
        ema: The decay of an exponential moving average of the weights, such as 0.999; None averages nothing. Every
            stage averages its weights and running statistics after each of its updates.
        free_gradients: Free the gradients of a stage after each of its updates, which needs less memory. By default,
            they can be read until the next backward pass of the stage. This has no effect if ticks are captured.
        corrections: Corrections of staleness: names such as `"predict"` or `"shrink:0.9"`, or objects of
            `petra.corrections`. None means none, or those of `defaults`.
        cuda_graph: Capture ticks of a full pipeline as CUDA graphs. None does so on a GPU; True raises an error where
            that is not possible. It needs a fused optimizer or one of `petra.optim`; `ineligible_reason` says what
            prevents it.

    Raises:
        ValueError: If an argument is invalid, or the arguments do not fit together.

    Warns:
        StalenessWarning: If late gradients make it likely that the training diverges, or if the loss shows that it does
            not learn.

    Example:
        ```python
        trainer = petra.Trainer(network, loss=nn.functional.cross_entropy, stages=4,
                                optimizer=lambda p: torch.optim.SGD(p, 0.02, momentum=0.9))
        for x, y in loader:
            trainer.step(x, y)
        trainer.drain()
        ```
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        loss: Loss,
        optimizer: OptimizerFactory | None = None,
        method: str | Method = "petra",
        stages: int | Sequence[int] | None = None,
        scheduler: SchedulerFactory | None = None,
        accumulate: int = 1,
        schedule: str | Sequence[int] | None = None,
        flush_until: int | None = None,
        clip_norm: float | None = None,
        clip: str = "stage",
        autocast: torch.dtype | None = None,
        seed: int = 0,
        device: torch.device | str | None = None,
        transport: Transport | None = None,
        placement: Sequence[int] | None = None,
        comm_dtype: str | torch.dtype | None = None,
        ema: float | None = None,
        free_gradients: bool = False,
        corrections: Sequence[str | Correction] | None = None,
        cuda_graph: bool | None = None,
    ) -> None:
        network = as_network(network)
        check_network(network)
        check_clip(clip, clip_norm)
        if ema is not None and not (isinstance(ema, Real) and 0 <= ema < 1):
            raise ValueError(f"ema is {ema!r}: give a decay from 0 to below 1, such as 0.999, or None")
        if not any(m.training for m in network.modules()):  # as `from_pretrained` and `petra.load` return them
            network.train()
        self.device = torch.device(device) if device is not None else device_of(network)
        check_kinds(loss, optimizer, scheduler, accumulate, {"autocast": autocast})
        format = MessageFormat.of(comm_dtype, any(channels_last(p) for p in network.parameters()))
        check_device(self.device)
        self.method = methods.find(method) if isinstance(method, str) else method
        if not isinstance(self.method, Method):
            raise ValueError(f"method is {method!r}: give a name such as 'petra', or an object like DNI()")
        self.transport = transport = transport if transport is not None else SingleProcess(self.device)
        position = transport.position
        default = min(len(network), max(DEFAULT_STAGES, position.ranks))
        cuts = partition(len(network), default if stages is None else stages)
        self.schedule = choose_schedule(self.method, len(cuts), accumulate, schedule, flush_until, position.ranks)
        self.defaults: TrainingDefaults | None = None
        """The settings that were chosen because no optimizer was given; None if one was."""
        chosen: tuple[str, ...] = ()
        if optimizer is None:
            self.defaults = TrainingDefaults.choose(network, self.method, self.schedule)
            optimizer, scheduler = self.defaults.make_optimizer, scheduler or self.defaults.make_scheduler
            if corrections is None:
                corrections = chosen = self.defaults.corrections
        check_storage(((layer, storage_of(layer)) for layer in network), self.method)
        self.corrections = choose_corrections(() if corrections is None else corrections, self.method, self.schedule)
        self.network = network
        """The network; if it was another module, its layers as `as_network` returns them."""
        self.loss = loss
        self.loss_checked = len(cuts) == 1 or isinstance(self.schedule, SequentialSchedule)
        """True if the loss was tried with outputs of the network, which takes one evaluation in the first `step`."""
        graph_capture = make_graph_capture(self.device, cuda_graph)
        self.layout: dict[str, Any] = {
            "method": self.method.name,
            "stages": [len(cut) for cut in cuts],
            "accumulate": accumulate,
            "schedule": self.schedule.name,
            "flush_until": flush_until or None,
            "in_flight": [self.schedule.staleness(stage) for stage in range(len(cuts))],
            "seed": seed,
            "replicas": position.replicas,
            "comm_dtype": str(format),
            "corrections": [str(correction) for correction in self.corrections],
        }
        """The settings that must be equal for `load_state_dict`."""
        check_no_sharing(network, cuts)
        warn_if_not_reversible(self.method, network)
        if format.rounds:
            check_float32(network)
        self.placement = place_stages(len(cuts), position.ranks, placement, self.schedule)
        """The rank of each stage."""
        if position.ranks * position.replicas > 1:
            names = {
                "placement": self.placement,
                "weights": weights_hash(network.state_dict()),
                "torch": torch.__version__,
                "channels_last": format.channels_last,
            }
            transport.check_agreement({**self.layout, **names})
        crossings = [(a, b) for a, b in pairwise(self.placement) if a != b]
        transport.connect([*crossings, *((b, a) for a, b in crossings)])
        self._stage_of = stages_of_weights(network, cuts)  # before weights move to the meta device
        builder = StageBuilder(
            list(network),
            self.method,
            Settings(self.device, seed, autocast, position.replica),
            loss=loss,
            optimizer=partial(make_optimizer, optimizer, lambda: {p: n for n, p in network.named_parameters()}),
            scheduler=partial(make_scheduler, scheduler),
            corrections=partial(make_stage_corrections, self.corrections, self.schedule),
            clip_norm=clip_norm if clip == "stage" else None,
            average=transport.average if position.replicas > 1 else None,
        )
        built: list[Stage] = []
        with transport.raise_on_all_ranks():
            for index, cut in enumerate(cuts):
                here = self.placement[index] == position.rank
                for i in cut:
                    network[i].to(self.device if here else "meta")  # another rank holds its weights
                if here:
                    built.append(builder.build(index, len(cuts), cut))
        mailbox = None
        if position.ranks > 1:
            shape_inference = ShapeInference(list(network), cuts, self.method, format)
            mailbox = RankMailbox(self.placement, transport, shape_inference, format)
            in_flight = [self.schedule.staleness(stage) for stage in range(len(cuts))]
            apart = [above - below for above, below in pairwise(in_flight)]
            transport.max_unsent_ticks = max(transport.max_unsent_ticks, *apart)
        self.executor = Executor(built, self.schedule, mailbox or LocalMailbox(len(cuts), format))
        self.executor.activity = transport.activity
        if graph_capture is not None:
            alone = position.ranks * position.replicas == 1
            capture = TickCapture if alone else RankTickCapture
            self.executor.capture = capture(self.executor, graph_capture)
        if clip == "global" and clip_norm is not None:
            exchange = transport if position.ranks > 1 else None
            self.executor.clipping = GlobalClipping(clip_norm, len(cuts), self.schedule.exact, exchange)
            if self.executor.capture is not None:
                self.executor.capture.ineligible_reason = "gradients are clipped by the norm over all stages"
        self._names: dict[Tensor, str] = {p: name for name, p in network.named_parameters()}
        self._frozen = [p for stage in built for p in stage.parameters if not p.requires_grad]
        self._loss_so_far: Tensor | None = None
        self.ema = ema
        """The decay of averaged weights; None if there are none."""
        if ema is not None:
            networks = self._networks()
            for stage in built:
                stage.ema = WeightAverage(ema, weight_owner(network), networks[stage.index].keys())
        for stage in built:
            stage.free_gradients = free_gradients and self.executor.capture is None
        advised = self.method.stale and position.is_main and self.device.type != "meta"  # one process warns
        watched = network, built, self.schedule, self.corrections
        self._advisor = Advisor(*watched, chosen) if advised else None
        if self._advisor is not None and (text := self._advisor.before_training()):
            self._warn(text)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ValueError(
            "a Trainer cannot be copied or pickled, because gradients would be lost: create another one from a copy of "
            "the network, and load the state_dict() of this one with load_state_dict"
        )

    @property
    def stages(self) -> list[Stage]:
        """The stages of this process, with their weights, gradients and memory."""
        return self.executor.stages

    @property
    def ineligible_reason(self) -> str | None:
        """Why ticks are not captured as CUDA graphs; None where they are, or where there is no GPU."""
        return None if self.executor.capture is None else self.executor.capture.ineligible_reason

    @property
    def updates(self) -> dict[int, int]:
        """The number of updates of each stage of this process."""
        return {stage.index: stage.updates for stage in self.stages}

    @property
    def staleness(self) -> list[int]:
        """For each stage, the number of micro-batches between a forward and its backward in a full pipeline.

        It is 0 for schedules with exact gradients.
        """
        return [0 if self.schedule.exact else n for n in self.layout["in_flight"]]

    @property
    def last_loss(self) -> float | None:
        """The loss of the newest micro-batch that has reached it; None on ranks without the last stage.

        Reading it waits for the device.
        """
        return None if self._loss_so_far is None else float(self._loss_so_far)

    def learning_rates(self) -> dict[int, list[float]]:
        """Return the current learning rates.

        Returns:
            For each stage of this process, the learning rate of every parameter group; nothing for a frozen stage.
        """
        return {
            stage.index: [float(group["lr"]) for group in stage.optimizer.param_groups]
            for stage in self.stages
            if stage.optimizer is not None
        }

    def step(self, inputs: Tensor | Streams, targets: Any, weight: float = 1.0) -> list[MicrobatchResult]:
        """Run one tick: read one micro-batch, and let every stage process its current micro-batch.

        Args:
            inputs: The inputs; with replicas, this replica's share of the micro-batch.
            targets: The targets of the loss.
            weight: The weight of the gradient in the mean over replicas: this replica's share of the samples times the
                number of replicas; 1 for equal shares.

        Returns:
            The micro-batches that reached the loss in this tick, on the rank of the last stage.

        Raises:
            ValueError: If inputs or targets are invalid; nothing of the micro-batch has been used then.
            NonFiniteLoss: If a loss is NaN or infinite.
        """
        check_frozen(self._frozen, self.stages, self._names)
        streams = as_streams(inputs)
        check_batch(streams, targets, self.executor.microbatches, self.transport.position.replicas)
        if not self.loss_checked:
            with self.transport.raise_on_all_ranks():
                check_loss_early(self.executor, self.loss, self.device, streams, targets)
            self.loss_checked = True
        # A pipeline keeps a copy, because the caller may reuse the memory of a batch for the next one. Where neither
        # the first nor the last stage is, only the shapes are needed.
        waits = not isinstance(self.schedule, SequentialSchedule)
        if self.executor.owns(0):
            streams = tuple(to_device(x, self.device, waits) for x in streams)
        if self.executor.owns(self.schedule.stages - 1):
            targets = to_device(targets, self.device, waits)
        results = self.executor.tick(streams, targets, weight)
        self._loss_so_far = results[-1].loss if results else self._loss_so_far
        if self._advisor is not None and (text := self._advisor.observe(results)):
            self._warn(text)
        return results

    def _warn(self, text: str) -> None:
        warnings.warn(text, StalenessWarning, stacklevel=3)

    def drain(self) -> list[MicrobatchResult]:
        """Finish everything in flight, so that every micro-batch has been used in an update of every stage.

        Returns:
            The micro-batches that reached the loss.
        """
        return self.executor.drain()

    def fit(
        self,
        train: Any,
        test: Any = None,
        *,
        epochs: int | None = None,
        max_steps: int | None = None,
        eval_every: int | None = None,
        log_every: int | None = None,
        checkpoint_every: int | None = None,
        checkpoint_epochs: int = 1,
        keep: int = 1,
        out: str | Path | None = None,
        resume: bool = False,
        from_checkpoint: int | None = None,
        early_stopping: EarlyStopping | int | None = None,
        monitor: str | None = None,
        callbacks: Sequence[Callback] = (),
        quiet: bool = False,
    ) -> FitResult:
        """Train to the end: read the data, evaluate, log, save, and drain the pipeline.

        One *step* is one update of every stage: `accumulate` micro-batches. With a transport, every rank calls this
        with the same arguments and the same data; with replicas, each gives its own share of every micro-batch.

        Args:
            train: The training data: any iterable of (inputs, targets) that can be iterated over many times, such as
                a `DataLoader`; or a source of batches with `epoch(epoch, start)`. A shuffling loader has an order that
                depends on the trainer's seed and the epoch.
            test: The data of evaluations, in the same form; None evaluates nothing.
            epochs: The number of passes over the training data.
            max_steps: The number of steps. What is reached first, `epochs` or this, ends the training.
            eval_every: The steps between evaluations; by default, every epoch is evaluated. So is the end.
            log_every: The steps between records of training loss and speed, besides those of evaluations.
            checkpoint_every: The steps between checkpoints within an epoch; None for none.
            checkpoint_epochs: The epochs between checkpoints.
            keep: The number of checkpoints to keep.
            out: A folder for `metrics.jsonl`, `checkpoint/`, `best.safetensors` (of the best evaluation),
                `weights.safetensors` (of the end) and `summary.json`; None writes nothing.
            resume: Continue from the last checkpoint in `out`, if there is one. The result is that of an uninterrupted
                training, bit for bit.
            from_checkpoint: With `resume`, the number of the checkpoint to continue from; None for the last one. Newer
                checkpoints no longer count, and are replaced.
            early_stopping: End when the metric `monitor` stops improving; a number is the patience in evaluations.
            monitor: The metric that decides which weights are the best: `"accuracy"` or `"loss"`. By default, the test
                accuracy where it is known, else the loss.
            callbacks: Objects of `petra.Callback`, called at the events of the training.
            quiet: Print no progress.

        Returns:
            The losses and accuracies; the trained weights are in the network.

        Raises:
            ValueError: If an argument is invalid, or the checkpoint does not fit.
            NonFiniteLoss: If a loss is NaN or infinite.
        """
        from petra.trainer.fit import fit  # it imports this module
        from petra.trainer.loop import LoopSettings

        stopping = EarlyStopping(early_stopping) if isinstance(early_stopping, int) else early_stopping
        settings = LoopSettings(
            epochs=epochs,
            max_steps=max_steps,
            eval_every=eval_every,
            log_every=log_every,
            checkpoint_every=(checkpoint_every or 0) * int(self.layout["accumulate"]),
            checkpoint_epochs=checkpoint_epochs,
            keep=keep,
            patience=None if stopping is None else stopping.patience,
            min_delta=0.0 if stopping is None else stopping.min_delta,
            monitor=monitor,
        )
        return fit(
            self,
            train,
            test,
            settings,
            out=out,
            resume=resume,
            from_checkpoint=from_checkpoint,
            callbacks=callbacks,
            quiet=quiet,
        )

    def predict(self, inputs: Tensor | Streams) -> Any:
        """Compute outputs in evaluation mode with the current weights; nothing in flight changes.

        Args:
            inputs: The inputs of the network.

        Returns:
            The outputs on the rank of the last stage; None on other ranks.
        """
        outputs = self.executor.predict(to_device(as_streams(inputs), self.device))
        return None if outputs is None else single(outputs)

    @torch.no_grad()
    def evaluate(
        self, batches: Iterable[tuple[Tensor | Streams, Any]], loss: Loss | None = None, average: bool = False
    ) -> Evaluation:
        """Compute loss and accuracy of batches; nothing in flight changes.

        Args:
            batches: Inputs and targets; with replicas, each replica gives its own share.
            loss: A loss to use instead of the trainer's.
            average: Evaluate the averaged weights (`ema`).

        Returns:
            The result over the batches of all replicas, on every rank.
        """
        measure = self.loss if loss is None else loss
        with self.averaged_weights() if average else nullcontext():
            return evaluate(self.predict, batches, measure, self.device, self.transport)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Give the network its averaged weights (`ema`) inside a `with` block, for `predict` and `evaluate`.

        Raises:
            ValueError: If the trainer averages nothing.
        """
        self._check_averages()
        with ExitStack() as stack:
            for stage in self.stages:
                assert stage.ema is not None
                stack.enter_context(stage.ema.applied())
            yield

    def _check_averages(self) -> None:
        if self.ema is None:
            raise ValueError("the trainer averages no weights: create it with ema, such as ema=0.999")

    def weights(self, average: bool = False) -> dict[str, Tensor] | None:
        """Gather the `state_dict()` of the whole network, as copies on the CPU.

        All ranks call this. Micro-batches in flight are not in the weights yet: call `drain` first.

        Args:
            average: Return the averaged weights (`ema`).

        Returns:
            The weights on the main rank, which holds the last stage; None on other ranks.

        Raises:
            ValueError: If a module has extra state that is not a tensor.
        """
        with self.transport.raise_on_all_ranks():
            own = self._networks()
            if average:
                self._check_averages()
                for one in self.stages:
                    own[one.index] |= one.ema.state_dict() if one.ema is not None else {}
            extra = [name for part in own.values() for name, value in part.items() if not isinstance(value, Tensor)]
            if extra:
                raise ValueError(f"{extra[0]} is not a tensor: read it from the network, on the rank that holds it")
        self.transport.activity.now("gathering the weights")
        found: dict[str, Tensor] = {}
        for stage, rank in enumerate(self.placement):
            found |= self.transport.gather_to_main(rank, own.get(stage, {}))
        if not self.transport.position.is_main:
            return None
        return {name: found[name] for name in self.network.state_dict() if name in found}

    def state_dict(self) -> dict[str, Any]:
        """Return weights, optimizers and everything in flight, from which `load_state_dict` continues exactly.

        Returns:
            The state of the stages of this process. Its tensors are those of the trainer and change with it: use
            `copy.deepcopy` to keep a state in memory.
        """
        executor = self.executor.state_dict()
        stages, networks = {}, self._networks()
        for stage in self.stages:
            weights = states.save_weights(stage, networks[stage.index], self._names)
            # Between two updates, replicas have running statistics of their own.
            flight = {
                **stage.in_flight_state_dict(),
                **self.executor.stage_state_dict(stage.index),
                "statistics": stage.statistics(),
            }
            stages[stage.index] = {"weights": weights, "flight": flight}
        return {"layout": self.layout, "executor": executor, "stages": stages}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where a state was taken, with the same layout; the number of ranks may differ.

        Args:
            state: What `state_dict` returned, with at least the stages of this process.

        Raises:
            ValueError: If the state does not fit; nothing has been changed then.
        """
        with self.transport.raise_on_all_ranks():  # before anything is changed
            states.check_state(state)
            for name, value in self.layout.items():
                if state["layout"].get(name) != value:
                    raise ValueError(
                        f"the checkpoint was written with {name} {state['layout'].get(name)}, not {value}: "
                        f"use the same {name}, or load_drained() with a state that was taken after drain()"
                    )
            states.check_stages(state, [stage.index for stage in self.stages])
            networks = self._networks()
            for stage in self.stages:
                weights = state["stages"][stage.index]["weights"]
                states.check_network(networks[stage.index], weights["network"])
                states.check_weights(stage, [weights], self._names)
        flights = {}
        for stage in self.stages:
            saved = state["stages"][stage.index]
            states.load_network(weight_owner(self.network), networks[stage.index], saved["weights"]["network"])
            states.load_weights(stage, saved["weights"], self._names)
            flights[stage.index] = flight = states.moved(saved["flight"], self.device)
            stage.load_in_flight_state_dict(flight)
            for own, value in zip(stage.statistics(), flight["statistics"], strict=True):
                own.copy_(value)
        self.executor.load_state_dict(state["executor"], flights)
        if self._advisor is not None:
            self._advisor.resumed()

    def load_drained(self, state: dict[str, Any]) -> None:
        """Continue from the state of a trainer with other stages or replicas, taken after `drain`.

        Args:
            state: The state, with all stages of that trainer.

        Raises:
            ValueError: If micro-batches are in flight in the state, or it does not fit.
        """
        with self.transport.raise_on_all_ranks():
            states.check_state(state)
            if state["executor"]["fed"]:
                raise ValueError("micro-batches are in flight in this state: call drain() before state_dict()")
            states.check_stages(state, range(len(state["layout"]["stages"])))
            saved = [one["weights"] for one in state["stages"].values()]
            network = {name: value for one in saved for name, value in one["network"].items()}
            networks = self._networks()
            for stage in self.stages:
                states.check_network(networks[stage.index], network)
                states.check_weights(stage, saved, self._names)
        for stage in self.stages:
            states.load_network(weight_owner(self.network), networks[stage.index], network)
            # Zero features come before the first micro-batch of all.
            blank = 0 if state["executor"]["start"] else self.schedule.zero_gradient_updates(stage.index)
            states.load_drained(stage, saved, self._names, blank)
        nothing: dict[int, dict[str, Any]] = {
            stage.index: {"forward": {}, "backward": {}, "targets": {}, "shapes": {}} for stage in self.stages
        }
        self.executor.load_state_dict(state["executor"], nothing)
        if self._advisor is not None:
            self._advisor.resumed()

    def _networks(self) -> dict[int, dict[str, Any]]:
        """Return each own stage's part of the state of the network. Entries of the network itself are in stage 0."""
        parts: dict[int, dict[str, Any]] = {stage.index: {} for stage in self.stages}
        for name, value in self.network.state_dict().items():
            if (stage := self._stage_of.get(name, 0)) in parts:
                parts[stage][name] = value
        return parts
