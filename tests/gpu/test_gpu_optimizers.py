"""Optimizers of petra.optim on a GPU: captured ticks equal ordinary ones bit for bit; skipped where there is none."""

import copy

import pytest
import torch
from helpers.captures import assert_same, step, warming
from helpers.trainers import make
from torch import nn

from petra import models
from petra.optim import SOAP, AdamWBF16, Muon, NAdamW, hidden_matrices, muon_groups

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.slow]


def trainer(name, network, **options):
    hidden = hidden_matrices(network)

    def optimizer(parameters):
        if name == "muon":
            return Muon(muon_groups(parameters, hidden, 0.1), 0.003)
        if name == "soap":
            return SOAP(parameters, 0.003, weight_decay=0.1, precondition_frequency=4)
        return {"nadamw": NAdamW, "adamw_bf16": AdamWBF16}[name](parameters, 0.003, weight_decay=0.1)

    def loss(outputs, targets):
        return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())

    return make(network, optimizer=optimizer, loss=loss, **{"scheduler": warming, "stages": 4, **options})


def network():
    torch.manual_seed(0)
    return models.create("rev-gpt", width=64, depth=4, heads=2, vocab_size=50, seq_len=16)


def data(count):
    generator = torch.Generator("cuda").manual_seed(1)
    for _ in range(count):
        yield torch.randint(50, (2, 4, 16), device="cuda", generator=generator).unbind()


@pytest.mark.parametrize(
    ("corrections", "accumulate"), [([], 1), ([], 3), (["predict"], 1), (["predict:2"], 3), (["coast"], 2)], ids=str
)
@pytest.mark.parametrize("name", ["muon", "soap", "nadamw", "adamw_bf16"])
def test_captured_ticks_are_ordinary_ticks(name, corrections, accumulate):
    net = network()
    options = {"corrections": corrections, "accumulate": accumulate, "device": "cuda", "autocast": torch.bfloat16}
    trainers = [trainer(name, copy.deepcopy(net), cuda_graph=graph, **options) for graph in (False, True)]
    for number, (x, y) in enumerate(data(30 + 20 * accumulate)):
        step(trainers, x, y)
        if number % 10 == 0:
            assert_same(*trainers)
        if number == 20 + 10 * accumulate:
            for one in trainers:
                one.load_state_dict(copy.deepcopy(one.state_dict()))
    assert_same(*trainers)
    assert trainers[1].executor.capture.ineligible_reason is None
    assert trainers[1].executor.capture.captured_ticks > 15


@pytest.mark.parametrize("name", ["muon", "soap", "nadamw", "adamw_bf16"])
def test_checkpoints_travel_between_gpu_and_cpu(name):
    net = network()
    there, here, back = (trainer(name, copy.deepcopy(net), device=device) for device in ("cuda", "cpu", "cuda"))
    micro_batches = [(x.cpu(), y.cpu()) for x, y in data(21)]
    for x, y in micro_batches[:10]:
        there.step(x, y)
    here.load_state_dict(there.state_dict())
    for x, y in micro_batches[10:15]:
        here.step(x, y)
    back.load_state_dict(here.state_dict())
    for x, y in micro_batches[15:]:
        back.step(x, y)
    for one, device in ((there, "cuda"), (here, "cpu"), (back, "cuda")):
        states = [state for stage in one.stages for state in stage.optimizer.state.values()]
        assert {v.device.type for state in states for v in state.values() if isinstance(v, torch.Tensor)} == {device}


@pytest.mark.parametrize("name", ["muon", "nadamw", "adamw_bf16"])
def test_updates_are_those_of_a_cpu(name):
    """Muon iterates in bfloat16 on a GPU, so its updates agree to two digits. Random bits are the same everywhere."""
    generator = torch.Generator().manual_seed(0)
    start, gradients = torch.randn(2, 32, 48, generator=generator), torch.randn(5, 2, 32, 48, generator=generator)
    found = []
    for device in ("cpu", "cuda"):
        parameters = [nn.Parameter(w.to(device, copy=True)) for w in start]
        optimizer = {"muon": Muon, "nadamw": NAdamW, "adamw_bf16": AdamWBF16}[name](parameters, 0.01)
        for pair in gradients:
            for parameter, gradient in zip(parameters, pair, strict=True):
                parameter.grad = gradient.to(device)
            optimizer.step()
        found.append(torch.stack([p.detach().cpu() for p in parameters]))
    moved = (found[0] - start).norm()
    assert (found[0] - found[1]).norm() < (0.03 if name == "muon" else 1e-4) * moved


def test_nan_gradients_stay_visible_in_bfloat16_moments():
    """The NaNs of a GPU have all bits set."""
    parameter = nn.Parameter(torch.ones(1000, device="cuda"))
    optimizer = AdamWBF16([parameter])
    parameter.grad = torch.zeros(1000, device="cuda") / 0
    for _ in range(3):
        optimizer.step()
    state = optimizer.state[parameter]
    assert state["exp_avg"].isnan().all()
    assert state["exp_avg_sq"].isnan().all()
    assert parameter.isnan().all()


def test_bfloat16_moments_save_their_half_at_the_peak():
    """Float32 copies of one segment of 2²¹ values are the only temporaries."""
    peaks = {}
    for kind in (torch.optim.AdamW, AdamWBF16):
        parameter = nn.Parameter(torch.ones(2**25, device="cuda"))
        parameter.grad = torch.ones_like(parameter)
        optimizer = kind([parameter], fused=True) if kind is torch.optim.AdamW else kind([parameter])
        optimizer.step()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        optimizer.step()
        peaks[kind] = torch.cuda.max_memory_allocated()
        if kind is AdamWBF16:
            assert peaks[kind] - before < 32 * 2**21
        del parameter, optimizer
    assert peaks[torch.optim.AdamW] - peaks[AdamWBF16] > 4 * 2**25 - 32 * 2**21
