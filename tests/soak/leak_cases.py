"""What `soak.leaks` repeats."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, cycle
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from helpers import fork_server
from helpers.networks import batches, mixed_network
from helpers.replicas import smooth_network
from torch.distributed import TCPStore
from torch.nn.functional import cross_entropy

import petra
from petra import Trainer
from petra.distributed import Transport, job
from petra.runs import weight_files
from petra.runs.config import RunConfig
from petra.runs.run import Run
from petra.trainer import best_weights
from soak.leaks import SAMPLES, Sample, measure

LIMIT = 1800.0
"""Seconds after which the processes of a case are ended."""
Samples = dict[str, list[Sample]]
"""Measurements by process; of a single process, the name is empty."""


@dataclass(frozen=True)
class Case:
    """Something to repeat, in one process or in two ranks."""

    start: Callable[[Transport | None], Any]
    """A context manager that yields the function to call."""
    times: int
    ranks: int = 1

    def run(self, times: int, samples: int = SAMPLES) -> Samples:
        """Repeat it in processes of its own."""
        return run_processes(self.start, times, samples, self.ranks)


def run_processes(start: Callable[[Transport | None], Any], times: int, samples: int, ranks: int) -> Samples:
    """Measure in every rank; nothing hangs: processes are killed when time is up."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context, processes, results = fork_server.context(), [], []
    for rank in range(ranks):
        result, sender = context.Pipe(duplex=False)
        processes.append(fork_server.start(_process, sender, start, times, samples, rank, ranks, store.port))
        sender.close()
        results.append(result)
    try:
        received = [result.recv() if result.poll(LIMIT) else None for result in results]
    except EOFError:
        raise RuntimeError("a process of the case has failed; its error is above") from None
    finally:
        for process in processes:
            process.join(30.0)
            process.kill()
            process.join()
    if None in received:
        raise TimeoutError(f"the case did not end in {LIMIT:.0f} s")
    return {f"rank {rank}" if ranks > 1 else "": found for rank, found in enumerate(received) if found is not None}


def _process(
    sender: Connection,
    start: Callable[[Transport | None], Any],
    times: int,
    samples: int,
    rank: int,
    ranks: int,
    port: int,
) -> None:
    torch.set_num_threads(1)
    if ranks == 1:
        with start(None) as work:
            sender.send(measure(work, times, samples))
        return
    variables = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1"}
    os.environ.update({name: str(value) for name, value in {**variables, "MASTER_PORT": port}.items()})
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100"  # PyTorch records the last 2000 operations: a record that still grows
    if start is joining:
        with start(None) as work:
            sender.send(measure(work, times, samples))
        return
    with job.join(torch.device("cpu"), timeout=300) as transport, start(transport) as work:
        sender.send(measure(work, times, samples))


def make_trainer(network: Any, transport: Transport | None = None, **options: Any) -> Trainer:
    """A trainer of four stages."""
    torch.manual_seed(0)
    given = {"loss": cross_entropy, "stages": 4, "optimizer": partial(torch.optim.SGD, lr=1e-3, momentum=0.9)}
    return Trainer(network(), transport=transport, **{**given, **options})


@contextmanager
def ticks(transport: Transport | None, network: Any = smooth_network, **options: Any) -> Iterator[Callable[[], object]]:
    """Ticks of one trainer."""
    data = cycle(list(batches(12)))
    trainer = make_trainer(network, transport, **options)
    yield lambda: trainer.step(*next(data))


@contextmanager
def everything(transport: Transport | None) -> Iterator[Callable[[], object]]:
    """Ticks with drains, evaluations and states."""
    data, number = list(batches(12)), count()
    trainer = make_trainer(mixed_network, transport, ema=0.99, clip_norm=1.0, clip="global")

    def work() -> None:
        for x, y in data:
            trainer.step(x, y)
        if next(number) % 2:
            trainer.drain()
        trainer.evaluate(data[:2])
        if transport is None:
            trainer.load_state_dict(trainer.state_dict())
        trainer.weights()

    yield work


@contextmanager
def plain_network(transport: Transport | None) -> Iterator[Callable[[], object]]:
    """Reversible backpropagation without a trainer."""
    network, data = mixed_network(), cycle(list(batches(12)))

    def work() -> None:
        x, y = next(data)
        cross_entropy(network(x), y).backward()

    yield work


@contextmanager
def trainers(transport: Transport | None, **options: Any) -> Iterator[Callable[[], object]]:
    """Trainers created, used and destroyed."""
    data = list(batches(6))

    def work() -> None:
        trainer = make_trainer(mixed_network, transport, **options)
        for x, y in data:
            trainer.step(x, y)

    yield work


