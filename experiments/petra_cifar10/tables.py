"""Tables from results, in Markdown: ours beside the paper's, with what is missing named."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, stdev

from plans import PLANS, TABLE_4, Trial
from results import Result

PAPER_TABLE_2 = {  # accuracy in % on CIFAR-10 after 300 epochs: backprop on the ResNet, on the RevNet, PETRA
    "18": (95.0, 94.9, 94.9),
    "34": (95.5, 95.3, 94.8),
    "50": (94.8, 95.2, 94.5),
}
PROTOTYPE = {  # accuracy in % of one seed after 30 epochs, by order and corrections
    ("backprop", ""): 92.2,
    ("lock-step", ""): 89.4,
    ("low-staleness", ""): 91.3,
    ("low-staleness", "predict"): 91.6,
    ("low-staleness", "spike"): 91.2,
    ("low-staleness", "predict,spike"): 91.1,
    ("lock-step", "predict,spike"): 87.8,
}
NOT_RUN = "not run yet"
Known = dict[str, Result]


def groups(plan: str) -> dict[str, list[Trial]]:
    """The trials of a plan that differ in their seeds only, in the order of the plan."""
    found: dict[str, list[Trial]] = {}
    for trial in PLANS[plan]:
        found.setdefault(trial.group, []).append(trial)
    return found


def values(trials: Sequence[Trial], known: Known, figure: str = "test_accuracy") -> list[float]:
    """A figure of those trials that are done."""
    return [known[trial.name][figure] for trial in trials if trial.name in known]


def percent(found: Sequence[float]) -> str:
    """Mean and, of several, standard deviation."""
    if not found:
        return NOT_RUN
    spread = f" ± {100 * stdev(found):.2f}" if len(found) > 1 else ""
    return f"{100 * fmean(found):.2f}{spread}"


def _cells(trials: Sequence[Trial], known: Known) -> list[str]:
    best = values(trials, known, "best_after_last_drop")
    loss = values(trials, known, "train_loss")
    accuracy = values(trials, known)
    return [percent(accuracy), percent(best), f"{fmean(loss):.4f}" if loss else "", f"{len(accuracy)}/{len(trials)}"]


CELLS = ["last epoch, %", "best after the last drop, %", "training loss", "seeds"]


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [list(header), ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def chosen(plan: str, model: str, known: Known) -> str | None:
    """The group of PETRA with the k of the lowest training loss, of the paper's order: k is picked on training data."""
    found = {
        name: fmean(loss)
        for name, trials in groups(plan).items()
        if name.startswith(f"{model}-petra-lock-step") and (loss := values(trials, known, "train_loss"))
    }
    return min(found, key=found.__getitem__) if found else None


def table2(known: Known) -> str:
    """Accuracies of Table 2, and how far PETRA is from backprop on the same network."""
    rows = []
    for name, trials in groups("table2").items():
        options = trials[0].options
        model, k = options["model"], options["accumulate"]
        place = 2 if options["method"] == "petra" else model.startswith("revnet")
        how = f"PETRA, {options['order']}, k = {k}" if options["method"] == "petra" else "backprop, batch 128"
        how += " (chosen)" if name == chosen("table2", model, known) else ""
        backprop = next(t for n, t in groups("table2").items() if n.startswith(f"{model}-backprop"))
        ours, theirs = values(trials, known), values(backprop, known)
        gap = f"{100 * (fmean(ours) - fmean(theirs)):+.2f}" if ours and theirs and trials is not backprop else ""
        rows.append([model, how, *_cells(trials, known), gap, f"{PAPER_TABLE_2[model[-2:]][place]}"])
    return markdown(["network", "method", *CELLS, "to its backprop", "paper (300 epochs)"], rows)


def full(known: Known) -> str:
    """The one training of the paper's full length."""
    trials = PLANS["full"]
    return markdown(["PETRA, RevNet-18, 300 epochs", *CELLS, "paper"], [["k = 4", *_cells(trials, known), "94.9"]])


def figure4(known: Known) -> str:
    """Figure 4 as numbers: means over the epochs after the last drop, at most ten of them."""
    rows = []
    for k in (1, 2, 4, 8, 16, 32):
        pair = [
            [t for t in PLANS["figure4"] if t.options["accumulate"] == k and t.options["method"] == method]
            for method in ("backprop", "petra")
        ]
        means = [values(trials, known, "mean_after_last_drop") for trials in pair]
        gap = f"{100 * (fmean(means[1]) - fmean(means[0])):+.2f}" if all(means) else ""
        rows.append([str(k), *map(percent, means), gap])
    return markdown(["k", "backprop, %", "PETRA, %", "difference"], rows)


def table4(known: Known) -> str:
    """Which approximation costs what."""
    rows = []
    for method, (delayed, inputs, weights, paper) in TABLE_4.items():
        cells = []
        for model, theirs in zip(("revnet18", "revnet34", "revnet50"), paper, strict=True):
            own = [t for t in PLANS["table4"] if (t.options["method"], t.options["model"]) == (method, model)]
            cells += [percent(values(own, known)), str(theirs)]
        rows.append([delayed, inputs, weights, f"`{method}`", *cells])
    header = ["delayed", "input kept", "weights kept", "method"]
    for depth in (18, 34, 50):
        header += [f"RevNet-{depth}, %", "paper (CIFAR-100)"]
    return markdown(header, rows)


def corrections(known: Known) -> str:
    """What each plug-in is worth without accumulation."""
    backprop = values(next(iter(groups("corrections").values())), known)
    rows = []
    for trials in groups("corrections").values():
        options = trials[0].options
        key = (options.get("order", "backprop"), options.get("correct", ""))
        ours = values(trials, known)
        gap = f"{100 * (fmean(ours) - fmean(backprop)):+.2f}" if ours and backprop and key[0] != "backprop" else ""
        name = f"PETRA, {key[0]}" if key[0] != "backprop" else "backprop"
        prototype = str(PROTOTYPE.get(key, ""))
        rows.append([name, key[1] or "–", *_cells(trials, known), gap, prototype])
    return markdown(["", "corrections", *CELLS, "to backprop", "prototype"], rows)


def fidelity(known: Known) -> str:
    """Cosines of the whole training, of the first and of the last reversible stage."""
    rows = []
    names = ("cosine", "delayed_cosine", "cosine_to_delayed", "norm_ratio", "norm_ratio_to_delayed")
    for trial in PLANS["fidelity"]:
        for stage in (1, 4, 8):
            cells = [NOT_RUN] * len(names)
            if trial.name in known:
                own = [row for row in known[trial.name]["likeness"] if row["stage"] == stage]
                found = [[row[name] for row in own if row[name] is not None] for name in names]
                cells = [f"{fmean(v):.3f}" if v else "" for v in found]
            rows.append([trial.group, str(stage), *cells])
    header = ["training", "stage", "cos(used, exact)", "cos(delayed, exact)", "cos(used, delayed)"]
    return markdown([*header, "‖used‖/‖exact‖", "‖used‖/‖delayed‖"], rows)


TABLES = {f.__name__: f for f in (table2, full, figure4, table4, corrections, fidelity)}
"""The table of each plan."""
