"""Markdown tables of results next to the papers', which name what is missing or has diverged."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from statistics import fmean, stdev
from typing import Any

from plans import PLANS, TABLE_4
from replay import method_of, paper_says
from results import DIVERGED, EVERY_SIGMA, Result, diverged, similarity
from trials import Trial

PAPER_TABLE_2 = {  # accuracy in % on CIFAR-10 after 300 epochs: backprop on the ResNet, on the RevNet, PETRA
    "18": (95.0, 94.9, 94.9),
    "34": (95.5, 95.3, 94.8),
    "50": (94.8, 95.2, 94.5),
}
PROTOTYPE = {  # accuracy in % of one seed after 30 epochs, by schedule and corrections
    ("backprop", ""): 92.2,
    ("lock-step", ""): 89.4,
    ("low-staleness", ""): 91.3,
    ("low-staleness", "predict"): 91.6,
    ("low-staleness", "spike"): 91.2,
    ("low-staleness", "predict,spike"): 91.1,
    ("lock-step", "predict,spike"): 87.8,
}
NOT_RUN = "not run yet"
EXPLODED = 10 * log(10)
"""A training loss worth reporting: ten times that of guessing among ten classes."""
BEGINNING = ("0", "1", "2", "3", "all")
Known = dict[str, Result]


def groups(plan: str) -> dict[str, list[Trial]]:
    """Return the trials of a plan grouped by everything but the seed, in the order of the plan."""
    found: dict[str, list[Trial]] = {}
    for trial in PLANS[plan]:
        found.setdefault(trial.group, []).append(trial)
    return found


def values(trials: Sequence[Trial], known: Known, figure: str = "test_accuracy") -> list[Any]:
    """Return one figure of each trial that is done and has not diverged."""
    return [known[trial.name][figure] for trial in trials if trial.name in known and not diverged(trial, known)]


def percent(trials: Sequence[Trial], known: Known, figure: str = "test_accuracy") -> str:
    """Return the mean and, for several, the standard deviation in %, with the number of diverged trainings."""
    found = values(trials, known, figure)
    lost = sum(diverged(trial, known) for trial in trials)
    note = DIVERGED if lost == len(trials) == 1 else f"{lost} {DIVERGED}"
    if not found:
        return note if lost else NOT_RUN
    spread = f" ± {100 * stdev(found):.2f}" if len(found) > 1 else ""
    return f"{100 * fmean(found):.2f}{spread}" + (f", {note}" if lost else "")


def _cells(trials: Sequence[Trial], known: Known) -> list[str]:
    loss = values(trials, known, "train_loss")
    made = sum(trial.name in known for trial in trials)
    cells = [percent(trials, known, figure) for figure in ("test_accuracy", "best_after_last_drop")]
    return [*cells, f"{fmean(loss):.4f}" if loss else "", f"{made}/{len(trials)}"]


CELLS = ["last epoch, %", "best after the last drop, %", "training loss", "seeds"]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [list(header), ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def chosen(plan: str, model: str, known: Known) -> str | None:
    """Return the trained group of PETRA without corrections that has the lowest training loss."""
    found = {
        name: fmean(loss)
        for name, trials in groups(plan).items()
        if name.startswith(f"{model}-petra-")
        and "corrections" not in trials[0].options
        and not any(diverged(trial, known) for trial in trials)
        and (loss := values(trials, known, "train_loss"))
    }
    return min(found, key=found.__getitem__) if found else None


def table2(known: Known) -> str:
    """Return Table 2 of the PETRA paper, with the gap between PETRA and backprop on the same network."""
    rows = []
    for name, trials in groups("table2").items():
        options = trials[0].options
        model, k = options["model"], options["accumulate"]
        place = 2 if options["method"] == "petra" else model.startswith("revnet")
        batch = f"{options.get('batch_size', 64)}" + (f" × {k}" if k > 1 else "")
        how = f"PETRA, {options['schedule']}, k = {k}" if options["method"] == "petra" else f"backprop, batch {batch}"
        how += f", {options['corrections']}" if "corrections" in options else ""
        how += " (lowest training loss)" if name == chosen("table2", model, known) else ""
        first, backprop = next(pair for pair in groups("table2").items() if pair[0].startswith(f"{model}-backprop-k1"))
        ours, theirs = values(trials, known), values(backprop, known)
        gap = f"{100 * (fmean(ours) - fmean(theirs)):+.2f}" if ours and theirs and name != first else ""
        rows.append([model, how, *_cells(trials, known), gap, f"{PAPER_TABLE_2[model[-2:]][place]}"])
    return markdown(["network", "method", *CELLS, "gap to its backprop", "paper (300 epochs)"], rows)


def full(known: Known) -> str:
    """Return the table of the one training with the paper's number of epochs."""
    trials = PLANS["full"]
    k = f"k = {trials[0].options['accumulate']}"
    return markdown(["PETRA, RevNet-18, 300 epochs", *CELLS, "paper"], [[k, *_cells(trials, known), "94.9"]])


