"""Carries a plan out: what the ranks of `petra plan` do, from timing layers to timing the pipeline."""

from __future__ import annotations

import json
import signal
import statistics
import sys
import time
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

from petra import methods
from petra.cli.case import Case
from petra.execution import ProcessTransport, Rehearsal, Transport, balance
from petra.execution.templates import shapes_of
from petra.measure import Link, MemoryProbe, Plan, Profile, Stopwatch, make_plan, profile, tick_seconds
from petra.methods import METHODS, Method
from petra.reversible import Network, ReversibleLayer
from petra.schedule import Action, Kind
from petra.training import Trainer
from petra.training.loss import cross_entropy
from petra.training.optimizers import sgd
from petra.training.orders import choose_order

ERROR = "error.json"
PATIENCE = timedelta(minutes=5)
"""How long a rank waits for another before it gives up."""


def basic_method(network: Network) -> Method:
    """Basic model parallelism as one would do it: in the way that saves memory, where the network can."""
    reversible = any(isinstance(layer, ReversibleLayer) for layer in network)
    return METHODS["reversible" if reversible else "backprop"]


def spawn_ranks(case: Case, folder: Path) -> None:
    """Run `_work` on all ranks; what went wrong on one of them is raised here."""
    context = spawn(_work, (case, str(folder)), case.ranks, join=False, daemon=True)  # type: ignore[no-untyped-call]
    try:
        while not context.join():
            pass
    except (ProcessRaisedException, ProcessExitedException) as stopped:
        for rank, process in enumerate(context.processes):
            code = process.exitcode or 0
            if code < 0 and code != -signal.SIGTERM:  # which the others get; what they say is that they miss this one
                raise RuntimeError(f"rank {rank} was ended by {signal.Signals(-code).name}") from stopped
        said = folder / ERROR
        if not said.exists():
            raise RuntimeError(f"rank {stopped.error_index} stopped without a word") from stopped
        error = json.loads(said.read_text())
        raise (ValueError if error["ours"] else RuntimeError)(error["text"]) from stopped
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()


def _work(rank: int, case: Case, folder: str) -> None:
    """One rank from start to end."""
    torch.set_num_threads(case.threads)
    try:
        dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=case.ranks, timeout=PATIENCE)
        transport = ProcessTransport(timeout=PATIENCE)
        transport.gather(None)  # nobody fails while another still opens its connections
        found = Rank(case, transport)()
        if rank == 0:
            Path(folder, "found.json").write_text(json.dumps(found))
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:
        _say(rank, error, Path(folder))
        raise


def _say(rank: int, error: Exception, folder: Path) -> None:
    """Write down what went wrong, unless another has: the first to fail knows best, the others only miss it."""
    text = str(error) if isinstance(error, ValueError) else f"rank {rank}: {type(error).__name__}: {error}"
    own = folder / f"error{rank}.json"
    own.write_text(json.dumps({"ours": isinstance(error, ValueError), "text": text}))
    with suppress(FileExistsError):
        (folder / ERROR).hardlink_to(own)  # in one step, for whoever comes second may end this process


