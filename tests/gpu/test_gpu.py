"""The engine on a GPU; skipped where there is none."""

import copy
import gc
import io
import json

import pytest
import torch
import torch.distributed as dist
from helpers import rank_worker
from helpers.comparison import assert_same_run, make_optimizer
from helpers.networks import batches, mixed_network, reversible_network
from helpers.ranks import run_ranks
from helpers.reference import train_pipelined, train_sequential
from helpers.token_folders import write_tokens
from helpers.trainers import same_weights, trained

from petra import Network, ReversibleBlock, Trainer, check_invertible, models, plain_autograd
from petra.cli.main import main
from petra.data import Batches, load_data, token_files
from petra.distributed import ProcessTransport, RecentMaximum
from petra.pipeline import partition

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.slow]


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)


def on_gpu(count, **options):
    return [(x.cuda(), y.cuda()) for x, y in batches(count, **options)]


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("schedule", ["lock-step", "low-staleness"])
@pytest.mark.parametrize("method", ["petra", "petra-stashed", "checkpointed", "delayed"])
def test_pipelined_methods_equal_the_reference(method, schedule, k):
    torch.manual_seed(0)
    network = mixed_network().cuda()
    twin = copy.deepcopy(network)
    options = {"method": method, "stages": 3, "schedule": schedule, "accumulate": k, "seed": 7}
    trainer = Trainer(network, loss=torch.nn.functional.cross_entropy, optimizer=make_optimizer, **options)
    data = on_gpu(30)
    cuts = [list(cut) for cut in partition(len(network), 3)]
    assert_same_run(trainer, twin, train_pipelined(twin, cuts, data, method, schedule, make_optimizer, k, key=7), data)


@pytest.mark.parametrize("method", ["backprop", "reversible"])
def test_sequential_methods_equal_the_reference(method):
    torch.manual_seed(0)
    network = mixed_network().cuda()
    twin = copy.deepcopy(network)
    trainer = Trainer(
        network, loss=torch.nn.functional.cross_entropy, optimizer=make_optimizer, method=method, stages=3, seed=7
    )
    data = on_gpu(30)
    assert_same_run(trainer, twin, train_sequential(twin, data, make_optimizer, 1, 7, method == "reversible"), data)


def test_reversible_gradients_and_random_state():
    torch.manual_seed(0)
    network = Network(*reversible_network(5, dropout=0.3)[1:-1]).cuda().double()
    inputs = [torch.randn(4, 3, 5, 5, device="cuda", dtype=torch.float64, requires_grad=True) for _ in range(2)]
    found = []
    for plain in (False, True):
        torch.manual_seed(3)
        if plain:
            with plain_autograd():
                outputs = network(*inputs)
        else:
            outputs = network(*inputs)
        loss = sum(y.square().sum() for y in outputs)
        found.append([*torch.autograd.grad(loss, [*inputs, *network.parameters()]), torch.rand(3, device="cuda")])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    assert check_invertible(network, *(x.detach() for x in inputs), tolerance=1e-10)


@pytest.mark.parametrize("method", ["petra", "reversible", "backprop", "delayed"])
def test_bf16_autocast_learns(method):
    torch.manual_seed(0)
    network = models.create("revnet18", width=8, depths=(1, 1)).to("cuda", memory_format=torch.channels_last)
    trainer = Trainer(
        network,
        loss=torch.nn.functional.cross_entropy,
        optimizer=lambda p: torch.optim.SGD(p, 0.02, momentum=0.9),
        method=method,
        stages=4,
        autocast=torch.bfloat16,
    )
    x, y = torch.randn(32, 3, 16, 16), torch.randint(10, (32,))
    losses = [float(f.loss) for _ in range(60) for f in trainer.step(x, y)]
    assert losses[-1] < 0.7 * losses[0]
    assert all(p.dtype == torch.float32 for p in network.parameters())


def test_flat_memory_in_depth():
    """Activation memory of a segment of reversible blocks does not grow with their number."""

    def peak(layers):
        f = lambda: torch.nn.Sequential(torch.nn.Linear(256, 256, bias=False), torch.nn.Tanh())  # noqa: E731
        network = Network(*(ReversibleBlock(f(), f()) for _ in range(layers))).cuda()
        inputs = [torch.randn(4096, 256, device="cuda", requires_grad=True) for _ in range(2)]
        weights = sum(p.numel() * p.element_size() for p in network.parameters())
        torch.cuda.synchronize()
        gc.collect()  # or what is left of other tests goes in the middle of this one
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        sum(y.sum() for y in network(*inputs)).backward()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before - weights  # their gradients

    peak(6)  # libraries allocate their workspaces
    assert peak(48) <= 1.05 * peak(6)


