"""The work of the ranks of `petra plan`: they time layers, choose a cut, and time the pipeline."""

from __future__ import annotations

import json
import signal
import statistics
import sys
import time
import warnings
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

from petra import methods
from petra.cli.plan_config import PlanConfig
from petra.distributed import ProcessTransport, Transport
from petra.measure import (
    Link,
    MemoryProbe,
    PipelineOverLinks,
    Plan,
    Profile,
    Stopwatch,
    make_plan,
    profile,
    tick_seconds,
)
from petra.methods import METHODS, Method
from petra.pipeline import ShapeInference, balance, partition
from petra.pipeline.message_layout import layout_of
from petra.pipeline.message_shapes import shapes_of
from petra.reversible import Network, ReversibleLayer
from petra.reversible.storage import expand_storages
from petra.schedule import Action, AsyncSchedule, Kind, lock_step, low_staleness
from petra.trainer import Trainer
from petra.trainer.loss import cross_entropy
from petra.trainer.schedules import choose_schedule
from petra.trainer.stability import StalenessWarning
from petra.trainer.validation import NotReversibleWarning

ERROR = "error.json"
PATIENCE = timedelta(minutes=5)
"""How long a rank waits for another before it fails."""


def basic_method(network: Network) -> Method:
    """Return the method of basic model parallelism: reversible if the network is, because that saves memory."""
    reversible = any(isinstance(layer, ReversibleLayer) for layer in network)
    return METHODS["reversible" if reversible else "backprop"]


def spawn_ranks(config: PlanConfig, folder: Path) -> None:
    """Run `_work` on all ranks; raise the error of the first rank that fails."""
    context = spawn(_work, (config, str(folder)), config.ranks, join=False, daemon=True)  # type: ignore[no-untyped-call]
    try:
        while not context.join():
            pass
    except (ProcessRaisedException, ProcessExitedException) as stopped:
        for rank, process in enumerate(context.processes):
            code = process.exitcode or 0
            if (
                code < 0 and code != -signal.SIGTERM
            ):  # which the other ranks get; they only report that this one is missing
                raise RuntimeError(f"rank {rank} was ended by {signal.Signals(-code).name}") from stopped
        report = folder / ERROR
        if not report.exists():
            raise RuntimeError(f"rank {stopped.error_index} stopped without a message") from stopped
        error = json.loads(report.read_text())
        raise (ValueError if error["ours"] else RuntimeError)(error["text"]) from stopped
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()


def _work(rank: int, config: PlanConfig, folder: str) -> None:
    """The main function of a rank."""
    torch.set_num_threads(config.threads)
    for category in (NotReversibleWarning, StalenessWarning):  # nothing is trained here; `petra train` warns
        warnings.simplefilter("ignore", category)
    try:
        dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=config.ranks, timeout=PATIENCE)
        transport = ProcessTransport(timeout=PATIENCE)
        transport.gather(None)  # no rank fails while another still opens its connections
        found = Rank(config, transport)()
        if rank == 0:
            Path(folder, "found.json").write_text(json.dumps(found))
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:
        _report(rank, error, Path(folder))
        raise


def _report(rank: int, error: Exception, folder: Path) -> None:
    """Write the error into a file, unless another rank has: the first to fail has the cause."""
    text = str(error) if isinstance(error, ValueError) else f"rank {rank}: {type(error).__name__}: {error}"
    own = folder / f"error{rank}.json"
    own.write_text(json.dumps({"ours": isinstance(error, ValueError), "text": text}))
    with suppress(FileExistsError):
        (folder / ERROR).hardlink_to(own)  # in one step, because another rank may end this process


def slow_pipeline(config: PlanConfig, own: Profile, plan: Plan, link: Link) -> PipelineOverLinks:
    """Return the stages of a plan with the links that were given."""
    cuts = partition(sum(plan.stages), plan.stages)
    seconds = [own.stage(cut).per_tick(config.accumulate) for cut in cuts]
    return PipelineOverLinks(seconds, plan.placement, plan.up_bytes, plan.down_bytes, link.delay, link.bandwidth)


