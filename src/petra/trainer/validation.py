"""Checks of everything that a trainer is given, and the objects that it creates from it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn

from petra.conversion import ModuleNetwork
from petra.corrections import Correction, PeakLearningRates, StageCorrections, choose
from petra.cudagraph import CudaGraphCapture, GraphCapture
from petra.methods import Method
from petra.methods.petra import Petra, ReversibleBackprop
from petra.optim import CombinedOptimizer, optimizers_of
from petra.pipeline import Stage, partition
from petra.pipeline.optimizer_factory import OptimizerFactory, create_optimizer
from petra.reversible import Network, ReversibleLayer
from petra.reversible.storage import budget_of
from petra.reversible.streams import Streams
from petra.schedule import InterleavedSchedule, PipelineSchedule

DEFAULT_STAGES = 4
"""The number of stages where none is given, if the network has as many layers."""

SchedulerFactory = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


def check_network(network: nn.Module) -> None:
    """Raise ValueError unless the network is a plain sequence of layers."""
    if not isinstance(network, nn.Sequential):
        raise ValueError(
            f"network is a {type(network).__name__}: give a list of layers as nn.Sequential or petra.Network"
        )
    own = type(network).forward not in (nn.Sequential.forward, Network.forward)
    if own or network._forward_hooks or network._forward_pre_hooks:
        raise ValueError(
            f"{type(network).__name__} has its own {'forward' if own else 'hooks'}, which a trainer would not call, "
            "because it calls the layers one by one: make that a layer"
        )


class NotReversibleWarning(UserWarning):
    """A method for reversible layers trains a network without any."""


def warn_if_not_reversible(method: Method, network: nn.Sequential) -> None:
    """Warn if the method reconstructs inputs, and no layer can do that."""
    if isinstance(method, Petra) and not any(isinstance(layer, ReversibleLayer) for layer in network):
        warnings.warn(
            f"no layer of the network is reversible, so {method.name} stores the inputs of every stage for each "
            "micro-batch in flight, and computes its layers again in the backward pass: use petra.ReversibleBlock or "
            "petra.make_reversible, or a method such as delayed or backprop",
            NotReversibleWarning,
            stacklevel=3,
        )


def check_storage(storages: Iterable[tuple[nn.Module, str | None]], method: Method) -> None:
    """Raise ValueError if a layer has a storage that the method cannot use."""
    for layer, storage in storages:
        if storage in (None, "reconstruct"):
            continue
        kind = type(layer).__name__
        if not isinstance(method, ReversibleBackprop):
            raise ValueError(
                f"storage {storage!r} of a {kind} is for method reversible, where weights are the same in forward and "
                f"backward, and not for {method.name}: choose method reversible, or do not set a storage"
            )
        if storage != "store" and budget_of(storage) is None:
            raise ValueError(
                f"storage {storage!r} of a {kind} is for your own training step: a trainer can store, store:B or "
                "reconstruct"
            )


def check_batch(inputs: Streams, targets: Any, microbatch: int, replicas: int = 1) -> None:
    """Raise ValueError for an invalid micro-batch, before anything of it has been used."""
    if replicas == 1 and any(x.shape[:1] == (0,) for x in inputs):  # a replica may have no samples of a small one
        raise ValueError(f"micro-batch {microbatch} has no samples: leave it out; it was not used")
    for x in inputs:
        # On a GPU this check would make the host wait; the loss is checked anyway. Masks may be -inf.
        if x.device.type == "cpu" and x.is_floating_point() and (x.isnan() | x.isposinf()).any():
            raise ValueError(
                f"the input of micro-batch {microbatch} contains NaN or infinity: clean the data; it was not used"
            )
    # The samples are the first dimension or, in sequence-first batches, the second; with several inputs it is unknown.
    first = inputs[0].shape[:2]
    if len(inputs) == 1 and first and isinstance(targets, Tensor) and targets.ndim and len(targets) not in first:
        raise ValueError(
            f"micro-batch {microbatch} has {first[0]} inputs but {len(targets)} targets: give one target for each input"
        )


def check_kinds(
    loss: object, optimizer: object, scheduler: object, accumulate: object, dtypes: Mapping[str, object]
) -> None:
    """Raise ValueError for the first argument of the wrong kind."""
    if not callable(loss):
        raise ValueError(f"loss is {loss!r}: give a function of outputs and targets, like nn.functional.cross_entropy")
    for name, factory, example in (
        ("optimizer", optimizer, "lambda parameters: torch.optim.SGD(parameters, 0.1)"),
        ("scheduler", scheduler, "lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1000)"),
    ):
        if factory is not None and not callable(factory):
            raise ValueError(
                f"{name} is a {type(factory).__name__}, but every stage needs its own: "
                f"give a function that creates one, such as {example}"
            )
    if not isinstance(accumulate, Integral):
        raise ValueError(f"accumulate is {accumulate!r}: give a whole number of micro-batches per update")
    for name, dtype in dtypes.items():
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"{name} is {dtype!r}: give a dtype like torch.bfloat16, or None for float32")


def check_clip(clip: str, clip_norm: float | None) -> None:
    """Raise ValueError for clipping that is not possible."""
    if clip_norm is not None and not (isinstance(clip_norm, Real) and clip_norm > 0):
        raise ValueError(f"clip_norm is {clip_norm!r}: give a positive norm, or None for no clipping")
    if clip not in ("stage", "global"):
        raise ValueError(f"clip is {clip!r}: give 'stage' or 'global'")
    if clip == "global" and clip_norm is None:
        raise ValueError("clip is 'global', but there is no clip_norm: give the largest norm, such as 1.0")


def check_device(device: torch.device) -> None:
    """Raise ValueError for a GPU that does not exist."""
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device is {device}, but this machine has no such GPU: give cpu or another")


def place_stages(
    stages: int, ranks: int, asked: Sequence[int] | None, schedule: PipelineSchedule | None = None
) -> list[int]:
    """Return the rank of each stage."""
    if asked is None and isinstance(schedule, InterleavedSchedule) and ranks > 1:
        if schedule.ranks != ranks:
            raise ValueError(
                f"{schedule.name} with {stages} stages is for {schedule.ranks} ranks, but there are {ranks}: give "
                "interleaved without a number, or a placement"
            )
        return schedule.placement
    if ranks > stages:
        raise ValueError(f"there are {ranks} ranks but only {stages} stages: give {ranks} stages or more")
    if asked is None:
        return [rank for rank, owned in enumerate(partition(stages, ranks)) for _ in owned]
    if len(asked) != stages or set(asked) != set(range(ranks)) or asked[-1] != ranks - 1:
        raise ValueError(
            f"placement is {list(asked)}: give the rank of each of the {stages} stages, each of the {ranks} ranks "
            f"at least once, and the last stage on rank {ranks - 1}"
        )
    return list(asked)


def make_optimizer(
    factory: OptimizerFactory, names: Callable[[], Mapping[Tensor, str]], parameters: list[nn.Parameter]
) -> torch.optim.Optimizer | None:
    """Create the optimizer of a stage; None if all its parameters are frozen."""
    trained = [p for p in parameters if p.requires_grad]
    if not trained:
        return None
    optimizer = create_optimizer(factory, trained, names())
    if any(isinstance(one, torch.optim.LBFGS) for one in optimizers_of(optimizer)):
        raise ValueError(
            "LBFGS evaluates the loss several times per step, which is impossible in a pipeline: use SGD or AdamW"
        )
    if not {p for group in optimizer.param_groups for p in group["params"]} <= set(parameters):
        raise ValueError(
            "the optimizer of a stage has parameters of other stages: create it from the parameters that the function "
            "is given, such as lambda parameters: torch.optim.SGD(parameters, 0.1)"
        )
    return optimizer


def make_scheduler(
    factory: SchedulerFactory | None, optimizer: torch.optim.Optimizer | None
) -> torch.optim.lr_scheduler.LRScheduler | None:
    """Create the learning-rate scheduler of a stage, if it has one."""
    if factory is None or optimizer is None:
        return None
    scheduler = factory(optimizer)
    if not hasattr(scheduler, "step"):
        raise ValueError(f"the scheduler function returns a {type(scheduler).__name__}: return the scheduler")
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ValueError(
            "ReduceLROnPlateau needs a metric, but schedulers are stepped after every update: use one that counts steps"
        )
    return scheduler


def choose_corrections(
    asked: Sequence[str | Correction], method: Method, schedule: PipelineSchedule
) -> list[Correction]:
    """Return the corrections, and raise ValueError if they have no effect with the method and schedule."""
    if isinstance(asked, str) or not isinstance(asked, Iterable):
        raise ValueError(f"corrections is {asked!r}: give a list of names")
    chosen = choose(asked)
    if chosen and not method.stale:
        raise ValueError(
            f"{method.name} has no staleness to correct: leave {chosen[0].name} out, or choose a pipelined method such "
            "as petra"
        )
    if chosen and schedule.exact:
        raise ValueError(
            f"the schedule {schedule.name} has no staleness to correct: leave {chosen[0].name} out, or choose "
            "low-staleness"
        )
    for correction in chosen:
        if correction.changes_backward_weights and method.stashes_weights:
            raise ValueError(
                f"the backward of {method.name} uses the weights of its forward, so there is nothing for "
                f"{correction.name} to correct: leave it out, or choose petra or checkpointed"
            )
    return chosen


def make_stage_corrections(
    corrections: Sequence[Correction],
    schedule: PipelineSchedule,
    parameters: Sequence[nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    stage: int,
) -> tuple[StageCorrections | None, PeakLearningRates | None]:
    """Return the corrections of a stage, None where nothing is stale; and its highest learning rates."""
    if not corrections or optimizer is None:
        return None, None
    if isinstance(optimizer, CombinedOptimizer):
        raise ValueError(
            f"{corrections[0].name} corrects the step of one optimizer, but a stage has {len(optimizer.optimizers)}: "
            "leave corrections out, or use one optimizer, such as petra.optim.Muon with its AdamW for the rest"
        )
    for correction in corrections:
        correction.check(optimizer)
    peak_lrs, in_flight = PeakLearningRates(optimizer), schedule.staleness(stage)
    if not in_flight:
        return None, peak_lrs
    blank = schedule.zero_gradient_updates(stage)
    staleness = partial(schedule.delay, stage)
    return StageCorrections(
        corrections, parameters, optimizer, in_flight, schedule.accumulate, blank, peak_lrs, staleness
    ), peak_lrs


def make_graph_capture(device: torch.device, cuda_graph: bool | None = None) -> GraphCapture | None:
    """Return what captures ticks on a GPU; None where they are not captured."""
    if cuda_graph and device.type != "cuda":
        raise ValueError(f"cuda_graph needs a GPU, but the device is {device}: leave it out, or use a GPU")
    return CudaGraphCapture(device) if cuda_graph is not False and device.type == "cuda" else None


def check_float32(network: nn.Module) -> None:
    """Raise ValueError unless all parameters are float32."""
    for name, tensor in network.named_parameters():
        if tensor.dtype != torch.float32:
            raise ValueError(
                f"{name} is {tensor.dtype}, but comm_dtype is for float32 networks only: leave comm_dtype out"
            )


def stages_of_weights(network: nn.Sequential, cuts: Sequence[range]) -> dict[str, int]:
    """Return the stage of each entry of the network's `state_dict`; those of no layer are left out."""
    if not isinstance(network, ModuleNetwork):
        names = list(network._modules)  # named_children would leave a layer out that comes twice
        stages = {names[i]: index for index, cut in enumerate(cuts) for i in cut}
        return {name: stages[first] for name in network.state_dict() if (first := name.split(".")[0]) in stages}
    held: dict[Tensor, int] = {}
    modules: dict[nn.Module, int] = {}
    for index, cut in enumerate(cuts):
        for i in cut:
            modules.update(dict.fromkeys(network[i].modules(), index))
            held.update(dict.fromkeys((*network[i].parameters(), *network[i].buffers()), index))
    found = {}
    for name, value in network.module.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor) and value in held:
            found[name] = held[value]
        elif (owner := network.module.get_submodule(name.rpartition(".")[0])) in modules:  # extra state
            found[name] = modules[owner]
    return found


