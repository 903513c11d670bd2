"""Ticks recorded as CUDA graphs against ordinary ones, bit for bit; skipped where there is no GPU."""

import copy

import pytest
import torch
from helpers.captures import assert_equal, assert_same, dropping, step, warming
from helpers.trainers import make
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from petra import models
from petra.trainer import chunked_loss, cross_entropy, optimizers

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.slow]


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)


def fused(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3, fused=True)


def pair(width=8, **options):
    torch.manual_seed(0)
    network = models.create("revnet18", width=width, num_classes=10)
    options = {"optimizer": fused, "scheduler": warming, "stages": 10, "device": "cuda", **options}
    return tuple(make(copy.deepcopy(network), cuda_graph=cuda_graph, **options) for cuda_graph in (False, True))


def data(count, size=16):
    generator = torch.Generator("cuda").manual_seed(1)
    for _ in range(count):
        x = torch.randn(size, 3, 32, 32, device="cuda", generator=generator)
        yield x, torch.randint(10, (size,), device="cuda", generator=generator)


def falling(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 0.99**update)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("schedule", ["lock-step", "low-staleness"])
def test_two_hundred_ticks(schedule, accumulate):
    """With a learning rate that changes with every update, an evaluation, a checkpoint, an uneven batch and a drain."""
    trainers = pair(schedule=schedule, accumulate=accumulate, scheduler=falling)
    for number, (x, y) in enumerate(data(200)):
        uneven = 12 if number == 90 else 16
        step(trainers, x[:uneven], y[:uneven])
        if number == 60:
            assert len({t.evaluate(data(2)) for t in trainers}) == 1
        if number == 70:
            saved = [copy.deepcopy(t.state_dict()) for t in trainers]
        if number == 80:
            for trainer, state in zip(trainers, saved, strict=True):
                trainer.load_state_dict(state)
        if number == 150:
            for trainer in trainers:
                trainer.drain()
        if number % 10 == 0:
            assert_same(*trainers)
    assert_same(*trainers)
    assert trainers[1].executor.capture.ineligible_reason is None
    assert trainers[1].executor.capture.captured_ticks > 80


@pytest.mark.parametrize(
    "method",
    ["backprop", "reversible", "pareprop", "checkpointed", "delayed", "petra-stashed", "features-replay", "dni"],
)
def test_other_methods(method):
    trainers = pair(method=method)
    for x, y in data(50):
        step(trainers, x, y)
    assert_same(*trainers)
    assert trainers[1].executor.capture.captured_ticks > 15


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "1f1b", "accumulate": 16},
        {"schedule": "gpipe", "accumulate": 4},
        {"schedule": "interleaved:2", "accumulate": 10},
        {"method": "petra", "schedule": "flush:2", "accumulate": 12},
        {"method": "petra", "flush_until": 5, "accumulate": 4},
        {"method": "petra", "flush_until": 8, "accumulate": 1},  # ring buffers grow at the switch
    ],
    ids=str,
)
def test_flushed_pipelines(options):
    """Ticks that fill the pipeline, those of the full one and those that flush it are captured."""
    trainers = pair(**{"method": "reversible", **options})
    cycle = options["accumulate"] * (2 if options.get("schedule") == "flush:2" else 1)
    for x, y in data(9 * cycle + (40 if "flush_until" in options else 0)):
        step(trainers, x, y)
    assert_same(*trainers)
    assert trainers[1].executor.capture.ineligible_reason is None
    assert trainers[1].executor.capture.captured_ticks >= 2 * options["accumulate"]


@pytest.mark.parametrize(
    "corrections",
    [["predict"], ["coast"], ["spike"], ["discrepancy"], ["predict", "inertia:4", "reschedule:40"]],
    ids=",".join,
)
def test_corrections(corrections):
    trainers = pair(corrections=corrections)
    for x, y in data(60):
        step(trainers, x, y)
    assert_same(*trainers)
    assert trainers[1].executor.capture.captured_ticks > 15


@pytest.mark.parametrize("method", ["delayed", "petra-stashed"])
def test_corrections_with_stashed_weights(method):
    trainers = pair(method=method, corrections=["inertia:4", "shrink:0.9"])
    for x, y in data(60):
        step(trainers, x, y)
    assert_same(*trainers)
    assert trainers[1].executor.capture.ineligible_reason is None
    assert trainers[1].executor.capture.captured_ticks > 15


def test_momentum_that_falls_with_the_learning_rate():
    trainers = pair(corrections=["predict", "inertia:4"], scheduler=dropping)
    for x, y in data(60):
        step(trainers, x, y)
    assert_same(*trainers)
    assert trainers[1].executor.capture.ineligible_reason is None
    assert trainers[1].executor.capture.captured_ticks > 15


def test_autocast_and_adam():
    def adamw(parameters):
        return torch.optim.AdamW(parameters, lr=0.01, fused=True)

    trainers = pair(optimizer=adamw, autocast=torch.bfloat16, comm_dtype=torch.bfloat16, clip_norm=1.0)
    for x, y in data(50):
        step(trainers, x, y)
    assert_same(*trainers)
    assert trainers[1].executor.capture.captured_ticks > 15


