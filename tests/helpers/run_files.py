"""Folders with the files of a run, written without a training."""

import json

from petra.measure.timeline import Event, Trace
from petra.runs.config import RunConfig
from petra.schedule import ScheduleTable, low_staleness

STAGES = 4


def write_run(folder, *, epochs=3, finished=True, trace=False, fidelity=False, **options):
    """Write what a training on four stages would record; `options` are those of a `RunConfig`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = RunConfig(**{"model": "revnet18", "data": "digits", "stages": STAGES, "epochs": 3, "lr": 0.05, **options})
    (folder / "config.json").write_text(json.dumps(config.to_json()))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record(epoch)) + "\n" for epoch in range(1, epochs + 1)))
    if finished:
        (folder / "summary.json").write_text(json.dumps(summary(config)))
    if trace:
        events_of_four_stages().save(folder / "trace.json")
    if fidelity:
        rows = [similarity(update, stage) for update in (5, 10, 15) for stage in (*range(STAGES), "all")]
        (folder / "fidelity.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "fidelity.json").write_text(json.dumps({"every": 5}))
    return folder


def record(epoch):
    return {
        "step": 10 * epoch,
        "epoch": epoch,
        "train_loss": 2.0 / epoch,
        "train_accuracy": 1 - 0.5 / epoch,
        "test_loss": 2.2 / epoch,
        "test_accuracy": 1 - 0.6 / epoch,
        "lr": 0.05 / epoch,
        "samples_per_second": 400.0,
        "seconds": 3.5 * epoch,
    }


def summary(config):
    memory = {"weights": 2000, "optimizer": 2000, "gradients": 2000, "stashed_weights": 0, "graph": 50_000}
    return {
        "method": config.method,
        "stages": [2, 2, 1, 1],
        "ranks": 1,
        "schedule": "low-staleness",
        "staleness": [3, 2, 1, 0],
        "parameters": 43690,
        "test_accuracy": 0.8,
        "test_loss": 0.7,
        "best_test_accuracy": 0.85,
        "best_epoch": 2,
        "samples_per_second": 400.0,
        "activation_peak_bytes": 2**21,
        "memory_bytes": [{**memory, "inputs": 1000 * stage} for stage in range(STAGES)],
        "environment": {"torch": "2.13.0", "device": "cpu"},
    }


def similarity(update, stage):
    names = ("cosine", "norm_ratio", "sigma", "cosine_to_delayed", "norm_ratio_to_delayed")
    values = dict.fromkeys((*names, "delayed_cosine", "delayed_norm_ratio", "delayed_sigma"), 0.9)
    return {"update": update, "stage": stage, "microbatch": update - 1, "epoch": update / 5, **values}


def events_of_four_stages():
    """A trace in which every action takes a millisecond."""
    table, events = ScheduleTable.of(low_staleness(STAGES), 12), []
    actions = [(tick, action) for tick, phases in enumerate(table.ticks) for phase in phases for action in phase]
    for i, (tick, action) in enumerate(actions):
        events.append(Event(0, tick, action, i / 1000 - 0.0005, i / 1000, (i + 1) / 1000))
    return Trace(events, ["rank 0"], STAGES, 0.0)