def figure4(known: Known) -> str:
    """Return Figure 4 as numbers: means over the epochs after the last drop, at most ten of them."""
    rows = []
    for k in (1, 2, 4, 8, 16, 32):
        pair = [
            [t for t in PLANS["figure4"] if t.options["accumulate"] == k and t.options["method"] == method]
            for method in ("backprop", "petra")
        ]
        means = [values(trials, known, "mean_after_last_drop") for trials in pair]
        gap = f"{100 * (fmean(means[1]) - fmean(means[0])):+.2f}" if all(means) else ""
        rows.append([str(k), *(percent(trials, known, "mean_after_last_drop") for trials in pair), gap])
    return markdown(["k", "backprop, %", "PETRA, %", "difference"], rows)


def table4(known: Known) -> str:
    """Return Table 4: the cost of each approximation."""
    rows = []
    for method, (delayed, inputs, weights, paper) in TABLE_4.items():
        cells = []
        for model, theirs in zip(("revnet18", "revnet34", "revnet50"), paper, strict=True):
            own = [t for t in PLANS["table4"] if (t.options["method"], t.options["model"]) == (method, model)]
            cells += [percent(own, known), str(theirs)]
        rows.append([delayed, inputs, weights, f"`{method}`", *cells])
    header = ["delayed", "input kept", "weights kept", "method"]
    for depth in (18, 34, 50):
        header += [f"RevNet-{depth}, %", "paper (CIFAR-100)"]
    return markdown(header, rows)


def corrections(known: Known) -> str:
    """Return the effect of each correction without accumulation."""
    backprop = values(next(iter(groups("corrections").values())), known)
    rows = []
    for trials in groups("corrections").values():
        options = trials[0].options
        key = (options.get("schedule", "backprop"), options.get("corrections", ""))
        momentum = options.get("momentum")
        ours = values(trials, known)
        gap = f"{100 * (fmean(ours) - fmean(backprop)):+.2f}" if ours and backprop and key[0] != "backprop" else ""
        name = f"PETRA, {key[0]}" if key[0] != "backprop" else "backprop"
        name += f", momentum {momentum}" if momentum else ""
        name += ", without Nesterov" if "no_nesterov" in options else ""
        name += f", {options['comm_dtype']} messages" if "comm_dtype" in options else ""
        other = momentum or "no_nesterov" in options or "comm_dtype" in options
        prototype = "" if other else str(PROTOTYPE.get(key, ""))
        rows.append([name, key[1] or "–", *_cells(trials, known), gap, prototype])
    return markdown(["", "corrections", *CELLS, "gap to backprop", "prototype"], rows)


def fidelity(known: Known) -> str:
    """Return mean cosines over the training for the first, a middle and the last reversible stage."""
    rows = []
    names = ("cosine", "delayed_cosine", "cosine_to_delayed", "norm_ratio", "norm_ratio_to_delayed")
    for trial in PLANS["fidelity"]:
        for stage in (1, 4, 8):
            cells = [NOT_RUN] * len(names)
            if trial.name in known:
                own = [row for row in similarity(known[trial.name]) if row["stage"] == stage]
                found = [[row[name] for row in own if row[name] is not None] for name in names]
                cells = [f"{fmean(v):.3f}" if v else "" for v in found]
            rows.append([_named(trial, known), str(stage), *cells])
    header = ["training", "stage", "cos(used, exact)", "cos(delayed, exact)", "cos(used, delayed)"]
    return markdown([*header, "‖used‖/‖exact‖", "‖used‖/‖delayed‖"], rows)


