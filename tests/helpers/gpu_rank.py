"""One of several processes on one GPU: trains with and without captured ticks, and compares with one process.

torchrun --nproc-per-node 2 -m helpers.gpu_rank '{"method": "petra"}'
"""

import copy
import json
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from helpers.captures import assert_equal, assert_same_results
from helpers.trainers import make
from petra import models
from petra.distributed import ProcessTransport

TICKS = 200


def fused(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3, fused=True)


def falling(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 0.99**update)


def batches(count, size=16, seed=1):
    generator = torch.Generator("cuda").manual_seed(seed)
    for _ in range(count):
        x = torch.randn(size, 3, 32, 32, device="cuda", generator=generator)
        yield x, torch.randint(10, (size,), device="cuda", generator=generator)


def states(trainer, indices):
    return [
        [stage.trained(), [g for g in stage.gradients() if g is not None]]
        for stage in trainer.stages
        if stage.index in indices
    ]


def main(case):
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    dist.init_process_group("gloo", timeout=timedelta(seconds=90))
    replicas, ticks = case.pop("replicas", 1), case.pop("ticks", TICKS)
    torch.manual_seed(0)
    network = models.create("revnet18", width=8, num_classes=10)
    options = {"optimizer": fused, "scheduler": falling, "stages": 10, "device": "cuda", **case}
    trainers = [
        make(
            copy.deepcopy(network),
            cuda_graph=cuda_graph,
            transport=ProcessTransport("cuda", replicas, timedelta(seconds=90)),
            **options,
        )
        for cuda_graph in (False, True)
    ]
    plain, captured = trainers
    alone = make(copy.deepcopy(network), cuda_graph=False, **options) if replicas == 1 else None
    own = [stage.index for stage in plain.stages]
    replica, saved = plain.transport.position.replica, [None, None]
    for number, (x, y) in enumerate(batches(ticks)):
        if number == 90:  # another size
            x, y = x[:12], y[:12]
        share = slice(replica * len(y) // replicas, (replica + 1) * len(y) // replicas)
        found = [trainer.step(x[share], y[share]) for trainer in trainers]
        assert_same_results(list(zip(*found, strict=True)))
        if alone is not None:
            alone.step(x, y)
        if number == 60:
            scores = {trainer.evaluate(batches(2)) for trainer in trainers}
            assert len(scores) == 1
        if number == 70:
            saved = [copy.deepcopy(trainer.state_dict()) for trainer in trainers]
        if number == 80 and alone is None:
            for trainer, state in zip(trainers, saved, strict=True):
                trainer.load_state_dict(state)
        if number == 120:
            for trainer in (*trainers, *filter(None, [alone])):
                trainer.drain()
        if number % 10 == 0 or number == ticks - 1:
            assert_equal(states(plain, own), states(captured, own))
            if alone is not None:
                assert_equal(states(alone, own), states(captured, own))
    for trainer in (*trainers, *filter(None, [alone])):
        trainer.drain()
    assert_equal(states(plain, own), states(captured, own))
    if alone is not None:
        assert_equal(states(alone, own), states(captured, own))
    print(
        json.dumps([dist.get_rank(), captured.executor.capture.captured_ticks, captured.ineligible_reason]), flush=True
    )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
