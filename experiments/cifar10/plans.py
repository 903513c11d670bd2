"""The plans: which trainings each table or figure needs, the most important first.

The plans of the PETRA paper are here, those of the Features Replay paper in replay.py. A training that two plans need
has one name and runs once.
"""

from __future__ import annotations

from typing import Any

from replay import beginning, replay
from trials import Trial

SHORT: dict[str, Any] = {"epochs": 30, "warmup_epochs": 2, "lr_milestones": "0.5,0.8", "batch_size": 64}
"""Thirty epochs without accumulation, for the study of staleness; lr is 0.025 by the paper's rule."""


BEST_K = 8
"""The accumulation, of 4 and 8, with which PETRA has the lowest training loss of RevNet-18 after 100 epochs."""


def trial(model: str, method: str, seed: int = 0, *, tag: str = "", command: str = "train", **options: Any) -> Trial:
    """Return a training whose name describes it; exact methods have one stage, the others one stage per block."""
    exact = method in ("backprop", "reversible")
    stages = 1 if exact else 10 if model.endswith("18") else 18
    made = {"model": model, "method": method, "stages": stages, **options}
    if options.get("schedule") == "lock-step" and stages == 18 and "lr" not in options:
        made["lr"] = 0.025 * options["accumulate"]  # the paper's rule; the default is lower, because of the staleness
    words = [model, method]
    if not exact and "schedule" in options:
        words.append(options["schedule"])
    if corrections := options.get("corrections"):
        words.append(corrections.replace(",", "+").replace(":", ""))
    words += [f"k{options['accumulate']}", f"e{options['epochs']}", *([tag] if tag else [])]
    words += ["watched"] if command == "fidelity" else []
    return Trial("-".join([*words, f"s{seed}"]), made, seed, command)


def _table2() -> list[Trial]:
    hundred: dict[str, Any] = {"epochs": 100}
    paper = {**hundred, "batch_size": 128, "lr": 0.1, "accumulate": 1}  # of standard backprop

    def backprop(model: str, seed: int = 0) -> Trial:
        return trial(model, "backprop", seed, **paper)

    def petra(model: str, k: int, seed: int = 0, schedule: str = "lock-step", **more: Any) -> Trial:
        return trial(model, "petra", seed, schedule=schedule, accumulate=k, **hundred, **more)

    def corrected(model: str, k: int) -> Trial:
        return petra(model, k, schedule="low-staleness", corrections="predict,inertia:4")

    plan = []
    for seed in (0, 1, 2):
        plan += [backprop("revnet18", seed), petra("revnet18", BEST_K, seed), backprop("resnet18", seed)]
    for model in ("revnet34", "revnet50"):
        plan += [backprop(model), petra(model, BEST_K), petra(model, BEST_K, schedule="low-staleness")]
        plan.append(corrected(model, BEST_K))
    plan += [petra("revnet18", k, seed) for k, seed in ((4, 0), (4, 1), (4, 2), (2, 0), (16, 0))]
    # The effect of staleness alone: backprop with PETRA's batch and learning rate, and PETRA with corrections.
    plan += [trial("revnet18", "backprop", accumulate=k, **hundred) for k in (BEST_K, 4)]
    plan += [corrected("revnet18", 4), corrected("revnet18", BEST_K)]
    return [*plan, backprop("resnet34"), backprop("resnet50"), petra("revnet18", 1)]


def _figure4() -> list[Trial]:
    plan = []
    for k in (1, 32, 4, 16, 2, 8):
        for method in ("petra", "backprop"):
            schedule: dict[str, Any] = {"schedule": "lock-step"} if method == "petra" else {}
            plan.append(trial("revnet18", method, **schedule, accumulate=k, epochs=30, tag="figure4"))
    return plan


def _short(method: str, seed: int = 0, model: str = "revnet18", **options: Any) -> Trial:
    return trial(model, method, seed, **options, accumulate=1, **SHORT)


TABLE_4 = {  # delayed, input buffer, parameter buffer; accuracy on CIFAR-100 of RevNet-18, 34 and 50
    "backprop": ("no", "yes", "yes", (77.5, 78.1, 78.5)),
    "delayed": ("yes", "yes", "yes", (76.5, 76.3, 77.7)),
    "checkpointed": ("yes", "yes", "no", (76.4, 75.5, 76.7)),
    "petra-stashed": ("yes", "no", "yes", (75.4, 76.4, 78.3)),
    "petra": ("yes", "no", "no", (75.9, 75.2, 77.2)),
}


