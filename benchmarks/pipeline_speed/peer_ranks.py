"""The work of a rank that compares schedules: one launch measures all configurations in turn."""

from __future__ import annotations

import gc
import json
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from flops import count_flops
from peak_memory import PeakMemory, bytes_in_use
from pipelines import Data, PetraPipeline
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch_schedules import SCHEDULES, TorchPipeline

import petra
from petra.distributed import ProcessTransport
from petra.measure import environment

PETRA = {
    "petra lock-step": ("petra", "lock-step", 1),
    "petra low-staleness": ("petra", "low-staleness", 1),
    "reversible gpipe": ("reversible", "gpipe", 1),
    "reversible 1f1b": ("reversible", "1f1b", 1),
    "reversible interleaved": ("reversible", "interleaved:2", 2),
    "reversible sequential": ("reversible", None, 1),
    "backprop 1f1b": ("backprop", "1f1b", 1),
}
"""Method, schedule and stages per rank of Petra's pipelines."""

NAMES = [*PETRA, *chain.from_iterable((f"torch {name}", f"torch {name} checkpointed") for name in SCHEDULES)]
"""All pipelines. Those of torch, and backprop, train the plain twin of the reversible network."""

VOCABULARY = 256


def is_plain(name: str) -> bool:
    """Return True for pipelines that train the plain twin."""
    return name.startswith(("torch", "backprop"))


def create(case: dict[str, Any], ranks: int, plain: bool) -> nn.Sequential:
    """Return the network of a case, with the same weights each time."""
    torch.manual_seed(0)
    blocks = case["blocks"] * ranks
    if case["model"] == "gpt":
        return petra.models.create(
            "gpt" if plain else "rev-gpt",
            width=case["width"],
            depth=blocks,
            heads=case["width"] // 32,
            seq_len=case["seq_len"],
            vocab_size=VOCABULARY,
        )
    return petra.models.create("resnet18" if plain else "revnet18", depths=(blocks,), width=case["width"])


