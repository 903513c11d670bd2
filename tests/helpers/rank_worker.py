"""One rank of a test: trains, and writes fingerprints of its stages after every tick."""

import hashlib
import io
import json
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import TCPStore
from torch.nn.functional import cross_entropy

from helpers.networks import batches, mixed_network
from helpers.replicas import train_replicas
from petra import Trainer
from petra.distributed import ProcessTransport
from petra.pipeline import partition
from petra.trainer.trainer import weights_hash

TICKS = 12  # the first six fill the pipeline


def make_trainer(case, transport=None):
    torch.manual_seed(case.get("weights", 0))
    options = {**case["options"]}
    return Trainer(
        mixed_network(),
        loss=cross_entropy,
        optimizer=lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
        seed=3,
        transport=transport,
        **options,
    )


def fingerprint(stage):
    """Weights, running statistics, gradients and momenta of a stage."""
    digest = hashlib.sha256()
    momenta = [s.get("momentum_buffer") for s in stage.optimizer.state.values()]
    state = [v for layer in stage.layers for v in layer.state_dict().values()]
    for tensor in (*state, *stage.gradients(), *momenta):
        digest.update(b"none" if tensor is None else tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def run(case, transport=None, broken=False):
    """For every tick, the fingerprint of every stage of this process; then losses and an evaluation."""
    torch.backends.mkldnn.set_flags(False)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    trainer = make_trainer(case, transport)
    if broken:  # a transport that delivers, but not quite
        send = transport.send
        transport.send = lambda to, label, tensors: send(
            to, label, tuple(None if t is None else t * 1.0001 for t in tensors)
        )
    ticks, losses = [], {}
    for i, (x, y) in enumerate(batches(case.get("ticks", TICKS))):
        losses |= {f.microbatch: float(f.loss) for f in trainer.step(x, y)}
        ticks.append({stage.index: fingerprint(stage) for stage in trainer.stages})
        if i == 8:
            found = trainer.evaluate(batches(3, seed=5))
        if i == case.get("resume_after"):  # through a file, into another trainer
            buffer = io.BytesIO()
            torch.save(trainer.state_dict(), buffer)
            buffer.seek(0)
            trainer = make_trainer(case, transport)
            trainer.load_state_dict(torch.load(buffer, weights_only=True))
    if transport is not None:  # what has left is let go
        assert sum(map(len, [*transport._leaving, *transport._pending_sends])) <= 8  # of two ticks
    held = {stage.index for stage in trainer.stages}
    for stage, cut in enumerate(partition(6, case["options"]["stages"])):
        for layer in cut:  # weights of other ranks' stages take no memory here
            assert all(p.is_meta == (stage not in held) for p in trainer.network[layer].parameters())
    losses |= {f.microbatch: float(f.loss) for f in trainer.drain()}
    ticks.append({stage.index: fingerprint(stage) for stage in trainer.stages})
    whole = trainer.weights()
    return {
        "ticks": ticks,
        "losses": losses,
        "evaluation": [found.loss, found.accuracy, found.samples],
        "weights": None if whole is None else weights_hash(whole),
    }


def gifts(rank):
    """Tensors of a rank, of which others know neither names nor shapes."""
    return {
        f"numbers of {rank}": torch.arange(3 * rank + 1).reshape(1, -1).t(),
        "flag": torch.tensor(rank == 1),
        "half": torch.full((2, rank), 1.5 + rank, dtype=torch.bfloat16),  # of 0, it is empty
    }


def plain(tensors):
    """As plain JSON."""
    return {name: [str(t.dtype), list(t.shape), t.double().flatten().tolist()] for name, t in tensors.items()}


def main(rank, world, port, cases, folder):
    """Errors go into a file beside the results."""
    with open(folder / f"rank{rank}.log", "w") as file:
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    results = []
    transports = {}
    for case in cases:
        replicas = case.get("replicas", 1)
        if replicas not in transports:
            device = case["options"].get("device", "cpu")
            transports[replicas] = ProcessTransport(device, replicas, timedelta(seconds=60))
        transport = transports[replicas]
        try:
            if case.get("brings"):
                results.append(
                    [plain(transport.gather_to_main(source, gifts(rank))) for source in range(world // replicas)]
                )
                continue
            if replicas > 1:
                weights = train_replicas(transport, **case["options"])
                results.append({name: value.tolist() for name, value in weights.items()})
                continue
            if case.get("other_weights_on") == rank:
                case["weights"] = 1
            results.append(run(case, transport, broken=case.get("broken", False) and rank == 0))
        except ValueError as error:
            results.append({"error": str(error)})
    (folder / f"rank{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