class Rank:
    """What one rank does: measure, plan, try."""

    def __init__(self, case: Case, transport: Transport) -> None:
        self.case, self.transport = case, transport
        self.rank = transport.place.rank
        self.inputs, self.targets = case.batch()

    def __call__(self) -> dict[str, Any]:
        case, network = self.case, self.case.network()
        method, basic = methods.find(case.method), basic_method(network)
        self.say(f"timing {len(network)} layers on {case.ranks} ranks at once")
        own = self.profile(network, method)
        self.say("timing them on one rank alone, as in basic model parallelism")
        other = self.profile(network, basic, alone=True)
        link = self.link()
        self.say("timing a pipeline, to see how ranks at work slow each other")
        own, waiting = self.calibrate(method, own, link)
        self.say("choosing a cut")
        plan = self.plan(network, method, own, other, link)
        if isinstance(plan, str):
            return {"error": plan}
        plan = replace(plan, tick=plan.tick * waiting)
        measured = None
        if case.measure:
            self.say(f"timing {method.name} on stages of {','.join(map(str, plan.stages))} layers")
            measured = self.measure(method, case.order, plan)
            self.say(f"timing {basic.name} on the same stages")
            measured["basic"] = self.measure(basic, None, plan, -(-case.ticks // 2))["tick"]  # long ones
        return {"plan": asdict(plan), "measured": measured, "profile": own.to_json(), "link": asdict(link)}

    def say(self, text: str) -> None:
        if self.rank == 0 and not self.case.quiet:
            print(f"petra plan: {text} …", file=sys.stderr, flush=True)

    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return sgd(parameters, lr=1e-3, weight_decay=1e-4)  # too slow to go wrong on random data

    def profile(self, network: Network, method: Method, alone: bool = False) -> Profile:
        """Measured on all ranks at the same time, because that is how they slow each other, or on one alone."""
        dist.barrier()
        found = None
        if self.rank == 0 or not alone:
            found = profile(
                list(network),
                method,
                (self.inputs,),
                self.targets,
                loss=cross_entropy,
                optimizer=self.optimizer,
                repeats=5 if alone else 10,
            )
        said = self.transport.gather(None if found is None else found.to_json())
        return Profile.median([Profile.from_json(one) for one in said if one is not None])

    def calibrate(self, method: Method, own: Profile, link: Link) -> tuple[Profile, float]:
        """The profile as layers take in a running pipeline, and how much longer a tick is there than on paper.

        Layers that are timed one after the other do not feel what messages and neighbours do to caches, memory
        and cores. So they are cut as evenly as one stage a rank allows, for ranks slow each other only as long as they
        are all at work, and what stages take more in a run of that is put on their layers.
        """
        layers, ranks, k = len(own.layers), self.case.ranks, self.case.accumulate
        cuts = balance(layers, ranks, lambda _, cut: own.stage(cut).per_tick(k))
        placement = list(range(ranks))
        order = None if isinstance(self.case.order, list) else self.case.order
        trial = Plan([len(cut) for cut in cuts], placement, [], 0.0, 0.0, [], [], [])
        found = self.measure(method, order, trial)
        factors = [0.0] * layers
        for cut, seconds in zip(cuts, found["stages"], strict=True):
            factor = seconds / own.stage(cut).per_tick(k)
            for layer in cut:
                factors[layer] = factor
        real = own.scaled(factors)
        chosen = choose_order(method, len(cuts), k, order)
        shapes = Rehearsal(list(self.case.network()), cuts, method).shapes(shapes_of((self.inputs,)))
        ways = [[link.of(message) for message in messages] for messages in (shapes.ups[1:], shapes.downs[:-1])]
        on_paper = tick_seconds(chosen, placement, [real.stage(cut) for cut in cuts], *ways)
        return real, max(1.0, found["tick"] / on_paper)

    def link(self) -> Link:
        """What a message between the first two ranks takes, from small and large ones sent to and fro."""
        if self.case.ranks == 1:
            return Link()
        small, large = (self.round_trip(size) / 2 for size in (2**4, 2**20))
        latency, per_byte = self.transport.gather([small, max(large - small, 1e-9) / (4 * (2**20 - 2**4))])[0]
        return Link(latency, 1 / per_byte)

    def round_trip(self, size: int) -> float:
        message, seconds = (torch.zeros(size),), []
        label = Action(0, Kind.FORWARD, 0)
        self.transport.connect([(0, 1), (1, 0)])
        for _ in range(12):
            dist.barrier()
            began = time.perf_counter()
            if self.rank == 0:
                self.transport.send(1, label, message)
                self.transport.receive(1, label, message)()
            elif self.rank == 1:
                self.transport.receive(0, label, message)()
                self.transport.send(0, label, message)
            self.transport.flush()
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds[2:])

    def plan(self, network: Network, method: Method, own: Profile, other: Profile, link: Link) -> Plan | str:
        """The plan of rank 0 on every rank, or why there is none."""
        found: dict[str, Any] = {}
        if self.rank == 0:
            try:
                plan = make_plan(
                    list(network),
                    method,
                    self.case.make_order,
                    own,
                    ranks=self.case.ranks,
                    stages=self.case.stages,
                    inputs=(self.inputs,),
                    targets=self.targets,
                    loss=cross_entropy,
                    optimizer=self.optimizer,
                    basic=other,
                    link=link,
                    memory_limit=self.case.memory_limit,
                )
                found = {"plan": asdict(plan)}
            except ValueError as error:
                found = {"error": str(error)}
        said = self.transport.gather(found)[0]
        return said["error"] if "error" in said else Plan(**said["plan"])

    def measure(
        self, method: Method, order: str | list[int] | None, plan: Plan, ticks: int | None = None
    ) -> dict[str, Any]:
        """Seconds of a tick, and seconds of work and bytes of every rank, in a real run with a full pipeline."""
        k, wanted = self.case.accumulate, ticks or self.case.ticks
        trainer = Trainer(
            self.case.network(),
            loss=cross_entropy,
            optimizer=self.optimizer,
            method=method,
            stages=plan.stages,
            accumulate=k,
            order=order,
            transport=self.transport,
            placement=plan.placement,
        )
        watches = {stage.index: Stopwatch(stage) for stage in trainer.stages}
        for _ in range(k * -(-(2 * trainer.order.staleness(0) + 2) // k)):
            self.step(trainer)
        size = k * -(-max(1, wanted // 4) // k)  # of a window: whole updates
        seconds: list[float] = []
        own: dict[int, list[float]] = {index: [] for index in watches}
        for _ in range(max(1, wanted // size)):
            before = {index: watch.total for index, watch in watches.items()}
            dist.barrier()
            began = time.perf_counter()
            for _ in range(size):
                self.step(trainer)
            dist.barrier()
            seconds.append((time.perf_counter() - began) / size)
            for index, watch in watches.items():
                own[index].append((watch.total - before[index]) / size)
        memory = max(self.held(trainer) for _ in range(k))
        trainer.drain()
        said = self.transport.gather([[index, statistics.median(taken)] for index, taken in own.items()])
        stages = dict(pair for pairs in said for pair in pairs)
        return {
            "tick": self.transport.gather(statistics.median(seconds))[0],
            "own": [sum(taken for _, taken in pairs) for pairs in said],
            "stages": [stages[index] for index in range(len(stages))],
            "memory": self.transport.gather(memory),
        }

    def step(self, trainer: Trainer) -> None:
        trainer.step(self.inputs.clone(), self.targets)  # every batch has its own memory

    def held(self, trainer: Trainer) -> int:
        """Most bytes of this rank in one tick."""
        trainer.executor.state_dict()  # takes messages in that have arrived, so that they are counted
        with MemoryProbe(trainer.executor) as probe:
            self.step(trainer)
        return sum(row.total for row in probe.stages)
