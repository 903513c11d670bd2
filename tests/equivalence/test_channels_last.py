"""Channels last: another layout in memory, the same training; and streams keep it from stage to stage."""

import copy
import json

import pytest
import torch
from helpers.operation_capture import OperationCapture
from helpers.trainers import make
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from petra import models
from petra.cli.main import main
from petra.cli.options import set_up_device
from petra.cudagraph import TickCapture
from petra.data import Batches, load_data
from petra.distributed import run_together
from petra.reversible.streams import channels_last, laid_out_like, with_layout

LAST = torch.channels_last


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, fused=True)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3, fused=True)  # a small one makes noise large


def network(name="revnet18"):
    torch.manual_seed(0)
    return models.create(name, width=4, depths=(2, 2), in_channels=3, num_classes=4).double()


def data(count):
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        yield torch.randn(3, 3, 6, 6, generator=generator, dtype=torch.float64), torch.tensor([0, 1, 2])


def trained(net, ticks=10, **options):
    trainer = make(net, **{"optimizer": sgd, "stages": len(net), **options})
    for x, y in data(ticks):
        trainer.step(x.contiguous(memory_format=LAST) if any(map(channels_last, net.parameters())) else x, y)
    trainer.drain()
    return trainer


def assert_close(a, b):
    for x, y in zip(a.network.state_dict().values(), b.network.state_dict().values(), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("method", "stages"),
    [("petra", 6), ("petra", 2), ("reversible", 6), ("backprop", 2), ("delayed", 6), ("backprop gpipe", 2)],
)
def test_training_is_the_same(method, stages):
    method, _, schedule = method.partition(" ")
    options = {"method": method, "stages": stages, "accumulate": 2, "schedule": schedule or None}
    plain = trained(network(), **options)
    assert_close(plain, trained(network().to(memory_format=LAST), **options))


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("method", ["petra", "backprop"])
def test_replayed_ticks_are_the_same(method, optimizer):
    plain = make(network(), optimizer=optimizer, method=method, stages=6)
    replaying = make(network().to(memory_format=LAST), optimizer=optimizer, method=method, stages=6)
    replaying.executor.capture = TickCapture(replaying.executor, OperationCapture())
    for x, y in data(20):
        plain.step(x, y)
        replaying.step(x.contiguous(memory_format=LAST), y)
    assert replaying.executor.capture.ineligible_reason is None
    assert replaying.executor.capture.captured_ticks > 5
    assert_close(plain, replaying)


@pytest.mark.parametrize("name", ["revnet18", "resnet18"])
@pytest.mark.parametrize("method", ["petra", "backprop", "delayed"])
def test_streams_and_gradients_keep_the_layout(name, method):
    trainer = make(network(name).to(memory_format=LAST), method=method, stages=6)
    executor = trainer.executor
    for x, y in data(9):
        trainer.step(x.contiguous(memory_format=LAST), y)
        waiting = [x for stage in range(6) for x in executor.mailbox.tensors(stage)]
        kept = [x for s in trainer.stages for k in s.saved.values() for streams in k.inputs for x in streams]
        assert all(channels_last(x) for x in (*waiting, *kept) if x.ndim == 4 and 0 not in x.stride())
    if method != "backprop":  # which has nothing wait
        assert sum(x.ndim == 4 for x in waiting) >= 5
    for stage in trainer.stages:
        for p in stage.parameters:
            assert all(laid_out_like(x, p) is x for x in (p.grad, stage.optimizer.state[p]["momentum_buffer"]))


