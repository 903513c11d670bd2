"""What every rank did when, on one clock: a trace that opens in Perfetto or chrome://tracing, and idle times."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from petra.execution import LocalExecutor, Transport
from petra.schedule import Action, Kind
from petra.tables import render

_NAMES = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.UPDATE: "update", Kind.LEARN: "learn"}


@dataclass(frozen=True)
class Event:
    """One action: when it asked for its message, had it, and was done. Seconds on the clock of process 0."""

    process: int
    tick: int
    action: Action
    asked: float
    began: float
    ended: float


@dataclass(frozen=True)
class Clock:
    """How far this process's clock is ahead of process 0's, and how far off that may be."""

    offset: float
    error: float
    when: float


def align(transport: Transport, rounds: int = 16) -> Clock:
    """Compare clocks. All processes call it at once.

    Nobody leaves a gathering before everybody has entered it. So the entry of one and the exit of another bound the
    difference of their clocks from both sides, and the narrowest of many bounds counts.
    """
    times = []
    for _ in range(rounds):
        entry = time.perf_counter()
        transport.gather(None)
        times.append((entry, time.perf_counter()))
    said = transport.gather(times)
    own = said[transport.places().index(transport.place)]
    low = max(entry - first_exit for (entry, _), (_, first_exit) in zip(own, said[0], strict=True))
    high = min(leave - first_entry for (_, leave), (first_entry, _) in zip(own, said[0], strict=True))
    if own == said[0]:
        low = high = 0.0
    return Clock((low + high) / 2, (high - low) / 2, time.perf_counter())


class Timeline:
    """Records the actions of an executor for a number of ticks."""

    def __init__(self, executor: LocalExecutor, transport: Transport, ticks: int) -> None:
        self._executor, self._transport = executor, transport
        self._first = executor.microbatches
        self._ticks = ticks
        self._begun: list[tuple[int, str, float, float, float]] = []
        self._start = align(transport)
        executor.clock = self._note

    @property
    def full(self) -> bool:
        """Whether all ticks are in; the same on every rank."""
        return self._executor.microbatches >= self._first + self._ticks

    def _note(self, tick: int, action: Action, asked: float, began: float, ended: float) -> None:
        self._begun.append((tick, str(action), asked, began, ended))

    def finish(self) -> Trace:
        """Stop, and put the records of all ranks together. All ranks call it at once."""
        self._executor.clock = None
        end = align(self._transport)
        span = max(end.when - self._start.when, 1e-9)

        def shifted(moment: float) -> float:
            part = (moment - self._start.when) / span
            return moment - (self._start.offset + part * (end.offset - self._start.offset))

        own = [(tick, action, *map(shifted, moments)) for tick, action, *moments in self._begun]
        error = max(self._start.error, end.error)
        said = self._transport.gather([own, error])
        events = [
            Event(process, tick, Action.parse(action), *moments)
            for process, (events, _) in enumerate(said)
            for tick, action, *moments in events
        ]
        names = [str(place) for place in self._transport.places()]
        return Trace(events, names, self._executor.order.staleness(0) + 1, max(error for _, error in said))


@dataclass(frozen=True)
class Trace:
    """The actions of all processes."""

    events: list[Event]
    names: list[str]
    fill: int
    """The tick from which on all stages are at work."""
    clock_error: float
    """Seconds by which the clocks may differ after they were aligned."""

    def idle(self) -> list[float]:
        """For each process, the part of the time in which it did no action, from when the pipeline is full."""
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
        """Write it in the format of chrome://tracing."""
        whole = path.with_name(path.name + ".tmp")
        whole.write_text(json.dumps({"traceEvents": self._chrome(), "displayTimeUnit": "ms"}) + "\n")
        whole.replace(path)

    def _chrome(self) -> list[dict[str, Any]]:
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
        return result + self._arrows(zero)

    def _arrows(self, zero: float) -> list[dict[str, Any]]:
        """From every action to the one that uses its message."""
        replicas = len({e.process for e in self.events if e.action.stage == 0}) or 1
        by_action = {(e.process % replicas, e.action): e for e in self.events}
        result = []
        for number, ((replica, action), sender) in enumerate(by_action.items()):
            step = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.UPDATE: 0, Kind.LEARN: 0}[action.kind]
            learns = Action(action.stage - 1, Kind.LEARN, action.microbatch)  # in place of the backward there
            uses = Action(action.stage + step, action.kind, action.microbatch)
            user = by_action.get((replica, learns)) if step < 0 else None
            user = user or by_action.get((replica, uses))
            if step == 0 or user is None:
                continue
            arrow = {"name": "message", "cat": "message", "id": number}
            for phase, e, moment in (("s", sender, sender.ended), ("f", user, user.began)):
                place = {"pid": e.process, "tid": e.action.stage, "ts": (moment - zero) * 1e6}
                result.append({**arrow, "ph": phase, "bp": "e", **place})
        return result

    def table(self) -> str:
        """Idle time of each process."""
        if not self.idle():
            return "the trace is too short to tell idle times: trace more ticks than it takes to fill the pipeline"
        return render(
            ["process", "idle"], [[n, f"{i:.1%}"] for n, i in zip(self.names, self.idle(), strict=True)], left=1
        )


def _span(start: float, stop: float) -> dict[str, float]:
    return {"ts": start * 1e6, "dur": (stop - start) * 1e6}
