"""Storages of layers and fit_memory on a GPU; skipped without one."""

import copy

import pytest
import torch
from helpers.networks import batches, mixed_network
from torch.nn.functional import cross_entropy

import petra
from petra.cudagraph import CudaGraphCapture
from petra.memory import allocated_bytes
from petra.memory.step_cost import measure_step
from petra.reversible.backprop import plain_autograd

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of the compiler
]

CUDA = torch.device("cuda")
MIB = 2**20


@pytest.fixture(autouse=True)
def deterministic(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


class Training:
    """A small vision transformer, its optimizer and one batch."""

    def __init__(self, name="rev-vit-s", dtype=torch.float64, depth=4, samples=32):
        torch.manual_seed(0)
        sizes = {"image_size": 32, "patch": 4, "width": 64, "depth": depth, "heads": 2, "num_classes": 10}
        self.network = petra.models.create(name, **sizes).to(CUDA, dtype)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), 1e-3, fused=True, capturable=True)
        self.x = torch.randn(samples, 3, 32, 32, device=CUDA, dtype=dtype)
        self.y = torch.randint(10, (samples,), device=CUDA)

    def gradients(self):
        cross_entropy(self.network(self.x), self.y).backward()
        found = [p.grad for p in self.network.parameters()]
        for parameter in self.network.parameters():
            parameter.grad = None
        return found

    def step(self, parts=1):
        for x, y in zip(self.x.chunk(parts), self.y.chunk(parts), strict=True):
            (cross_entropy(self.network(x), y) / parts).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def allocated(self):
        return allocated_bytes(self.network, [self.optimizer])


MIXTURES = [
    ("offload", "offload", "offload", "offload"),
    ("reconstruct", "offload", "recompute", "store"),
    ("selective", "reconstruct", "reconstruct", "offload"),
    ("store:0.5", "store:0.2", "reconstruct", "store:1"),
    ("store:0", "store:0", "offload", "recompute"),
]


@pytest.mark.parametrize("blocks", MIXTURES, ids="-".join)
def test_every_mixture_has_the_gradients_of_plain_autograd(blocks):
    training = Training()
    with plain_autograd():
        expected = training.gradients()
    training.network.use_storage("store", *blocks, "store")
    for _ in range(2):
        torch.testing.assert_close(training.gradients(), expected, rtol=1e-10, atol=1e-10)


def test_offloaded_networks_with_dropout_have_the_gradients_of_plain_autograd():
    torch.manual_seed(0)
    network, ((x, y),) = mixed_network().double().to(CUDA), batches(1, dtype=torch.float64)
    found = []
    for stored in (False, True):
        own = copy.deepcopy(network)
        if stored:
            own.use_storage("offload", "reconstruct", "offload", "recompute", "recompute", "offload")
        torch.manual_seed(3)
        cross_entropy(own(x.to(CUDA)), y.to(CUDA)).backward()
        found.append([p.grad for p in own.parameters()])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


def test_offloaded_biases_of_attention_keep_their_alignment():
    """Windows of 7×7 positions have 49 columns, which PyTorch pads for its kernels."""
    torch.manual_seed(0)
    sizes = {"width": 64, "depths": (2,), "heads": (8,), "num_classes": 10, "image_size": 56}
    network, x = petra.models.create("swin-b", **sizes).to(CUDA), torch.randn(4, 3, 56, 56, device=CUDA)
    found = []
    for storage in ("store", "offload"):
        network.use_storage("store", storage, storage, "store")
        network.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = network(x).square().mean()
        loss.backward()
        found.append([p.grad.clone() for p in network.parameters()])
    torch.testing.assert_close(*found, rtol=1e-2, atol=1e-4)  # sums in any order


def test_offloaded_activations_leave_the_device():
    peaks = {}
    for storage in ("store", "offload"):
        training = Training(dtype=torch.float32, samples=256)
        training.network.use_storage("store", *[storage] * 4, "store")
        peaks[storage] = measure_step(training.step, CUDA, training.allocated).peak
    assert peaks["offload"] < 0.5 * peaks["store"]


@pytest.mark.parametrize("blocks", [("reconstruct",) * 4, ("recompute", "selective", "reconstruct", "store:0.5")])
def test_whole_steps_can_be_captured(blocks):
    """With the weights of steps that are not captured, bit for bit."""
    first, second = Training(), Training()
    for training in (first, second):
        training.network.use_storage("store", *blocks, "store")
        for _ in range(3):
            training.step()
    launch = CudaGraphCapture(CUDA).capture(second.step)  # and launches it once
    for _ in range(4):
        launch()
    for _ in range(5):
        first.step()
    for a, b in zip(first.network.parameters(), second.network.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("storage", ["reconstruct", "recompute"])
def test_dropout_that_is_repeated_cannot_be_captured(storage):
    torch.manual_seed(0)
    network, ((x, y),) = mixed_network().to(CUDA), batches(1)
    x, y = x.to(CUDA), y.to(CUDA)
    if storage == "recompute":
        network.use_storage(*["recompute"] * len(network))

    def step():
        cross_entropy(network(x), y).backward()
        for parameter in network.parameters():
            parameter.grad = None

    step()
    with pytest.raises(RuntimeError, match="draw random numbers"):
        CudaGraphCapture(CUDA).capture(step)
    torch.cuda.synchronize()
    step()
    torch.rand(1, device=CUDA)


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_peak_is_under_every_limit(compiled, capture):
    training = Training(dtype=torch.float32, samples=256)
    before = [p.detach().clone() for p in training.network.parameters()]
    options = {"optimizer": training.optimizer, "compile": compiled, "capture": capture, "quiet": True}
    fastest = petra.fit_memory(training.network, "100 GiB", training.step, **options)
    least = min(plan.cost.peak for plan in fastest.measured if plan.parts == 1)
    for share in (0.0, 0.5):
        limit = int(least + share * (fastest.cost.peak - least)) + MIB
        plan = petra.fit_memory(training.network, limit, training.step, **options)
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated() - training.allocated()
        training.step(plan.parts)
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - held <= limit + MIB
        training.optimizer.state.clear()
        with torch.no_grad():
            for parameter, value in zip(training.network.parameters(), before, strict=True):
                parameter.copy_(value)


def test_a_step_that_waits_for_the_gpu_is_measured_as_it_is():
    training = Training()

    def step():
        training.step()
        training.x.sum().item()

    with pytest.warns(UserWarning, match="the step is timed as it is"):
        found = measure_step(step, CUDA, training.allocated, capture=True)
    assert found is not None
    assert found.peak > 0
    training.step()