def _table4() -> list[Trial]:
    where = [("revnet18", 0), ("revnet18", 1), ("revnet18", 2), ("revnet34", 0), ("revnet50", 0)]
    return [
        _short(method, seed, model, **({} if method == "backprop" else {"schedule": "lock-step"}))
        for model, seed in where
        for method in TABLE_4
    ]


_MAIN = ("", "predict", "coast", "coast:0.8")
_OTHERS: tuple[str, ...] = ("spike", "predict,spike", "shrink:0.9", "shrink:0.8", "reschedule:3910")
_OTHERS += ("discrepancy:0.135", "coast:0.8,shrink:0.9", "discrepancy:0.135,reschedule:3910")


def _momentum(m: float) -> dict[str, Any]:
    """Options for another momentum with the same lr/(1 - m)."""
    return {"momentum": m, "lr": round(0.25 * (1 - m), 6), "tag": f"m{m:g}"}


def _corrected(schedule: str, corrections: str, seed: int = 0) -> Trial:
    return _short("petra", seed, schedule=schedule, **({"corrections": corrections} if corrections else {}))


def _corrections() -> list[Trial]:
    plan = []
    for seed in (0, 1, 2):
        plan += [_short("backprop", seed), *(_corrected("low-staleness", c, seed) for c in _MAIN)]
        plan.append(_corrected("lock-step", "", seed))
        if seed == 0:
            plan += [_corrected("low-staleness", c) for c in _OTHERS]
    plan += [_corrected("lock-step", c) for c in ("predict", "coast:0.8", "predict,spike")]
    for m in (0.5, 0.97):
        plan += [_short("petra", schedule="low-staleness", **_momentum(m)), _short("backprop", **_momentum(m))]
    # With more momentum, weights move more smoothly and are easier to predict.
    smooth = [(0.97, "coast", 0), (0.99, "coast", 0), (0.97, "predict", 0), (0.97, "coast", 1), (0.97, "coast", 2)]
    plan += [_short("petra", s, schedule="low-staleness", corrections=c, **_momentum(m)) for m, c, s in smooth]
    plan += [_corrected("low-staleness", f"{c},inertia:{f:g}") for c in ("predict", "coast") for f in (1, 4)]
    plan += [_corrected("low-staleness", "predict,inertia:4", seed) for seed in (1, 2)]
    for seed in (3, 4, 5):  # not used in the choice of a correction
        plan += [_short("backprop", seed), _corrected("low-staleness", "predict,inertia:4", seed)]
    plan += [_corrected("low-staleness", f"predict,inertia:{f:g}") for f in (8, 16)]
    plan.append(_corrected("low-staleness", "inertia:4"))
    # The effect of Nesterov's look-ahead, which all others have, and of messages in half precision.
    plain = {"no_nesterov": True, "tag": "heavy-ball"}
    plan += [_short("petra", schedule="low-staleness", **plain), _short("backprop", **plain)]
    narrow = {"comm_dtype": "bf16", "tag": "bf16-messages"}
    return [*plan, _short("petra", schedule="low-staleness", corrections="predict,inertia:4", **narrow)]


def _fidelity() -> list[Trial]:
    watched: dict[str, Any] = {
        "command": "fidelity",
        "accumulate": 1,
        "every": 260,  # three times per epoch; the paper has fifteen
        **SHORT,
    }
    return [
        trial("revnet18", "petra", schedule="lock-step", **watched),
        trial("revnet18", "petra", schedule="low-staleness", **watched),
        trial("revnet18", "petra", schedule="low-staleness", corrections="predict", **watched),
        trial("revnet18", "delayed", schedule="lock-step", **watched),
    ]


PLANS: dict[str, list[Trial]] = {
    "table2": _table2(),
    "full": [trial("revnet18", "petra", schedule="lock-step", accumulate=BEST_K, epochs=300)],
    "corrections": _corrections(),
    "table4": _table4(),
    "figure4": _figure4(),
    "fidelity": _fidelity(),
    "replay": replay(),
    "beginning": beginning(),
}
"""All plans by name."""