class Scale(nn.Module):
    """The gradient of its weight is one number many times, and so has no layout of its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3, 2, 2, dtype=torch.float64).contiguous(memory_format=LAST))

    def forward(self, x):
        return x * self.weight.sum()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_lie_as_their_parameters_do(accumulate):
    trainer = make(nn.Sequential(Scale(), nn.Flatten(), nn.Linear(108, 4).double()), accumulate=accumulate)
    for x, y in data(2):
        trainer.step(x, y)
        weight = trainer.network[0].weight
        assert weight.grad.stride() == weight.stride()


def test_ranks_keep_the_layout():
    one = trained(network().to(memory_format=LAST), stages=4)

    def work(transport):
        trainer = make(network().to(memory_format=LAST), optimizer=sgd, stages=4, transport=transport)
        seen = []
        mailbox = trainer.executor.mailbox
        take_forward = mailbox.take_forward
        mailbox.take_forward = lambda *where: seen.append(take_forward(*where)) or seen[-1]
        for x, y in data(10):
            trainer.step(x.contiguous(memory_format=LAST), y)
        trainer.drain()
        assert all(channels_last(x) for streams in seen for x in streams if x.ndim == 4)
        return {name: v for name, v in trainer.network.state_dict().items() if not v.is_meta}

    found = {name: value for rank in run_together(work, ranks=2) for name, value in rank.items()}
    for name, value in one.network.state_dict().items():
        assert torch.equal(found[name], value)


class Turned(nn.Module):
    """Maps whose channels come last, as images whose channels lie last in memory."""

    def forward(self, x):
        return x.permute(0, 3, 1, 2)


def watch(stage, seen):
    """Note the strides of all messages to the stage."""
    forward, backward = stage.forward, stage.backward

    def see_up(microbatch, inputs):
        seen[stage.index, microbatch, "up"] = [x.stride() for x in inputs]
        return forward(microbatch, inputs)

    def see_down(microbatch, message):
        gradients = () if message is None else message.gradients
        seen[stage.index, microbatch, "down"] = [x.stride() for x in gradients if x is not None]
        return backward(microbatch, message)

    stage.forward, stage.backward = see_up, see_down


@pytest.mark.parametrize("weights_last", [False, True])
@pytest.mark.parametrize("kind", ["one channel", "maps", "inputs", "one pixel"])
def test_messages_lie_the_same_in_one_process_and_on_ranks(kind, weights_last):
    """Whatever layout layers leave them in: kernels, and so the last bits, depend on it."""
    channels = 1 if kind == "one channel" else 3

    def layouts(transport=None):
        torch.manual_seed(0)
        size = 6 if kind == "one pixel" else 1
        first = [nn.Conv2d(channels, 4, size, stride=size, bias=False), nn.BatchNorm2d(4)]
        if kind == "maps":
            first = [nn.Linear(3, 4), Turned()]
        net = nn.Sequential(*first, nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        net = net.to(memory_format=LAST) if weights_last else net
        trainer = make(net, method="checkpointed", stages=len(net), transport=transport)
        seen = {}
        for stage in trainer.stages:
            watch(stage, seen)
        for i in range(8):
            x = torch.randn(3, channels, 6, 6, generator=torch.Generator().manual_seed(i))
            x = x.permute(0, 2, 3, 1).contiguous() if kind == "maps" else x
            x = x.contiguous(memory_format=LAST) if kind == "inputs" else x
            trainer.step(x, torch.tensor([0, 1, 2]))
        trainer.drain()
        return seen

    one = layouts()
    found = run_together(layouts, ranks=3)
    assert {key: value for rank in found for key, value in rank.items()} == one


def test_a_state_of_the_other_layout_is_taken_up():
    """Fused optimizers go through memory in order, so averages have to lie as their parameters do."""
    plain = make(network(), optimizer=adamw, stages=3)
    batches = list(data(14))
    for x, y in batches[:7]:
        plain.step(x, y)
    last = make(network().to(memory_format=LAST), optimizer=adamw, stages=3)
    last.load_state_dict(copy.deepcopy(plain.state_dict()))
    for x, y in batches[7:]:
        plain.step(x, y)
        last.step(x.contiguous(memory_format=LAST), y)
    assert_close(plain, last)


@given(st.permutations(range(4)), st.tuples(*[st.integers(1, 4)] * 4), st.booleans(), st.booleans())
def test_ordered_has_the_same_values_and_one_layout_for_each_shape(schedule, shape, halved, last):
    x = torch.arange(float(torch.Size(shape).numel())).view(shape).permute(schedule)
    x = x[:, : (x.shape[1] + 1) // 2] if halved else x
    found = with_layout(x, last)
    assert torch.equal(found, x)
    assert found.is_contiguous(memory_format=LAST if last else torch.contiguous_format)
    assert found.stride() == with_layout(torch.empty(x.shape), last).stride()
    assert with_layout(found, last) is found


def test_batches_come_in_the_layout():
    images = load_data("synthetic:3x8x8:4:20")
    plain, last = (list(Batches(images, "train", 6, channels_last=on).epoch(0)) for on in (False, True))
    assert all(channels_last(x) and torch.equal(x, y) for (x, _), (y, _) in zip(last, plain, strict=True))


SMALL = [
    *("--model", "revnet18", "--width", "2", "--depths", "1,1", "--data", "synthetic:3x6x6:4:40", "--stages", "4"),
    *("--batch-size", "8", "--epochs", "1", "--threads", "1", "--device", "cpu", "--quiet"),
]


def test_the_command_line_has_it_and_remembers_it(tmp_path, capsys):
    out = ["--out", str(tmp_path / "run")]
    assert main(["train", *SMALL, "--channels-last", *out]) == 0
    assert json.loads((tmp_path / "run" / "config.json").read_text())["channels_last"] is True
    text = ["--model", "rev-gpt", "--data", "synthetic:3x6x6:4:40", "--channels-last"]
    assert main(["train", *text, "--out", str(tmp_path / "text")]) == 2
    assert "--channels-last is for convolutions, and rev-gpt has none" in capsys.readouterr().err


def test_the_gpu_is_chosen_and_benchmark_lets_cudnn_choose(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for benchmark in (True, False):
        for name in ("benchmark", "deterministic"):
            monkeypatch.setattr(torch.backends.cudnn, name, torch.backends.cudnn.benchmark)
        options = type("Options", (), {"threads": None, "device": "cuda:1", "cudnn_benchmark": benchmark})
        assert set_up_device(options) == torch.device("cuda:1")
        assert torch.backends.cudnn.benchmark is benchmark
        assert torch.backends.cudnn.deterministic is not benchmark
    assert chosen == [torch.device("cuda:1")] * 2  # or memory would be taken on the first