def _named(trial: Trial, known: Known) -> str:
    return trial.group + (f" ({DIVERGED})" if diverged(trial, known) else "")


def replay(known: Known) -> str:
    """Return Table 2 of the Features Replay paper, and σ of its Figure 3 as numbers."""
    rows = []
    for trial in PLANS["replay"]:
        options = trial.options
        backprop = next((t for t in PLANS["replay"] if _is_backprop(t, options["model"], trial.seed)), trial)
        cells = _errors(trial, backprop, known)
        what = [options["model"], method_of(trial), str(options["stages"]), str(trial.seed)]
        rows.append([*what, *cells[:3], paper_says(trial), cells[3]])
    header = ["network", "method", "K", "seed", "best test error", "last", "gap to backprop", "paper, best", "epochs"]
    return markdown(header, rows) + "\n\n" + _sigmas([t for t in PLANS["replay"] if t.watched], known)


def _is_backprop(trial: Trial, model: str, seed: int) -> bool:
    return (trial.options["model"], trial.options["method"], trial.seed) == (model, "backprop", seed)


def _errors(trial: Trial, backprop: Trial, known: Known) -> list[str]:
    """Best and last test error, the gap of the best to backprop's, and the number of epochs."""
    if trial.name not in known:
        return [NOT_RUN, "", "", ""]
    result = known[trial.name]
    accuracies = result["test_accuracies"]
    epochs = f"{len(accuracies)}/{result['config']['epochs']}"
    highest = max(result["train_losses"], default=0.0)
    if highest > EXPLODED:
        epochs += f", training loss up to {highest:,.0f}"
    best = f"{100 * (1 - max(accuracies)):.2f} %" if accuracies else ""
    if diverged(trial, known):
        return [best, DIVERGED, "", f"{epochs}, {DIVERGED}"]
    reference = values([backprop], known, "test_accuracies")
    gap = ""
    if reference and backprop is not trial:
        gap = f"{100 * (max(reference[0]) - max(accuracies)):+.2f}"
    return [best, f"{100 * (1 - accuracies[-1]):.2f} %", gap, epochs]


def _sigmas(trials: Sequence[Trial], known: Known) -> str:
    rows = []
    for trial in trials:
        own = {row["stage"]: row for row in known.get(trial.name, {}).get("sigma", [])}
        cells = [_sigma(own.get(module)) for module in range(4)] if trial.name in known else [NOT_RUN] * 4
        rows.append([_named(trial, known), *cells, str(own[3]["measurements"]) if 3 in own else ""])
    return markdown(["σ: mean (lowest)", *(f"module {module}" for module in range(4)), "measurements"], rows)


def _sigma(row: dict[str, float | None] | None) -> str:
    if row is None or row["sigma"] is None:
        return ""
    return f"{row['sigma']:.3f} ({row['lowest_sigma']:.3f})"


def beginning(known: Known) -> str:
    """Return σ at every update of a first epoch that has a gradient, of each module and of all together."""
    rows = []
    for trial in PLANS["beginning"]:
        sigmas = known.get(trial.name, {}).get(EVERY_SIGMA, {})
        cells = [_lowest(sigmas.get(of)) for of in BEGINNING] if trial.name in known else [NOT_RUN] * len(BEGINNING)
        rows.append([_named(trial, known), *cells])
    header = [f"module {of}" if of != "all" else of for of in BEGINNING]
    return markdown(["σ: mean (lowest; number not above 0)", *header], rows)


def _lowest(sigmas: list[float | None] | None) -> str:
    found = [sigma for sigma in sigmas or [] if sigma is not None]
    return (
        f"{fmean(found):.3f} ({min(found):.3f}; {sum(sigma <= 0 for sigma in found)} of {len(found)})" if found else ""
    )


TABLES = {f.__name__: f for f in (table2, full, figure4, table4, corrections, fidelity, replay, beginning)}
"""The table of each plan."""
