"""The state of a stage under the names of the network, so that it can be read at another cut."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from petra.corrections import Corrected
from petra.execution import Stage
from petra.reversible.streams import laid_out_like

Names = Mapping[Tensor, str]

_WAYS = ("foreach", "fused", "capturable", "differentiable")
"""Settings of an optimizer that say how it computes, not what: they belong to the device, and stay as they are."""


def save_weights(stage: Stage, network: Mapping[str, Tensor], names: Names) -> dict[str, Any]:
    """What replicas of a stage have in common: its part of ``network``, its optimizer, scheduler, stash and so on."""
    return {
        "network": dict(network),
        "optimizer": None if stage.optimizer is None else _named(stage.optimizer, names),
        "scheduler": None if stage.scheduler is None else stage.scheduler.state_dict(),
        "stash": None if stage.stash is None else stage.stash.state_dict(),
        "corrections": None if stage.corrected is None else _named_corrections(stage.corrected, names),
        "synthesizer": None if stage.synthesizer is None else stage.synthesizer.state_dict(),
        "updates": stage.updates,
    }


def load_weights(stage: Stage, saved: Mapping[str, Any], names: Names) -> None:
    """Take up what `save_weights` gave for the very same stage; the network is loaded elsewhere."""
    if stage.optimizer is not None:
        _load_optimizer(stage.optimizer, [saved["optimizer"]], names)
    if stage.scheduler is not None:
        stage.scheduler.load_state_dict(saved["scheduler"])
    if stage.stash is not None:
        stage.stash.load_state_dict(saved["stash"])
    stage.updates = saved["updates"]
    if stage.corrected is not None:
        _load_corrections(stage, [saved["corrections"]], saved["corrections"], names)
    if stage.synthesizer is not None:
        stage.synthesizer.load_state_dict(saved["synthesizer"])


def load_drained(stage: Stage, saved: Iterable[Mapping[str, Any]], names: Names) -> None:
    """Take up the states of stages that were cut differently, and drained, so that nothing is in flight."""
    saved = list(saved)
    stage.updates = max(state["updates"] for state in saved)
    if stage.synthesizer is not None:  # where no stage ended before, a new one begins
        synthesizers = [state["synthesizer"] for state in saved if state["synthesizer"] is not None]
        for found in (one for one in synthesizers if one["above"] == stage.synthesizer.above):
            stage.synthesizer.load_state_dict(found)
    if stage.optimizer is None:
        return
    if stage.corrected is not None:
        corrections = [state["corrections"] for state in saved if state["corrections"] is not None]
        _load_corrections(stage, corrections, {"began": {}}, names)
    with_optimizer = [state for state in saved if state["optimizer"] is not None]
    _load_optimizer(stage.optimizer, [state["optimizer"] for state in with_optimizer], names)
    if stage.scheduler is not None:
        stage.scheduler.load_state_dict(_scheduler_state(stage.optimizer, with_optimizer, names))


def _named(optimizer: torch.optim.Optimizer, names: Names) -> dict[str, Any]:
    groups = []
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        groups.append({"names": [names[p] for p in group["params"]], "settings": settings})
    return {"state": {names[p]: dict(state) for p, state in optimizer.state.items()}, "groups": groups}


def _named_corrections(corrected: Corrected, names: Names) -> dict[str, Any]:
    found = corrected.state_dict()
    return {**found, "state": {names[p]: values for p, values in found["state"].items()}}


def _load_corrections(stage: Stage, saved: list[dict[str, Any]], flight: dict[str, Any], names: Names) -> None:
    assert stage.corrected is not None
    states = {name: values for one in saved for name, values in one["state"].items()}
    found = {p: states[names[p]] for p in stage.parameters if names[p] in states}
    stage.corrected.load_state_dict({**flight, "state": found}, stage.updates)


def _load_optimizer(optimizer: torch.optim.Optimizer, saved: list[dict[str, Any]], names: Names) -> None:
    states = {name: _counted_here(state) for one in saved for name, state in one["state"].items()}
    settings = {name: group["settings"] for one in saved for group in one["groups"] for name in group["names"]}
    ordered = [names[p] for group in optimizer.param_groups for p in group["params"]]
    index = {name: i for i, name in enumerate(ordered)}
    groups = [
        {
            **settings[names[group["params"][0]]],
            **{way: group[way] for way in _WAYS if way in group},
            "params": [index[names[p]] for p in group["params"]],
        }
        for group in optimizer.param_groups
    ]
    parameters = {names[p]: p for group in optimizer.param_groups for p in group["params"]}
    found = {index[name]: _laid_out(states[name], parameters[name]) for name in ordered if name in states}
    optimizer.load_state_dict({"state": found, "param_groups": groups})


def _counted_here(state: dict[str, Any]) -> dict[str, Any]:
    """The same with AdamW's count of steps in the host's memory; on a GPU, reading it would make the host wait."""
    return {key: value.cpu() if key == "step" and isinstance(value, Tensor) else value for key, value in state.items()}


def _laid_out(state: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
    """The same with averages in the memory layout of the parameter, which may have been another when it was saved."""

    def same(value: Any) -> bool:
        return isinstance(value, Tensor) and value.shape == parameter.shape

    return {key: laid_out_like(value, parameter) if same(value) else value for key, value in state.items()}


def _scheduler_state(optimizer: torch.optim.Optimizer, saved: list[Mapping[str, Any]], names: Names) -> dict[str, Any]:
    """A scheduler's state put together for other groups: lists that have an entry a group are regrouped."""
    where: dict[str, tuple[Mapping[str, Any], int]] = {}
    for state in saved:
        for number, group in enumerate(state["optimizer"]["groups"]):
            where.update(dict.fromkeys(group["names"], (state["scheduler"], number)))
    sources = [where[names[group["params"][0]]] for group in optimizer.param_groups]
    groups_of = {id(state["scheduler"]): len(state["optimizer"]["groups"]) for state in saved}
    example = sources[0][0]
    result = dict(example)
    for key, value in example.items():
        if isinstance(value, list) and len(value) == groups_of[id(example)]:
            result[key] = [scheduler[key][number] for scheduler, number in sources]
    return result
