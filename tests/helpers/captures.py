"""Networks, data and comparisons for tests of captured ticks."""

import copy

import torch

from helpers.operation_capture import OperationCapture
from helpers.trainers import make
from petra import models
from petra.cudagraph import TickCapture


def fused(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3, fused=True)


def warming(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(1.0, 0.1 + t / 20))


def dropping(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(1.0, 0.5 + t / 20) * (1.0 if t < 15 else 0.1))


def tiny(**options):
    torch.manual_seed(0)
    return models.create("revnet18", width=2, depths=(2, 2), in_channels=3, num_classes=4, **options)


def pair(network=None, **options):
    """The same trainer twice, the second with ticks that are captured."""
    network = tiny() if network is None else network
    options = {"optimizer": fused, "scheduler": warming, "stages": 4, **options}
    plain, captured = (make(copy.deepcopy(network), **options) for _ in range(2))
    captured.executor.capture = TickCapture(captured.executor, OperationCapture())
    return plain, captured


def assert_same(plain, replaying):
    """All tensors of the trainers, and the numbers of what is in flight."""
    assert_equal(plain.state_dict(), replaying.state_dict())
    a, b = ([g for stage in trainer.stages for g in stage.gradients()] for trainer in (plain, replaying))
    assert_equal(a, b)


def assert_equal(a, b):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.equal(b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_equal(a[key], b[key])
    elif isinstance(a, list | tuple):
        for x, y in zip(a, b, strict=True):
            assert_equal(x, y)
    else:
        assert a == b


def step(trainers, x, y, weight=1.0):
    plain, replaying = trainers
    found = list(zip(plain.step(x, y, weight), replaying.step(x, y, weight), strict=True))
    assert_same_results(found)
    return found


def data(count, size=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, 3, 4, 4, generator=generator), torch.randint(4, (size,), generator=generator))
        for _ in range(count)
    ]


def assert_same_results(found):
    for a, b in found:
        assert (a.microbatch, a.weight) == (b.microbatch, b.weight)
        assert a.loss.equal(b.loss)
        assert a.outputs.equal(b.outputs)
        assert a.targets.equal(b.targets)
