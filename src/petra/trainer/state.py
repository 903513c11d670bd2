"""The state of a stage under the parameter names of the network, so that it can be loaded at another cut."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from petra.corrections import StageCorrections
from petra.optim import optimizers_of
from petra.pipeline import Stage
from petra.reversible.streams import copied, laid_out_like, plain_parts

Names = Mapping[Tensor, str]

_IMPLEMENTATION_SETTINGS = ("foreach", "fused", "capturable", "differentiable")
"""Optimizer settings that affect speed, not results. They depend on the device, and are not loaded."""

_SCHEDULED = ("initial_lr", "min_lr", "max_lr", "base_momentum", "max_momentum", "swa_lr")
"""Settings that schedulers add to those of an optimizer."""

_OF_GROUPS = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums")
"""Lists in the state of PyTorch's schedulers with an entry for every parameter group."""

_EXTRA = "_extra_state"
"""The end of the names under which modules save `get_extra_state`."""


def moved(state: Any, device: torch.device) -> Any:
    """Return a copy of the state with copies of its tensors on ``device``."""
    with torch.no_grad():
        return tree_map_only(Tensor, lambda t: copied(t, device), state)


def check_state(state: Mapping[str, Any]) -> None:
    """Raise ValueError unless this is the state of a trainer (and not of its network, for example)."""
    if not {"layout", "executor", "stages"} <= state.keys():
        raise ValueError(
            f"the state has {', '.join(list(state)[:3]) or 'nothing'}, not layout, executor and stages: "
            "give the state_dict() of a Trainer"
        )


def check_stages(state: Mapping[str, Any], wanted: Iterable[int]) -> None:
    """Raise ValueError unless ``state`` has these stages; the state of one rank has only its own."""
    if missing := sorted(set(wanted) - state["stages"].keys()):
        held = ", ".join(map(str, sorted(state["stages"]))) or "none"
        raise ValueError(
            f"stage {missing[0]} is not in this state, which has {held}: it is the state of one rank; "
            'merge the "stages" of the states of all ranks'
        )


