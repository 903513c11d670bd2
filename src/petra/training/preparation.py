"""What a trainer looks at before it begins, or goes on: parts that do not fit are refused with a word."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from petra.corrections import Corrected, Correction, Peaks, choose
from petra.execution import GraphRecorder, Place, Recorder, Stage, partition
from petra.execution.stage import OptimizerFactory
from petra.methods import Method
from petra.reversible import Network
from petra.reversible.streams import Streams
from petra.schedule import Order

SchedulerFactory = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


def check_network(network: nn.Module) -> None:
    """Raise ValueError unless the network is its layers, one after the other."""
    if not isinstance(network, nn.Sequential):
        raise ValueError(
            f"network is a {type(network).__name__}: give a list of layers as nn.Sequential or petra.Network"
        )
    own = type(network).forward not in (nn.Sequential.forward, Network.forward)
    if own or network._forward_hooks or network._forward_pre_hooks:
        raise ValueError(
            f"{type(network).__name__} has {'a forward' if own else 'hooks'} of its own, which a trainer would not "
            "call, for it calls layers one by one: make that a layer"
        )


def check_batch(inputs: Streams, targets: Any, microbatch: int, replicas: int = 1) -> None:
    """Raise ValueError for what is sure to be wrong with a micro-batch, before anything of it has been used."""
    if replicas == 1 and any(x.shape[:1] == (0,) for x in inputs):  # a replica may have none of a small one
        raise ValueError(f"micro-batch {microbatch} has no samples: leave it out; nothing of it has been used")
    for x in inputs:
        # On a GPU the look would make the host wait; the loss is looked at anyway. Masks may be -inf.
        if x.device.type == "cpu" and x.is_floating_point() and (x.isnan() | x.isposinf()).any():
            raise ValueError(
                f"the input of micro-batch {microbatch} holds NaN or infinity: "
                "clean the data; nothing of it has been used"
            )
    # Samples come first or, as in sequences of batches, second; of several inputs nobody knows.
    first = inputs[0].shape[:2]
    if len(inputs) == 1 and first and isinstance(targets, Tensor) and targets.ndim and len(targets) not in first:
        raise ValueError(f"{first[0]} inputs but {len(targets)} targets in one micro-batch")


def check_parts(
    loss: object, optimizer: object, scheduler: object, accumulate: object, dtypes: Mapping[str, object]
) -> None:
    """Raise ValueError for the first thing that is not of the kind a trainer needs."""
    if not callable(loss):
        raise ValueError(f"loss is {loss!r}: give a function of outputs and targets, like nn.functional.cross_entropy")
    for name, factory, example in (
        ("optimizer", optimizer, "lambda parameters: torch.optim.SGD(parameters, 0.1)"),
        ("scheduler", scheduler, "lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1000)"),
    ):
        if factory is not None and not callable(factory):
            raise ValueError(
                f"{name} is of type {type(factory).__name__}, but every stage has its own: "
                f"give a function that makes one, like {example}"
            )
    if not isinstance(accumulate, Integral):
        raise ValueError(f"accumulate is {accumulate!r}: give a whole number of micro-batches per update")
    for name, dtype in dtypes.items():
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ValueError(f"{name} is {dtype!r}: give a dtype like torch.bfloat16, or None for float32")


def check_device(device: torch.device) -> None:
    """Raise ValueError for a GPU that is not there."""
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device is {device}, but that GPU is not here: give cpu or another")


def place_stages(stages: int, ranks: int, asked: Sequence[int] | None) -> list[int]:
    """The rank of each stage."""
    if ranks > stages:
        raise ValueError(f"there are {ranks} ranks for {stages} stages: cut the network into {ranks} stages or more")
    if asked is None:
        return [rank for rank, owned in enumerate(partition(stages, ranks)) for _ in owned]
    if len(asked) != stages or set(asked) != set(range(ranks)) or asked[-1] != ranks - 1:
        raise ValueError(
            f"placement is {list(asked)}: give the rank of each of the {stages} stages, each of the {ranks} ranks "
            f"at least once, and the last stage on rank {ranks - 1}"
        )
    return list(asked)


def make_optimizer(factory: OptimizerFactory, parameters: list[nn.Parameter]) -> torch.optim.Optimizer | None:
    """The optimizer of a stage, None where all is frozen, unless it is one that a pipeline cannot have."""
    trained = [p for p in parameters if p.requires_grad]
    if not trained:
        return None
    optimizer = factory(trained)
    if not hasattr(optimizer, "param_groups"):
        raise ValueError(f"the optimizer function gives a {type(optimizer).__name__}: have it return the optimizer")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("LBFGS evaluates the loss several times per step, which a pipeline cannot: use SGD or AdamW")
    if not {p for group in optimizer.param_groups for p in group["params"]} <= set(parameters):
        raise ValueError(
            "the optimizer of a stage is of parameters of other stages: make it of those that the function is given, "
            "like lambda parameters: torch.optim.SGD(parameters, 0.1)"
        )
    return optimizer


def make_scheduler(
    factory: SchedulerFactory | None, optimizer: torch.optim.Optimizer | None
) -> torch.optim.lr_scheduler.LRScheduler | None:
    """The scheduler of a stage, if it is to have one, unless it waits for what it will not be told."""
    if factory is None or optimizer is None:
        return None
    scheduler = factory(optimizer)
    if not hasattr(scheduler, "step"):
        raise ValueError(f"the scheduler function gives a {type(scheduler).__name__}: have it return the scheduler")
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ValueError(
            "ReduceLROnPlateau waits for a metric, but schedulers are stepped after every update: use one that counts"
        )
    return scheduler


def choose_corrections(asked: Sequence[str | Correction], method: Method) -> list[Correction]:
    """The corrections that were asked for, unless they have no meaning for the method."""
    if isinstance(asked, str) or not isinstance(asked, Iterable):
        raise ValueError(f"corrections is {asked!r}: give a list of names")
    chosen = choose(asked)
    if chosen and not method.stale:
        raise ValueError(
            f"{method.name} has no staleness to correct: leave {chosen[0].name} out, or choose a pipelined method such "
            "as petra"
        )
    for correction in chosen:
        if correction.moves_backward and method.stashes_weights:
            raise ValueError(
                f"{method.name} goes backward with the weights of its forward, so there is nothing for "
                f"{correction.name} to correct: leave it out, or choose petra or checkpointed"
            )
    return chosen


def make_corrected(
    corrections: Sequence[Correction],
    parameters: Sequence[nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    order: Order,
    stage: int,
) -> tuple[Corrected | None, Peaks | None]:
    """What a stage is corrected by, None where nothing is stale; and what remembers its learning rates."""
    if not corrections or optimizer is None:
        return None, None
    for correction in corrections:
        correction.check(optimizer)
    peaks, in_flight = Peaks(optimizer), order.staleness(stage)
    if not in_flight:
        return None, peaks
    blank = order.blank_updates(stage)
    return Corrected(corrections, parameters, optimizer, in_flight, order.accumulate, blank, peaks), peaks


def make_recorder(device: torch.device, place: Place, capture: bool | None = None) -> Recorder | None:
    """What records ticks on a GPU; None where they are not to be recorded, or, unless it was asked for, cannot be."""
    processes = place.ranks * place.replicas
    if capture and processes > 1:
        raise ValueError(
            f"capture records the ticks of one process, and there are {processes}: leave it out, or use one process"
        )
    if capture and device.type != "cuda":
        raise ValueError(f"capture records CUDA graphs, and the device is {device}: leave it out, or use a GPU")
    wanted = capture is not False and device.type == "cuda" and processes == 1
    return GraphRecorder(device) if wanted else None


def refuse_other_dtypes(network: nn.Module) -> None:
    """Raise ValueError unless all weights are float32."""
    for name, tensor in network.named_parameters():
        if tensor.dtype != torch.float32:
            raise ValueError(f"{name} is {tensor.dtype}: messages of another precision are for float32 networks only")


def device_of(network: nn.Module) -> torch.device:
    """Where the network's weights are."""
    tensor = next(network.parameters(), None)
    return tensor.device if tensor is not None else torch.device("cpu")


def refuse_sharing(network: nn.Sequential, cuts: list[range]) -> None:
    """Raise ValueError if two stages share a weight or a buffer."""
    owner: dict[Tensor, int] = {}
    for index, cut in enumerate(cuts):
        for layer in cut:
            for name, tensor in (*network[layer].named_parameters(), *network[layer].named_buffers()):
                if owner.setdefault(tensor, index) != index:
                    raise ValueError(
                        f"{name} of layer {layer} belongs to stages {owner[tensor]} and {index}: "
                        "each stage owns its weights, so put the layers that share it into one stage"
                    )


def refuse_unfrozen(frozen: Sequence[nn.Parameter], stages: Sequence[Stage], names: Mapping[Tensor, str]) -> None:
    """Raise ValueError for a weight that was ``frozen``, is meant to be trained by now, and has no optimizer."""
    unfrozen = [p for p in frozen if p.requires_grad]
    if not unfrozen:
        return
    optimizers = [stage.optimizer for stage in stages if stage.optimizer is not None]
    held = {p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    for parameter in unfrozen:
        if parameter not in held:
            raise ValueError(
                f"{names[parameter]} was frozen when the trainer was made, so no optimizer has it: "
                "freeze it again, or make a new Trainer to train it"
            )