def microbatches(case: dict[str, Any], count: int) -> Data:
    """Return random micro-batches for a case."""
    torch.manual_seed(1)
    if case["model"] == "gpt":
        shape = count, 2, case["batch_size"], case["seq_len"]
        return [(x, y) for x, y in torch.randint(VOCABULARY, shape)]
    size = case["batch_size"]
    return [(torch.randn(size, 3, 32, 32), torch.randint(10, (size,))) for _ in range(count)]


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy over images or tokens."""
    return cross_entropy(outputs.flatten(0, -2), targets.flatten())


class Configuration:
    """One pipeline for one number of micro-batches per update; every rank makes the same calls."""

    def __init__(
        self, case: dict[str, Any], name: str, data: Data, transport: ProcessTransport, group: dist.ProcessGroup
    ) -> None:
        self.name = name
        ranks = transport.position.ranks
        blocks = case["blocks"] * ranks

        def cut(stages: int) -> Sequence[int]:
            layers = [blocks // stages] * stages
            layers[0] += 1  # the stem
            layers[-1] += 1  # the head
            return layers

        network = create(case, ranks, is_plain(name))
        self._indices = {id(p): i for i, p in enumerate(network.parameters())}
        self.pipeline: TorchPipeline | PetraPipeline
        if name in PETRA:
            method, schedule, per_rank = PETRA[name]
            placement = [stage % ranks for stage in range(per_rank * ranks)]
            self.pipeline = PetraPipeline(
                network, (cut(len(placement)), placement), data, transport, method, schedule, loss
            )
        else:
            _, kind, *checkpointing = name.split()
            self.pipeline = TorchPipeline(network, cut, data, loss, kind, bool(checkpointing), group)
        self._parameters = [p for o in self.pipeline.optimizers for g in o.param_groups for p in g["params"]]
        for p in self._parameters:
            p.grad = torch.zeros_like(p)
        for optimizer in self.pipeline.optimizers:
            optimizer.step()  # so that gradients and momentum are in memory before the peak is measured
        self.sequential = name == "reversible sequential"
        self.seconds: list[float] = []
        self.own: list[float] = []

    def warm_up(self) -> tuple[list[float], int]:
        """Fill the pipeline and run the first update; return losses and the peak bytes of activations."""
        gc.collect()
        before = bytes_in_use()
        with PeakMemory() as peak:
            losses = self.pipeline.run(self.pipeline.fill)
        self.pipeline.settle()
        return losses, peak.bytes - before

    def check_gradients(self, reference: Sequence[Tensor]) -> None:
        """Raise an error unless the gradients of the first update are those of backprop."""
        for p, found in zip(self._parameters, self.pipeline.gradients(), strict=True):
            expected = reference[self._indices[id(p)]]
            assert found is not None
            error = float((found - expected).norm() / expected.norm().clamp_min(1e-6))
            assert error < 1e-3, f"{self.name}: a gradient of shape {tuple(p.shape)} differs from backprop by {error}"

    def flops_per_microbatch(self, size: int) -> float:
        """Count the operations of this rank in one update."""
        found = count_flops(lambda: self.pipeline.run(size)) / size
        self.pipeline.settle()
        return found

    def time_window(self, size: int, window: int) -> None:
        """Measure the seconds per micro-batch of this rank, and those in which it computes."""
        ticks = size if self.sequential else size * max(1, window // size)
        pipeline = self.pipeline
        dist.barrier()
        pipeline.run(pipeline.lead)
        own, began = pipeline.busy.seconds, time.perf_counter()
        pipeline.run(ticks)
        self.seconds.append((time.perf_counter() - began) / ticks)
        self.own.append((pipeline.busy.seconds - own) / ticks)
        pipeline.settle()


def reference_gradients(case: dict[str, Any], ranks: int, plain: bool, data: Data) -> list[Tensor]:
    """Return the gradients of plain backprop, the mean over micro-batches."""
    network = create(case, ranks, plain)
    for x, y in data:
        (loss(network(x), y) / len(data)).backward()
    return [p.grad for p in network.parameters() if p.grad is not None]


def forward_flops(case: dict[str, Any], ranks: int, data: Data) -> int:
    """Count the operations of one forward of the plain network, with its loss."""
    network = create(case, ranks, plain=True)
    with torch.no_grad():
        return count_flops(lambda: loss(network(data[0][0]), data[0][1]))


def measure(options: Namespace, rank: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure all configurations. Rank 0 writes what is known after each step into `options.path`."""
    timeout = timedelta(seconds=options.timeout)
    transport = ProcessTransport(timeout=timeout)
    group = dist.new_group(timeout=timeout)
    began = time.monotonic()
    before = json.loads(options.path.read_text())
    runs: list[dict[str, Any]] = []
    work: dict[tuple[str, str], float] = {}

    def store(current: list[Any] | None) -> None:
        if rank == 0:
            result = {**before, "current": current, "environment": environment(), "runs": before["runs"] + runs}
            written = options.path.with_suffix(".new")
            written.write_text(json.dumps(result, indent=2) + "\n")
            written.replace(options.path)

    def shared(value: Any) -> list[Any]:
        found: list[Any] = [None] * options.ranks
        dist.all_gather_object(found, value)
        return found

    def progress(text: str) -> None:
        say(text)
        if rank == 0:
            print(f"{time.monotonic() - began:6.1f} s  {text}", flush=True)

    progress("first operations")
    for name in ("petra low-staleness", "torch gpipe"):  # what is initialized only once is not measured
        case = options.sizes[options.groups[0][0]]
        first = Configuration(case, name, microbatches(case, 2), transport, group)
        first.warm_up()
        first.flops_per_microbatch(2)
        del first
    for case_name, size, names in options.groups:
        case = options.sizes[case_name]
        data = microbatches(case, size)
        references = {p: reference_gradients(case, options.ranks, p, data) for p in (True, False) if options.check}
        live: list[tuple[Configuration, dict[str, Any]]] = []
        losses: dict[bool, list[float]] = {}
        for name in names:
            if shared(time.monotonic() - began)[0] > options.seconds:
                break
            what = f"{case_name}, {size} micro-batches: {name}"
            progress(what)
            run = {"case": case_name, "microbatches": size, "name": name}
            store([case_name, size, name])
            runs.append(run)
            try:
                transport.release_buffers()
                found = Configuration(case, name, data, transport, group)
            except (ValueError, NotImplementedError) as error:  # all ranks refuse it; the table says why
                run["error"] = str(error)
                progress(f"{what}: {error}")
                continue
            own_losses, activations = found.warm_up()
            if options.check and found.name not in ("petra lock-step", "petra low-staleness"):
                found.check_gradients(references[is_plain(name)])
            all_losses = next(said for said in shared(own_losses) if said)[:size]
            expected = losses.setdefault(is_plain(name), all_losses)
            assert torch.allclose(torch.tensor(expected), torch.tensor(all_losses), rtol=1e-4), (
                f"losses of {name} differ"
            )
            run["activation_bytes"] = shared(activations)
            if (case_name, name) not in work:  # the same for all numbers of micro-batches
                flops = sum(shared(found.flops_per_microbatch(size)))
                work[case_name, name] = flops / forward_flops(case, options.ranks, data)
            run["work"] = work[case_name, name]
            live.append((found, run))
        for turn in range(options.rounds):
            for found, run in live:
                if found.sequential and turn:
                    continue
                if shared(time.monotonic() - began)[0] > options.seconds:
                    continue
                say(f"{case_name}, {size} micro-batches: {found.name}, round {turn}")
                store([case_name, size, found.name])
                found.time_window(size, options.window)
                seen = shared((found.seconds, found.own))
                run["seconds"] = [max(times) for times in zip(*(s for s, _ in seen), strict=True)]
                run["own"] = [own for _, own in seen]
        store(None)
        progress(f"{case_name}, {size} micro-batches: done")
        del live
        gc.collect()
    return {}