def check_network(own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raise RuntimeError unless ``saved`` has all weights of ``own``, in their shapes."""
    if missing := set(own) - set(saved):
        raise RuntimeError(f"{min(missing)} is not in the checkpoint")
    for name, value in own.items():
        if isinstance(value, Tensor) and value.shape != saved[name].shape:
            found, wanted = list(saved[name].shape), list(value.shape)
            raise RuntimeError(f"{name} has shape {found} in the checkpoint, not {wanted}")


def load_network(network: nn.Module, own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Load the part of ``saved`` that is in ``own``, which is a part of the network's state."""
    for name, value in own.items():
        module, _, last = name.rpartition(".")
        if last == _EXTRA:
            network.get_submodule(module).set_extra_state(copy.deepcopy(saved[name]))
        else:
            value.copy_(saved[name])


def check_weights(stage: Stage, saved: Iterable[Mapping[str, Any]], names: Names) -> None:
    """Raise ValueError unless optimizer and scheduler of the stage are of the same kind as in ``saved``."""
    if stage.optimizer is None:
        return
    trained = [state for state in saved if state["optimizer"] is not None]
    settings = _settings(state["optimizer"] for state in trained)
    for group in stage.optimizer.param_groups:
        for name in (names[p] for p in group["params"]):
            if name not in settings:
                raise ValueError(
                    f"{name} was not trained when the checkpoint was written: freeze the same layers to resume it"
                )
            # Other versions of PyTorch may have more settings or fewer, not others.
            lacking = _defaults(stage.optimizer, group).keys() - settings[name].keys() - {*_IMPLEMENTATION_SETTINGS}
            foreign = settings[name].keys() - group.keys() - {*_IMPLEMENTATION_SETTINGS, *_SCHEDULED}
            if lacking and foreign:
                raise ValueError(
                    f"the checkpoint was written with an optimizer that has {', '.join(sorted(foreign))}, not "
                    f"{type(stage.optimizer).__name__}: use the same optimizer to resume it"
                )
    if stage.scheduler is not None and any(state["scheduler"] is None for state in trained):
        raise ValueError("the checkpoint was written without a scheduler: leave it out to resume it")
    if stage.corrections is not None:
        loaded = copy.copy(stage.optimizer)  # as it will be, with the momentum of the checkpoint
        groups = [(group, names[group["params"][0]]) for group in loaded.param_groups if group["params"]]
        loaded.param_groups = [{**group, **settings[first]} for group, first in groups]
        for correction in stage.corrections.corrections:
            correction.check(loaded)


def _defaults(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default settings of the optimizer that a group belongs to."""
    owners = [one for one in optimizers_of(optimizer) if any(own is group for own in one.param_groups)]
    return owners[0].defaults if owners else optimizer.defaults


def save_weights(stage: Stage, network: Mapping[str, Tensor], names: Names) -> dict[str, Any]:
    """Return what replicas of a stage share: its part of ``network``, optimizer, scheduler, stash and so on."""
    return {
        "network": dict(network),
        "optimizer": None if stage.optimizer is None else _named(stage.optimizer, names),
        "scheduler": None if stage.scheduler is None else stage.scheduler.state_dict(),
        "stash": None if stage.stash is None else stage.stash.state_dict(),
        "corrections": None if stage.corrections is None else _named_corrections(stage.corrections, names),
        "highest": None if stage.peak_lrs is None else {names[p]: v for p, v in stage.peak_lrs.state_dict().items()},
        "synthesizer": None if stage.synthesizer is None else stage.synthesizer.state_dict(),
        "ema": None if stage.ema is None else stage.ema.state_dict(),
        "updates": stage.updates,
    }


def load_weights(stage: Stage, saved: Mapping[str, Any], names: Names) -> None:
    """Load a copy of what `save_weights` returned for the same stage; the network is loaded separately."""
    device = stage.layers.settings.device
    if stage.optimizer is not None:
        _load_optimizer(stage.optimizer, [saved], names, device)
    if stage.scheduler is not None:
        stage.scheduler.load_state_dict(moved(saved["scheduler"], device))
    if stage.stash is not None:
        stage.stash.load_state_dict(moved(saved["stash"], device))
    stage.updates = saved["updates"]
    _load_peaks(stage, [saved], names)
    if stage.corrections is not None:
        _load_corrections(stage, [saved["corrections"]], saved["corrections"], names, device)
    if stage.synthesizer is not None:
        stage.synthesizer.load_state_dict(moved(saved["synthesizer"], device))
    if stage.ema is not None:
        stage.ema.load_state_dict(saved.get("ema") or {})


def load_drained(stage: Stage, saved: Iterable[Mapping[str, Any]], names: Names, blank: int) -> None:
    """Load the states of stages that were cut differently, taken when nothing was in flight.

    The stage makes ``blank`` updates with zero gradients before its first backward.
    """
    saved = list(saved)
    device = stage.layers.settings.device
    held = {names[p] for p in stage.parameters}
    before = [state for state in saved if held & state["network"].keys()]
    stage.updates = max(state["updates"] for state in before or saved)
    stage.load_in_flight_state_dict({"saved": {}, "gradients": [None] * len(stage.parameters), "accumulated": 0})
    if stage.stash is not None:
        stage.stash.load_state_dict({"version": stage.updates, "needed": {}, "copies": {}})
    if stage.ema is not None:
        stage.ema.load_state_dict({name: value for state in saved for name, value in (state.get("ema") or {}).items()})
    if stage.synthesizer is not None:
        synthesizers = {
            state["synthesizer"]["next_layer_index"]: state["synthesizer"] for state in saved if state["synthesizer"]
        }
        # Where no stage ended before, the synthesizer is new.
        found = synthesizers.get(stage.synthesizer.next_layer_index, {"network": None})
        stage.synthesizer.load_state_dict(moved(found, device))
    if stage.optimizer is None:
        return
    with_optimizer = [state for state in saved if state["optimizer"] is not None]
    _load_optimizer(stage.optimizer, with_optimizer, names, device)
    if stage.scheduler is not None:
        own = stage.scheduler.state_dict()
        stage.scheduler.load_state_dict(moved(_scheduler_state(own, stage.optimizer, with_optimizer, names), device))
    _load_peaks(stage, with_optimizer, names)
    if stage.corrections is not None:  # after the optimizer, because corrections read its momentum
        corrections = [state["corrections"] for state in saved if state["corrections"] is not None]
        _load_corrections(stage, corrections, {"updates_before": {}, "zero_gradient_updates": blank}, names, device)


def _named(optimizer: torch.optim.Optimizer, names: Names) -> dict[str, Any]:
    groups = []
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append({"names": [names[p] for p in group["params"]], "settings": settings})
    return {"state": {names[p]: dict(state) for p, state in optimizer.state.items()}, "groups": groups}


def _named_corrections(stage_corrections: StageCorrections, names: Names) -> dict[str, Any]:
    found = stage_corrections.state_dict()
    return {**found, "state": {names[p]: values for p, values in found["state"].items()}}


def _settings(saved: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the optimizer settings of each parameter."""
    return {name: group["settings"] for one in saved for group in one["groups"] for name in group["names"]}


def _load_peaks(stage: Stage, saved: Sequence[Mapping[str, Any]], names: Names) -> None:
    if stage.peak_lrs is None:
        return
    highest: dict[str, float] = {}
    for state in saved:
        highest |= state["highest"] or {}
    stage.peak_lrs.load_state_dict({p: highest[names[p]] for p in stage.parameters if names[p] in highest})


def _load_corrections(
    stage: Stage, saved: list[dict[str, Any]], flight: dict[str, Any], names: Names, device: torch.device
) -> None:
    assert stage.corrections is not None
    states = {name: values for one in saved for name, values in one["state"].items()}
    found = {p: moved(states[names[p]], device) for p in stage.parameters if names[p] in states}
    stage.corrections.load_state_dict({**flight, "state": found}, stage.updates)


def _load_optimizer(
    optimizer: torch.optim.Optimizer, saved: Sequence[Mapping[str, Any]], names: Names, device: torch.device
) -> None:
    states = {name: state for one in saved for name, state in one["optimizer"]["state"].items()}
    settings = _settings(one["optimizer"] for one in saved)
    parameters = {names[p]: p for group in optimizer.param_groups for p in group["params"]}
    index = {name: i for i, name in enumerate(parameters)}
    groups = [
        {
            **(moved(settings[names[group["params"][0]]], device) if group["params"] else group),
            **{way: group[way] for way in _IMPLEMENTATION_SETTINGS if way in group},
            "params": [index[names[p]] for p in group["params"]],
        }
        for group in optimizer.param_groups
    ]
    found = {
        index[name]: _counted_here(_laid_out(moved(states[name], device), parameter))
        for name, parameter in parameters.items()
        if name in states
    }
    optimizer.load_state_dict({"state": found, "param_groups": groups})
    # PyTorch gives all but the count of steps the dtype of the parameter; NAdam's product of momenta has its own.
    weights = {name: value for one in saved for name, value in one["network"].items()}
    for name in states.keys() & parameters.keys() & weights.keys():
        for key, value in found[index[name]].items():
            if isinstance(value, Tensor) and value.dtype != weights[name].dtype:
                loaded = optimizer.state[parameters[name]]
                loaded[key] = value.to(loaded[key].device)


def _counted_here(state: dict[str, Any]) -> dict[str, Any]:
    """Move step counts to host memory, because reading them on a GPU would make the host wait.

    PyTorch moves those of fused and capturable optimizers back to the device.
    """
    return {key: value.cpu() if key == "step" and isinstance(value, Tensor) else value for key, value in state.items()}


def _laid_out(state: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
    """Bring averages to the memory layout of the parameter, which may have been another when the state was saved."""

    def same(value: Any) -> bool:
        return isinstance(value, Tensor) and value.shape == parameter.shape and len(plain_parts(value)) == 1

    return {key: laid_out_like(value, parameter) if same(value) else value for key, value in state.items()}


def _scheduler_state(
    own: Mapping[str, Any], optimizer: torch.optim.Optimizer, saved: list[Mapping[str, Any]], names: Names
) -> dict[str, Any]:
    """Assemble the state of a scheduler for other parameter groups; empty groups keep their ``own`` state."""
    where: dict[str, tuple[Mapping[str, Any], int]] = {}
    for state in saved:
        for number, group in enumerate(state["optimizer"]["groups"]):
            where.update(dict.fromkeys(group["names"], (state["scheduler"], number)))
    groups = enumerate(optimizer.param_groups)
    sources = [where[names[g["params"][0]]] if g["params"] else (own, number) for number, g in groups]
    example = next((scheduler for scheduler, _ in sources if scheduler is not own), own)
    return _regrouped(example, sources)


def _regrouped(example: Mapping[str, Any], sources: list[tuple[Mapping[str, Any], int]]) -> dict[str, Any]:
    """Copy ``example``; take each per-group entry from its original scheduler and group."""
    result = dict(example)
    for key, value in example.items():
        if key in _OF_GROUPS and value:
            result[key] = [scheduler[key][number] for scheduler, number in sources]
        elif key == "_schedulers":
            parts = range(len(value))
            result[key] = [_regrouped(value[i], [(s[key][i], number) for s, number in sources]) for i in parts]
    return result


def weights_hash(network: Mapping[str, Any]) -> str:
    """Return a hash of all weights and running statistics.

    Args:
        network: The `state_dict()` of a network.

    Returns:
        The SHA-256 in hexadecimal digits.
    """
    digest = hashlib.sha256()
    for name, value in network.items():
        digest.update(name.encode())
        if isinstance(value, Tensor):  # a module's extra state can be anything
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