@contextmanager
def folders(transport: Transport | None) -> Iterator[Callable[[], AbstractContextManager[Path]]]:
    """Yield what makes new folders, the same ones on all ranks."""
    with tempfile.TemporaryDirectory(prefix="petra-leaks-") as own:
        parent = Path(own if transport is None else transport.gather(own)[0])
        numbers = count()

        @contextmanager
        def make_folder() -> Iterator[Path]:
            folder = parent / str(next(numbers))
            yield folder
            if transport is not None:
                transport.gather(None)  # all have read it
            if transport is None or transport.position.is_main:
                shutil.rmtree(folder)

        yield make_folder
        if transport is not None:
            transport.gather(None)


def read_weights_from_memory() -> None:
    """Avoid a leak of safetensors 0.8.0: two numbers for every tensor that it reads from a file."""
    for module in (weight_files, best_weights):
        module.load_file = lambda file: safetensors.torch.load(Path(file).read_bytes())  # type: ignore[attr-defined]


@contextmanager
def fits(transport: Transport | None) -> Iterator[Callable[[], object]]:
    """`Trainer.fit` with checkpoints, and again from the last checkpoint."""
    read_weights_from_memory()
    data = list(batches(8))
    with folders(transport) as make_folder:

        def work() -> None:
            with make_folder() as out:
                for epochs in (1, 2):
                    trainer = make_trainer(smooth_network, transport)
                    trainer.fit(
                        data, data[:2], epochs=epochs, out=out, resume=epochs > 1, checkpoint_every=4, quiet=True
                    )

        yield work


CONFIG = RunConfig(
    model="revnet18",
    model_options={"width": 2, "depths": [1, 1]},
    data="synthetic:3x8x8:4:48",
    stages=4,
    batch_size=16,
    epochs=2,
    augment="randaugment",
    optimizer="muon",
    corrections=["predict"],
)


@contextmanager
def runs(transport: Transport | None, workers: int = 0) -> Iterator[Callable[[], object]]:
    """Runs of the command line: data workers, checkpoints, and a resumption of what has finished."""
    read_weights_from_memory()
    with folders(transport) as make_folder:

        def work() -> None:
            with make_folder() as out:
                for resume in (False, True):
                    Run(replace(CONFIG, workers=workers), out, resume=resume, quiet=True, transport=transport)()
                petra.load(out)

        yield work


@contextmanager
def joining(transport: None) -> Iterator[Callable[[], object]]:
    """Jobs joined and left; the restart count gives each its own entries in the store."""
    numbers, data = count(), list(batches(6))

    def work() -> None:
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(next(numbers))
        with job.join(torch.device("cpu"), timeout=300) as transport:
            trainer = make_trainer(smooth_network, transport)
            for x, y in data:
                trainer.step(x, y)

    yield work


def muon(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Muon for matrices, its AdamW for vectors."""
    groups = [[p for p in parameters if (p.ndim > 1) is matrix] for matrix in (True, False)]
    return petra.optim.Muon(
        [
            {"params": group, "orthogonalize": matrix}
            for group, matrix in zip(groups, (True, False), strict=True)
            if group
        ],
        lr=1e-3,
    )


MUON: dict[str, Any] = {"optimizer": muon, "accumulate": 2}
CORRECTED: dict[str, Any] = {"corrections": ["predict", "inertia", "shrink:0.9"], "ema": 0.99, "clip_norm": 1.0}

CASES = {
    "ticks": Case(ticks, 20_000),
    "ticks of muon": Case(partial(ticks, **MUON), 4000),
    "ticks with corrections": Case(partial(ticks, **CORRECTED), 4000),
    **{
        f"ticks of {method}": Case(partial(ticks, method=method, network=mixed_network), 1000)
        for method in ("backprop", "reversible", "petra-stashed", "delayed", "features-replay", "ddg", "dni")
    },
    "states": Case(everything, 120),
    "backpropagation": Case(plain_network, 2000),
    "trainers": Case(trainers, 200),
    "trainers with corrections": Case(partial(trainers, **CORRECTED), 200),
    "fits": Case(fits, 80),
    "runs": Case(runs, 80),
    "runs with workers": Case(partial(runs, workers=1), 40),
    "ticks of two": Case(ticks, 5000, ranks=2),
    "ticks of two in bfloat16": Case(partial(ticks, comm_dtype=torch.bfloat16), 2000, ranks=2),
    "states of two": Case(everything, 120, ranks=2),
    "trainers of two": Case(trainers, 200, ranks=2),
    "fits of two": Case(fits, 80, ranks=2),
    "runs of two": Case(runs, 80, ranks=2),
    "jobs of two": Case(joining, 200, ranks=2),
}