def compare_in_flight(config: PlanConfig, own: Profile, plan: Plan, link: Link, waiting: float) -> list[dict[str, Any]]:
    """Return staleness and speed of the plan's numbers in flight, of low-staleness and of lock-step."""
    pipeline, stages, k = slow_pipeline(config, own, plan, link), len(plan.stages), config.accumulate
    schedules = [
        AsyncSchedule(pipeline.least_in_flight(), k, "chosen"),
        low_staleness(stages, k),
        lock_step(stages, k),
    ]
    return [
        {
            "schedule": schedule.name,
            "in_flight": list(schedule.in_flight),
            "delays": [schedule.delay(stage) for stage in range(stages)],
            "tick": pipeline.period(schedule.in_flight) * waiting,
            "throughput": pipeline.throughput(schedule),
        }
        for schedule in schedules
    ]


class Rank:
    """One rank: it measures, plans, and times the plan."""

    def __init__(self, config: PlanConfig, transport: Transport) -> None:
        self.config, self.transport = config, transport
        self.rank = transport.position.rank
        self.inputs, self.targets = config.batch()

    def __call__(self) -> dict[str, Any]:
        config, network = self.config, self.config.network()
        method, basic = methods.find(config.method), basic_method(network)
        self.print(f"timing {len(network)} layers on {config.ranks} ranks at once")
        own = self.profile(network, method)
        self.print("timing them on one rank alone, as in basic model parallelism")
        other = self.profile(network, basic, alone=True)
        link = self.link()
        self.print("timing a pipeline, to see how ranks at work slow each other")
        own, waiting = self.calibrate(method, own, link)
        if config.has_links:
            link = replace(link, delay=config.latency, bandwidth=config.bandwidth or link.bandwidth)
        self.print("choosing a cut")
        plan = self.plan(network, method, own, other, link)
        if isinstance(plan, str):
            return {"error": plan}
        plan = replace(plan, tick=plan.tick * waiting)
        measured = None
        if config.measure:
            self.print(f"timing {method.name} on stages of {','.join(map(str, plan.stages))} layers")
            measured = self.measure(method, config.schedule, plan)
            self.print(f"timing {basic.name} on the same stages")
            basic_plan = replace(plan, storage=[])
            measured["basic"] = self.measure(basic, None, basic_plan, -(-config.ticks // 2))["tick"]  # long ones
        return {
            "plan": asdict(plan),
            "measured": measured,
            "profile": own.to_json(),
            "link": asdict(link),
            "in_flight": compare_in_flight(config, own, plan, link, waiting) if config.has_links else None,
        }

    def print(self, text: str) -> None:
        if self.rank == 0 and not self.config.quiet:
            print(f"petra plan: {text} …", file=sys.stderr, flush=True)

    def profile(self, network: Network, method: Method, alone: bool = False) -> Profile:
        """Time the layers on all ranks at the same time, because they slow each other down, or on one rank only."""
        dist.barrier()
        found = None
        if self.rank == 0 or not alone:
            found = profile(
                list(network),
                method,
                (self.inputs,),
                self.targets,
                loss=cross_entropy,
                optimizer=self.config.make_optimizer,
                repeats=5 if alone else 10,
            )
        profiles = self.transport.gather(None if found is None else found.to_json())
        return Profile.median([Profile.from_json(one) for one in profiles if one is not None])

    def calibrate(self, method: Method, own: Profile, link: Link) -> tuple[Profile, float]:
        """Return the profile in a running pipeline, and the ratio of a measured tick to a predicted one.

        Layers that are timed one after the other do not show how messages and neighbours affect caches, memory and
        cores. So this times a pipeline with one stage per rank, cut as evenly as possible because ranks slow each
        other down only while all of them work, and scales the times of the layers of each stage accordingly.
        """
        layers, ranks, k = len(own.layers), self.config.ranks, self.config.accumulate
        cuts = balance(layers, ranks, lambda _, cut: own.stage(cut).per_tick(k))
        placement = list(range(ranks))
        schedule = None if isinstance(self.config.schedule, list) else self.config.schedule
        trial = Plan([len(cut) for cut in cuts], placement, [], 0.0, 0.0, [], [], [])
        found = self.measure(method, schedule, trial)
        factors = [0.0] * layers
        for cut, seconds in zip(cuts, found["stages"], strict=True):
            factor = seconds / own.stage(cut).per_tick(k)
            for layer in cut:
                factors[layer] = factor
        real = own.scaled(factors)
        chosen = choose_schedule(method, len(cuts), k, schedule)
        shapes = ShapeInference(list(self.config.network()), cuts, method).shapes(shapes_of((self.inputs,)))
        ways = [[link.of(message) for message in messages] for messages in (shapes.forward[1:], shapes.backward[:-1])]
        on_paper = tick_seconds(chosen, placement, [real.stage(cut) for cut in cuts], *ways)
        return real, max(1.0, found["tick"] / on_paper)

    def link(self) -> Link:
        """Return latency and bandwidth between the first two ranks, from round trips of small and large messages."""
        if self.config.ranks == 1:
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
                self.transport.receive(1, label, layout_of(message))()
            elif self.rank == 1:
                self.transport.receive(0, label, layout_of(message))()
                self.transport.send(0, label, message)
            self.transport.flush()
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds[2:])

    def plan(self, network: Network, method: Method, own: Profile, other: Profile, link: Link) -> Plan | str:
        """Return the plan of rank 0 on every rank, or the reason why there is none."""
        found: dict[str, Any] = {}
        config = self.config
        make = partial(
            make_plan,
            list(network),
            method,
            profile=own,
            ranks=config.ranks,
            inputs=(self.inputs,),
            targets=self.targets,
            loss=cross_entropy,
            optimizer=config.make_optimizer,
            basic=other,
            link=link,
            memory_limit=config.memory_limit,
        )
        if self.rank == 0:
            try:
                if config.has_links:  # more stages than ranks would mean more messages
                    stages = config.stages or config.ranks
                    plan = make(config.make_schedule, stages=stages)
                    # Cut again: the memory of a stage depends on its number of micro-batches in flight.
                    in_flight = slow_pipeline(config, own, plan, link).least_in_flight()
                    plan = make(lambda n: choose_schedule(method, n, config.accumulate, in_flight), stages=stages)
                    plan = replace(plan, tick=slow_pipeline(config, own, plan, link).period(in_flight))
                else:
                    plan = make(config.make_schedule, stages=config.stages)
                found = {"plan": asdict(plan)}
            except ValueError as error:
                found = {"error": str(error)}
        chosen = self.transport.gather(found)[0]
        return chosen["error"] if "error" in chosen else Plan(**chosen["plan"])

    def measure(
        self, method: Method, schedule: str | list[int] | None, plan: Plan, ticks: int | None = None
    ) -> dict[str, Any]:
        """Return the seconds of a tick, and the seconds of work and bytes of every rank, with a full pipeline."""
        k, wanted = self.config.accumulate, ticks or self.config.ticks
        network = self.config.network()
        if plan.storage:
            network.use_storage(*expand_storages(plan.storage))
        trainer = Trainer(
            network,
            loss=cross_entropy,
            optimizer=self.config.make_optimizer,
            method=method,
            stages=plan.stages,
            accumulate=k,
            schedule=schedule,
            transport=self.transport,
            placement=plan.placement,
        )
        watches = {stage.index: Stopwatch(stage) for stage in trainer.stages}
        for _ in range(k * -(-(2 * trainer.schedule.staleness(0) + 2) // k)):
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
        memory = max(self.peak_bytes(trainer) for _ in range(k))
        trainer.drain()
        times = self.transport.gather([[index, statistics.median(taken)] for index, taken in own.items()])
        stages = dict(pair for pairs in times for pair in pairs)
        return {
            "tick": self.transport.gather(statistics.median(seconds))[0],
            "own": [sum(taken for _, taken in pairs) for pairs in times],
            "stages": [stages[index] for index in range(len(stages))],
            "memory": self.transport.gather(memory),
        }

    def step(self, trainer: Trainer) -> None:
        trainer.step(self.inputs.clone(), self.targets)  # every batch has its own memory

    def peak_bytes(self, trainer: Trainer) -> int:
        """Return the largest number of bytes of this rank in one tick."""
        trainer.state_dict()  # receives messages that have arrived, so that they are counted
        with MemoryProbe(trainer.executor) as probe:
            self.step(trainer)
        return sum(row.total for row in probe.stages)