@pytest.mark.parametrize("width", [8, 64])
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "lock-step", "accumulate": 2},
        {"schedule": "lock-step", "autocast": None},
        {"schedule": "low-staleness", "comm_dtype": torch.bfloat16},
        {"schedule": "low-staleness", "corrections": ["predict", "inertia:4"]},
        {"method": "delayed"},
        {"method": "checkpointed"},
        {"method": "features-replay", "stages": 4},
        {"method": "reversible", "stages": 1},
        {"method": "backprop", "stages": 1},
        {"method": "backprop", "stages": 1, "autocast": None},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_channels_last(options, width):
    """In the layout and, but for two, in bfloat16 as the experiments train; width 64 has other kernels than 8."""
    trainers = pair(width, **{"autocast": torch.bfloat16, **options})
    for trainer in trainers:
        trainer.network.to(memory_format=torch.channels_last)
    for x, y in data(60, 64 if width == 64 else 16):
        step(trainers, x.contiguous(memory_format=torch.channels_last), y)
    assert_same(*trainers)
    assert trainers[1].executor.capture.ineligible_reason is None
    assert trainers[1].executor.capture.captured_ticks > 15


class Reading(nn.Module):
    def forward(self, x):
        return x * (1.0 if float(x.detach().sum()) > -1e9 else 2.0)


def test_a_layer_that_cannot_be_recorded_is_done_all_the_same():
    torch.manual_seed(0)
    network = models.create("revnet18", width=8, num_classes=10)
    network[2].f.append(Reading())
    options = {"optimizer": fused, "scheduler": warming, "stages": 10, "device": "cuda"}
    trainers = tuple(make(copy.deepcopy(network), cuda_graph=cuda_graph, **options) for cuda_graph in (False, None))
    for x, y in data(40):
        step(trainers, x, y)
    assert_same(*trainers)
    assert "could not be captured" in trainers[1].executor.capture.ineligible_reason
    torch.randn(3, device="cuda")  # random numbers can be drawn as before


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_checkpoints_travel_between_gpu_and_cpu(optimizer):
    def factory(parameters):
        return getattr(optimizers, optimizer)(parameters, lr=0.01, weight_decay=1e-3)

    network = models.create("revnet18", width=4, num_classes=10)
    there, here, back = (
        make(copy.deepcopy(network), optimizer=factory, stages=3, device=device) for device in ("cuda", "cpu", "cuda")
    )
    batches = [(x.cpu(), y.cpu()) for x, y in data(12, 4)]
    for x, y in batches[:6]:
        there.step(x, y)
    here.load_state_dict(there.state_dict())
    for x, y in batches[6:9]:
        here.step(x, y)
    back.load_state_dict(here.state_dict())
    for x, y in batches[9:]:
        back.step(x, y)
    assert [g["fused"] for g in there.stages[0].optimizer.param_groups] == [True, True]
    assert [g["fused"] for g in back.stages[0].optimizer.param_groups] == [True, True]
    assert not any(g["fused"] for g in here.stages[0].optimizer.param_groups)


def test_memory_does_not_grow_with_replays():
    _, replaying = pair()
    for x, y in data(60):
        replaying.step(x, y)
    before = torch.cuda.memory_allocated()
    for x, y in data(60):
        replaying.step(x, y)
    assert torch.cuda.memory_allocated() <= before + 2**20


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("method", ["petra", "backprop"])
def test_a_language_model_with_a_chunked_loss(method, autocast, monkeypatch):
    monkeypatch.setattr(chunked_loss, "_ENOUGH_LOGITS", 64 * 100)
    torch.manual_seed(0)
    shape = {"width": 64, "heads": 2, "depth": 3, "vocab_size": 100, "seq_len": 32}
    network = models.create("rev-gpt-25m", **shape, kv_heads=1, chunked_loss=True)
    options = {"method": method, "stages": 5, "loss": cross_entropy, "autocast": autocast, "device": "cuda"}
    options["optimizer"] = lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    trainers = [make(copy.deepcopy(network), cuda_graph=cuda_graph, **options) for cuda_graph in (False, True)]
    generator = torch.Generator("cuda").manual_seed(1)
    for _ in range(30):
        tokens = torch.randint(100, (8, 33), device="cuda", generator=generator)
        with sdpa_kernel(SDPBackend.MATH):  # gradients of the others depend on the order of additions
            results = [trainer.step(tokens[:, :-1], tokens[:, 1:]) for trainer in trainers]
        assert_equal(*([r.loss for r in found] for found in results))
        assert_same(*trainers)
    assert trainers[1].executor.capture.ineligible_reason is None
    assert trainers[1].executor.capture.captured_ticks > 5


def test_one_chunk_of_logits_is_in_memory():
    """Hidden states, both gradients, and a few chunks of logits, but never all logits."""
    tokens, width, classes = 2**15, 64, 2**14
    hidden = torch.randn(tokens, width, device="cuda", requires_grad=True)
    weight = torch.randn(classes, width, device="cuda", requires_grad=True)
    targets = torch.randint(classes, (tokens,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    cross_entropy((hidden, weight), targets).backward()
    limit = 4 * (4 * 2**25) + 12 * (tokens + classes) * width
    assert torch.cuda.max_memory_allocated() - before < limit < 4 * tokens * classes
