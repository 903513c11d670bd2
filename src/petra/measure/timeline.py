"""Traces of the actions of all ranks on one clock, for Perfetto or chrome://tracing, and idle times."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any

from petra.distributed import Transport
from petra.formatting import render
from petra.pipeline import Executor
from petra.schedule import Action, Kind

_NAMES = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.UPDATE: "update", Kind.LEARN: "learn"}


@dataclass(frozen=True)
class Event:
    """One action, with times in seconds on the clock of process 0."""

    process: int
    """The process that performed it."""
    tick: int
    """The tick."""
    action: Action
    """The action."""
    asked: float
    """When it began to wait for its message."""
    began: float
    """When it had its message."""
    ended: float
    """When it ended."""


@dataclass(frozen=True)
class ClockOffset:
    """How far the clock of this process is ahead of that of process 0."""

    offset: float
    """Seconds."""
    error: float
    """The largest error of the offset."""
    when: float
    """The time of the measurement, on the clock of this process."""


def measure_offset(transport: Transport, rounds: int = 16) -> ClockOffset:
    """Compare the clocks. All processes call it at the same time.

    No process leaves a `gather` before all processes have entered it. So the entry of one process and the exit of
    another bound the difference of their clocks from both sides. The result uses the tightest bounds of all rounds.
    """
    times = []
    for _ in range(rounds):
        entry = time.perf_counter()
        transport.gather(None)
        times.append((entry, time.perf_counter()))
    all_times = transport.gather(times)
    own = all_times[transport.positions().index(transport.position)]
    low = max(entry - first_exit for (entry, _), (_, first_exit) in zip(own, all_times[0], strict=True))
    high = min(leave - first_entry for (_, leave), (first_entry, _) in zip(own, all_times[0], strict=True))
    if own == all_times[0]:
        low = high = 0.0
    return ClockOffset((low + high) / 2, (high - low) / 2, time.perf_counter())


class Timeline:
    """Records the actions of an executor. All ranks create one at the same time.

    Args:
        executor: The executor of this rank.
        transport: The transport of this rank.
        ticks: The number of ticks to record.
    """

    def __init__(self, executor: Executor, transport: Transport, ticks: int) -> None:
        self._executor, self._transport = executor, transport
        self._first = executor.microbatches
        self._ticks = ticks
        self._recorded: list[tuple[int, str, float, float, float]] = []
        self._start = measure_offset(transport)
        executor.clock = self._record

    @property
    def full(self) -> bool:
        """True if all ticks are recorded. It is the same on all ranks."""
        return self._executor.microbatches >= self._first + self._ticks

    def _record(self, tick: int, action: Action, asked: float, began: float, ended: float) -> None:
        self._recorded.append((tick, str(action), asked, began, ended))

    def finish(self) -> Trace:
        """Stop recording, and merge the records of all ranks. All ranks call it at the same time.

        Returns:
            The trace of all ranks, on every rank.
        """
        self._executor.clock = None
        end = measure_offset(self._transport)
        span = max(end.when - self._start.when, 1e-9)

        def on_common_clock(time: float) -> float:
            part = (time - self._start.when) / span  # clocks drift linearly
            return time - (self._start.offset + part * (end.offset - self._start.offset))

        own = [(tick, action, *map(on_common_clock, times)) for tick, action, *times in self._recorded]
        error = max(self._start.error, end.error)
        gathered = self._transport.gather([own, error])
        events = [
            Event(process, tick, Action.parse(action), *times)
            for process, (records, _) in enumerate(gathered)
            for tick, action, *times in records
        ]
        names = [str(position) for position in self._transport.positions()]
        return Trace(events, names, self._executor.schedule.staleness(0) + 1, max(error for _, error in gathered))


@dataclass(frozen=True)
class Trace:
    """The actions of all processes."""

    events: list[Event]
    """The actions."""
    names: list[str]
    """The names of the processes."""
    fill: int
    """The first tick in which all stages are busy."""
    clock_error: float
    """The largest error of the common clock, in seconds."""

    def idle(self) -> list[float]:
        """Return the idle time of each process, from the tick in which the pipeline is full.

        Returns:
            For each process, the fraction of time without an action; an empty list if the trace is too short.
        """
        steady = [[e for e in self.events if e.process == p and e.tick >= self.fill] for p in range(len(self.names))]
        if not all(steady):
            return []
        start = max(min(e.began for e in events) for events in steady)
        stop = min(max(e.ended for e in events) for events in steady)
        if stop <= start:
            return []
        busy = [sum(max(0.0, min(e.ended, stop) - max(e.began, start)) for e in events) for events in steady]
        return [1 - seconds / (stop - start) for seconds in busy]

    def save(self, path: Path) -> None:
        """Write the trace in the format of chrome://tracing.

        Args:
            path: The file.
        """
        temporary = path.with_name(path.name + ".tmp")
        more = {"displayTimeUnit": "ms", "otherData": {"fill": self.fill, "clock_error": self.clock_error}}
        temporary.write_text(json.dumps({"traceEvents": self._trace_events(), **more}) + "\n")
        temporary.replace(path)

    @classmethod
    def load(cls, path: Path) -> Trace:
        """Read what `save` wrote.

        Args:
            path: The file.

        Returns:
            The trace; its clock starts at 0, and waiting times are those of the file.

        Raises:
            ValueError: If the file is damaged.
        """
        kinds = {name: kind for kind, name in _NAMES.items()}
        try:
            written = json.loads(path.read_text(encoding="utf-8"))
            spans, more = written["traceEvents"], written.get("otherData", {})
            names = {e["pid"]: str(e["args"]["name"]) for e in spans if e["name"] == "process_name"}
            events, waited = [], 0.0
            for e in (e for e in spans if e["ph"] == "X"):
                start, stop = float(e["ts"]) / 1e6, (float(e["ts"]) + float(e["dur"])) / 1e6
                if e["name"] == "wait":  # of the next action
                    waited = stop - start
                    continue
                action = Action(int(e["tid"]), kinds[e["cat"]], int(e["args"]["micro-batch"]))
                events.append(Event(int(e["pid"]), int(e["args"]["tick"]), action, start - waited, start, stop))
                waited = 0.0
            ordered = [names[process] for process in range(len(names))]
            full = [e.tick for e in events if e.action.stage == 0 and e.action.kind is Kind.BACKWARD]
            return cls(
                events, ordered, int(more.get("fill", min(full, default=0))), float(more.get("clock_error", nan))
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error

    def _trace_events(self) -> list[dict[str, Any]]:
        zero = min((e.asked for e in self.events), default=0.0)
        result: list[dict[str, Any]] = []
        for process, name in enumerate(self.names):
            result.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})
            for stage in sorted({e.action.stage for e in self.events if e.process == process}):
                label = {"name": f"stage {stage}"}
                result.append({"ph": "M", "name": "thread_name", "pid": process, "tid": stage, "args": label})
        for e in self.events:
            where = {"pid": e.process, "tid": e.action.stage}
            span = {"ph": "X", **where, "args": {"tick": e.tick, "micro-batch": e.action.microbatch}}
            if e.began > e.asked:
                result.append({**span, "name": "wait", **_span(e.asked - zero, e.began - zero)})
            name = f"{_NAMES[e.action.kind]} {e.action.microbatch}"
            result.append({**span, "name": name, "cat": _NAMES[e.action.kind], **_span(e.began - zero, e.ended - zero)})
        return result + self._message_arrows(zero)

    def _message_arrows(self, zero: float) -> list[dict[str, Any]]:
        """Return arrows from every action to the action that uses its message."""
        replicas = len({e.process for e in self.events if e.action.stage == 0}) or 1
        by_action = {(e.process % replicas, e.action): e for e in self.events}
        result = []
        for number, ((replica, action), sender) in enumerate(by_action.items()):
            step = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.UPDATE: 0, Kind.LEARN: 0}[action.kind]
            learn = Action(action.stage - 1, Kind.LEARN, action.microbatch)  # instead of a backward of that stage
            same_kind = Action(action.stage + step, action.kind, action.microbatch)
            user = by_action.get((replica, learn)) if step < 0 else None
            user = user or by_action.get((replica, same_kind))
            if step == 0 or user is None:
                continue
            arrow = {"name": "message", "cat": "message", "id": number}
            for phase, e, moment in (("s", sender, sender.ended), ("f", user, user.began)):
                position = {"pid": e.process, "tid": e.action.stage, "ts": (moment - zero) * 1e6}
                result.append({**arrow, "ph": phase, "bp": "e", **position})
        return result

    def table(self) -> str:
        """Return a table with the idle time of each process.

        Returns:
            The table, or a message if the trace is too short.
        """
        if not self.idle():
            return "the trace is too short to compute idle times: trace more ticks than it takes to fill the pipeline"
        return render(
            ["process", "idle"], [[n, f"{i:.1%}"] for n, i in zip(self.names, self.idle(), strict=True)], left=1
        )


def _span(start: float, stop: float) -> dict[str, float]:
    return {"ts": start * 1e6, "dur": (stop - start) * 1e6}
