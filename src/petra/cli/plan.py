"""`petra plan`: where to cut a network for so many ranks, what to expect of it, and what comes of it."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

from petra import methods, models
from petra.cli.options import order_option, whole_numbers
from petra.execution import ProcessTransport, Rehearsal, Transport, partition
from petra.execution.templates import shapes_of
from petra.measure import Link, MemoryProbe, Plan, Profile, Stopwatch, environment, make_plan, profile, tick_seconds
from petra.methods import METHODS, Method
from petra.reversible import Network, ReversibleLayer
from petra.schedule import Action, Kind, Order
from petra.tables import mebibytes, render
from petra.training import Trainer, checkpoint, recipes
from petra.training.trainer import choose_order

PATIENCE = timedelta(minutes=5)
"""How long a rank waits for another before it gives up."""


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "plan",
        help="find where to cut a network for several processes",
        description="Times every layer on all ranks at once, chooses the cut whose busiest rank has least to do, "
        "predicts tick, speed-up and memory of it, and holds the prediction against a short run on random data. "
        "Ranks are processes on this machine, on CPU cores.",
        epilog="Example: petra plan --model revnet18 --ranks 4 --batch-size 64 --memory-limit 500",
    )
    what = parser.add_argument_group("what to train")
    what.add_argument("--model", metavar="NAME", required=True, help="network; `petra models` lists them")
    what.add_argument("--width", type=int, help="channels of the first group of blocks")
    what.add_argument("--depths", type=whole_numbers, metavar="N,N,…", help="blocks in each group")
    what.add_argument("--stem", choices=("cifar", "imagenet"), help="first layer: 3×3, or 7×7 with pooling")
    what.add_argument("--image", type=image_shape, default=(3, 32, 32), metavar="CxHxW", help="default 3x32x32")
    what.add_argument("--classes", type=int, default=10, metavar="N", help="default %(default)s")
    what.add_argument("--batch-size", type=int, default=64, metavar="N", help="samples in a micro-batch (default 64)")
    how = parser.add_argument_group("how to train")
    how.add_argument("--ranks", type=int, required=True, metavar="N", help="processes")
    how.add_argument(
        "--stages", type=whole_numbers, metavar="N", help="their number (default: one a rank), or layers in each"
    )
    how.add_argument("--method", default="petra", metavar="NAME", help=f"one of {', '.join(METHODS)} (default petra)")
    how.add_argument(
        "--order", type=order_option, metavar="NAME", help="low-staleness, lock-step, or numbers in flight"
    )
    how.add_argument("--accumulate", type=int, default=1, metavar="K", help="micro-batches per update (default 1)")
    how.add_argument("--memory-limit", type=float, metavar="MiB", help="most that a rank may hold (default: no limit)")
    check = parser.add_argument_group("the check")
    check.add_argument("--ticks", type=int, default=20, metavar="N", help="micro-batches to time (default %(default)s)")
    check.add_argument("--no-run", action="store_true", help="predict only")
    check.add_argument("--json", type=Path, metavar="FILE", help="also write everything into a file")
    check.add_argument("--quiet", action="store_true", help="no progress")
    parser.set_defaults(run=run)


def image_shape(text: str) -> tuple[int, int, int]:
    """``3x32x32``."""
    parts = text.split("x")
    if len(parts) != 3 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not channels, height and width like 3x32x32")
    channels, height, width = map(int, parts)
    return channels, height, width


@dataclass(frozen=True)
class Case:
    """What is planned, as every rank is told it."""

    model: str
    model_options: dict[str, Any]
    image: tuple[int, int, int]
    batch_size: int
    method: str
    order: str | list[int] | None
    accumulate: int
    ranks: int
    stages: int | list[int] | None
    memory_limit: int | None
    ticks: int
    measure: bool
    threads: int
    quiet: bool

    @classmethod
    def of(cls, options: argparse.Namespace) -> Case:
        """From the command line; raises ValueError for the first thing that cannot work."""
        for name in ("ranks", "batch_size", "accumulate", "classes", "ticks"):
            if (value := getattr(options, name)) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {value}: give 1 or more")
        if options.memory_limit is not None and not options.memory_limit > 0:
            raise ValueError(f"--memory-limit is {options.memory_limit}: give MiB of memory, or leave it out")
        given = {name: getattr(options, name) for name in ("width", "depths", "stem")}
        model_options = {name: value for name, value in given.items() if value is not None}
        if isinstance(model_options.get("depths"), int):
            model_options["depths"] = [model_options["depths"]]
        case = cls(
            model=options.model,
            model_options={"num_classes": options.classes, "in_channels": options.image[0], **model_options},
            image=options.image,
            batch_size=options.batch_size,
            method=options.method,
            order=options.order,
            accumulate=options.accumulate,
            ranks=options.ranks,
            stages=options.stages,
            memory_limit=None if options.memory_limit is None else int(options.memory_limit * 2**20),
            ticks=options.ticks,
            measure=not options.no_run,
            threads=max(1, _cores() // options.ranks),
            quiet=options.quiet,
        )
        with torch.device("meta"):
            layers = len(case.network())
        cuts = partition(layers, case.ranks if case.stages is None else case.stages)
        if len(cuts) < case.ranks:
            raise ValueError(f"--stages is {case.stages} for {case.ranks} ranks: give one stage a rank or more")
        case.make_order(len(cuts))
        return case

    def network(self) -> Network:
        """The network, with the same weights on every rank."""
        torch.manual_seed(0)
        return models.create(self.model, **self.model_options)

    def batch(self) -> tuple[Tensor, Tensor]:
        """One micro-batch of random data."""
        generator = torch.Generator().manual_seed(0)
        targets = torch.randint(self.model_options["num_classes"], (self.batch_size,), generator=generator)
        return torch.randn(self.batch_size, *self.image, generator=generator), targets

    def make_order(self, stages: int) -> Order:
        """The order for a number of stages."""
        return choose_order(methods.find(self.method), stages, self.accumulate, self.order)


def run(options: argparse.Namespace) -> None:
    """Plan on real processes, and print what came out."""
    case = Case.of(options)
    if case.ranks > _cores():
        print(
            f"petra plan: {case.ranks} ranks share {_cores()} cores, so they wait for cores too: "
            "what is predicted here holds where there is a core a rank",
            file=sys.stderr,
        )
    with tempfile.TemporaryDirectory() as folder:
        _spawn(case, Path(folder))
        found = json.loads(Path(folder, "found.json").read_text())
    if "error" in found:
        raise ValueError(found["error"])
    plan = Plan(**found["plan"])
    if options.json is not None:
        result = {"case": asdict(case), "speedup": plan.speedup, **found, "environment": environment()}
        checkpoint.write_json(options.json, result)
    print(report(case, plan, found["measured"]))


def report(case: Case, plan: Plan, measured: dict[str, Any] | None) -> str:
    """The table, the totals, and the options to train with."""
    header = ["rank", "layers", "ms per tick", "measured", "memory", "measured", "sent up", "sent down"]
    rows = []
    for rank, layers in enumerate(plan.layers):
        rows.append(
            [
                rank,
                _listed(layers),
                _ms(plan.seconds[rank]),
                _ms(measured["own"][rank]) if measured else "",
                mebibytes(plan.memory[rank]),
                mebibytes(measured["memory"][rank]) if measured else "",
                mebibytes(plan.sent_up[rank]),
                mebibytes(plan.sent_down[rank]),
            ]
        )
    if measured is None:
        rows = [[cell for i, cell in enumerate(row) if header[i] != "measured"] for row in rows]
        header = [name for name in header if name != "measured"]
    stages = ",".join(map(str, plan.stages))
    lines = [
        f"{case.model} with {case.method} on {case.ranks} ranks, {len(plan.stages)} stages of {stages} layers; "
        f"micro-batches of {case.batch_size}, threads a rank: {case.threads}",
        "",
        render(header, rows),
        "",
    ]
    where = "" if plan.in_a_row else f" --placement {','.join(map(str, plan.placement))}"
    name = _basic(case.network()).name
    if measured is None:
        lines += [
            f"tick: predicted {_ms(plan.tick)} ms",
            f"times basic model parallelism ({name}): predicted {plan.speedup:.2f}",
        ]
    else:
        lines += [
            f"tick: predicted {_ms(plan.tick)} ms, measured {_ms(measured['tick'])} ms, "
            f"ratio {plan.tick / measured['tick']:.2f}",
            f"times basic model parallelism ({name}): predicted {plan.speedup:.2f}, "
            f"measured {measured['basic'] / measured['tick']:.2f}",
        ]
    return "\n".join([*lines, "", f"to train with: --ranks {case.ranks} --stages {stages}{where}"])


def _listed(layers: list[int]) -> str:
    """``0-2, 5`` for 0, 1, 2 and 5."""
    starts = [i for i in layers if i - 1 not in layers]
    ends = [i for i in layers if i + 1 not in layers]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _basic(network: Network) -> Method:
    """Basic model parallelism as one would do it: in the way that saves memory, where the network can."""
    reversible = any(isinstance(layer, ReversibleLayer) for layer in network)
    return METHODS["reversible" if reversible else "backprop"]


def _spawn(case: Case, folder: Path) -> None:
    """Run `_work` on all ranks; what went wrong on one of them is raised here."""
    context = spawn(_work, (case, str(folder)), case.ranks, join=False, daemon=True)  # type: ignore[no-untyped-call]
    try:
        while not context.join():
            pass
    except (ProcessRaisedException, ProcessExitedException) as stopped:
        said = folder / "error.json"
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
        found = _Rank(case, ProcessTransport(timeout=PATIENCE))()
        if rank == 0:
            Path(folder, "found.json").write_text(json.dumps(found))
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:
        said = Path(folder, "error.json")
        if not said.exists():  # the first to fail knows best: the others only miss it
            text = str(error) if isinstance(error, ValueError) else f"rank {rank}: {type(error).__name__}: {error}"
            said.write_text(json.dumps({"ours": isinstance(error, ValueError), "text": text}))
        raise


class _Rank:
    """What one rank does: measure, plan, try."""

    def __init__(self, case: Case, transport: Transport) -> None:
        self.case, self.transport = case, transport
        self.rank = transport.place.rank
        self.inputs, self.targets = case.batch()

    def __call__(self) -> dict[str, Any]:
        case, network = self.case, self.case.network()
        method, basic = methods.find(case.method), _basic(network)
        self.say(f"timing {len(network)} layers on {case.ranks} ranks at once")
        own = self.profile(network, method)
        self.say("timing them on one rank alone, as in basic model parallelism")
        other = self.profile(network, basic, alone=True)
        link = self.link()
        self.say("timing a pipeline of many small stages, to see how ranks at work slow each other")
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
            measured["basic"] = self.measure(basic, None, plan)["tick"]
        return {"plan": asdict(plan), "measured": measured, "profile": own.to_json(), "link": asdict(link)}

    def say(self, text: str) -> None:
        if self.rank == 0 and not self.case.quiet:
            print(f"petra plan: {text} …", file=sys.stderr, flush=True)

    def optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return recipes.sgd(parameters, lr=1e-3, weight_decay=1e-4)  # too slow to go wrong on random data

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
                loss=nn.functional.cross_entropy,
                optimizer=self.optimizer,
                repeats=5 if alone else 10,
            )
        said = self.transport.gather(None if found is None else found.to_json())
        return Profile.median([Profile.from_json(one) for one in said if one is not None])

    def calibrate(self, method: Method, own: Profile, link: Link) -> tuple[Profile, float]:
        """The profile as layers take in a running pipeline, and how much longer a tick is there than on paper.

        Layers that are timed one after the other do not feel what messages and neighbours do to caches, memory
        and cores. So a pipeline of some other cut is run, and what its stages take more is put on their layers.
        """
        layers, ranks = len(own.layers), self.case.ranks
        cuts = partition(layers, min(layers, 2 * ranks))
        placement = [rank for rank, owned in enumerate(partition(len(cuts), ranks)) for _ in owned]
        order = None if isinstance(self.case.order, list) else self.case.order
        trial = Plan([len(cut) for cut in cuts], placement, [], 0.0, 0.0, [], [], [])
        found = self.measure(method, order, trial)
        k = self.case.accumulate
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
                    loss=nn.functional.cross_entropy,
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

    def measure(self, method: Method, order: str | list[int] | None, plan: Plan) -> dict[str, Any]:
        """Seconds of a tick, and seconds of work and bytes of every rank, in a real run with a full pipeline."""
        k = self.case.accumulate
        trainer = Trainer(
            self.case.network(),
            loss=nn.functional.cross_entropy,
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
        size = k * -(-max(1, self.case.ticks // 4) // k)  # of a window: whole updates
        ticks: list[float] = []
        own: dict[int, list[float]] = {index: [] for index in watches}
        for _ in range(max(1, self.case.ticks // size)):
            before = {index: watch.total for index, watch in watches.items()}
            dist.barrier()
            began = time.perf_counter()
            for _ in range(size):
                self.step(trainer)
            dist.barrier()
            ticks.append((time.perf_counter() - began) / size)
            for index, watch in watches.items():
                own[index].append((watch.total - before[index]) / size)
        memory = max(self.held(trainer) for _ in range(k))
        trainer.drain()
        said = self.transport.gather([[index, statistics.median(seconds)] for index, seconds in own.items()])
        stages = dict(pair for pairs in said for pair in pairs)
        return {
            "tick": self.transport.gather(statistics.median(ticks))[0],
            "own": [sum(seconds for _, seconds in pairs) for pairs in said],
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