def check_no_sharing(network: nn.Sequential, cuts: list[range]) -> None:
    """Raise ValueError if two stages share a weight or a buffer."""
    owner: dict[Tensor, int] = {}
    for index, cut in enumerate(cuts):
        for layer in cut:
            for name, tensor in (*network[layer].named_parameters(), *network[layer].named_buffers()):
                if owner.setdefault(tensor, index) != index:
                    if isinstance(network, ModuleNetwork):
                        raise ValueError(_tied(network.module, tensor, owner[tensor], index))
                    raise ValueError(
                        f"{name} of layer {layer} is shared by stages {owner[tensor]} and {index}, but each stage owns "
                        "its weights: put the layers that share it into one stage"
                    )


def _tied(module: nn.Module, tensor: Tensor, first: int, second: int) -> str:
    """Return the error message for a tensor of a module that two stages share."""
    tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    names = " and ".join(name for name, value in tensors if value is tensor)
    return (
        f"{names} of {type(module).__name__} share one tensor, but are in stages {first} and {second}, and each stage "
        f"owns its weights: give petra.as_network(module, untie=True), which copies the tensor, or use one stage"
    )


def check_frozen(frozen: Sequence[nn.Parameter], stages: Sequence[Stage], names: Mapping[Tensor, str]) -> None:
    """Raise ValueError for a parameter that was ``frozen``, has been unfrozen since, and has no optimizer."""
    unfrozen = [p for p in frozen if p.requires_grad]
    if not unfrozen:
        return
    optimizers = [stage.optimizer for stage in stages if stage.optimizer is not None]
    held = {p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    for parameter in unfrozen:
        if parameter not in held:
            raise ValueError(
                f"{names[parameter]} was frozen when the trainer was created, so no optimizer updates it: "
                "freeze it again, or create a new Trainer"
            )