def test_command_line_and_that_the_same_options_give_the_same_weights(tmp_path):
    hashes = []
    for name in ("a", "b"):
        torch.backends.cudnn.deterministic = False  # the command sees to it itself
        arguments = ["train", "--recipe", "digits", "--width", "32", "--epochs", "2", "--device", "cuda", "--quiet"]
        assert main([*arguments, "--out", str(tmp_path / name)]) == 0
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        assert "NVIDIA" in summary["environment"]["device"]
        assert summary["environment"]["cudnn_benchmark"] is False
        hashes.append(summary["weights_sha256"])
    assert hashes[0] == hashes[1]
    assert main(["train", "--resume", "--out", str(tmp_path / "a"), "--quiet"]) == 0


def test_a_state_from_the_cpu_loads_onto_the_gpu():
    def make():
        return Trainer(
            mixed_network().cuda(),
            loss=torch.nn.functional.cross_entropy,
            optimizer=make_optimizer,
            stages=3,
            method="delayed",
        )

    trainer, data = make(), on_gpu(9)
    for x, y in data[:6]:
        trainer.step(x, y)
    buffer = io.BytesIO()
    torch.save(trainer.state_dict(), buffer)
    buffer.seek(0)
    resumed = make()
    resumed.load_state_dict(torch.load(buffer, map_location="cpu", weights_only=True))
    for t in (trainer, resumed):
        for x, y in data[6:]:
            t.step(x, y)
        t.drain()
    for a, b in zip(trainer.network.state_dict().values(), resumed.network.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_ranks_that_share_a_gpu_give_the_bits_of_one_process(tmp_path):
    """Over gloo, because NCCL wants a GPU for each rank."""
    options = {"stages": 4, "device": "cuda"}
    cases = [
        {"options": {**options, "method": "petra", "schedule": "lock-step"}},
        {"options": {**options, "method": "petra", "schedule": "low-staleness", "accumulate": 2}},
        {"options": {**options, "method": "delayed", "schedule": "lock-step"}},
        {"options": {**options, "method": "reversible"}},
        {"options": {**options, "method": "petra", "comm_dtype": "bf16"}},
    ]
    expected = [json.loads(json.dumps(rank_worker.run(case))) for case in cases]
    for world in (2, 4):
        (tmp_path / str(world)).mkdir()
        ranks = run_ranks(world, cases, tmp_path / str(world))
        for number, case in enumerate(expected):
            for tick, stages in enumerate(case["ticks"]):
                found = {stage: v for rank in ranks for stage, v in rank[number]["ticks"][tick].items()}
                assert found == stages, (world, number, tick)


def test_nccl_with_the_one_rank_that_one_gpu_allows(tmp_path):
    """Groups, gathering, averaging and questions; messages between ranks need a second GPU."""
    torch.cuda.set_device(0)  # as the command line does, before ranks meet
    dist.init_process_group("cpu:gloo,cuda:nccl", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        transport = ProcessTransport("cuda")
        assert transport.gather({"a": [1, None]}) == [{"a": [1, None]}]
        tensors = [torch.randn(5, device="cuda"), torch.randn(3, 3, device="cuda", dtype=torch.float64)]
        before = [t.clone() for t in tensors]
        transport.average(tensors)
        assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
        recent = RecentMaximum(transport)
        assert [recent.update([i == 2]) for i in range(9)] == [None] * 4 + [[int(i == 6)] for i in range(4, 9)]
        network = mixed_network()
        twin = copy.deepcopy(network)
        options = {"device": "cuda", "stages": 3}
        assert same_weights(trained(network, transport=transport, **options), trained(twin, **options))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("vocab_size", [2**16, 2**17])
@pytest.mark.parametrize("resident_bytes", [0, 2**29])
def test_token_files_give_the_same_batches_as_on_the_cpu(tmp_path, monkeypatch, vocab_size, resident_bytes):
    monkeypatch.setattr(token_files, "_RESIDENT_BYTES", resident_bytes)
    row = torch.randint(vocab_size, (999,), generator=torch.Generator().manual_seed(0)).tolist()
    data = load_data(f"tokens:{write_tokens(tmp_path, row, row, vocab_size)}", seq_len=7)
    for split in ("train", "test"):
        on_cpu, on_cuda = (Batches(data, split, 5, seed=1, device=device) for device in ("cpu", "cuda"))
        for (x, y), (u, v) in zip(on_cpu.epoch(2), on_cuda.epoch(2), strict=True):
            assert u.is_cuda
            assert v.is_cuda
            assert torch.equal(x, u.cpu())
            assert torch.equal(y, v.cpu())
