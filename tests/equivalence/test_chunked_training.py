"""Training with a chunked loss: the weights of ordinary cross-entropy with every method, on ranks and when captured."""

import copy
import json

import pytest
import torch
from helpers.captures import assert_equal, assert_same
from helpers.operation_capture import OperationCapture
from helpers.trainers import make

from petra import METHODS, models
from petra.cli.main import main
from petra.cudagraph import TickCapture
from petra.distributed import run_together
from petra.measure import Fidelity
from petra.trainer import chunked_loss, cross_entropy

SHAPE = {"width": 8, "heads": 2, "depth": 3, "vocab_size": 11, "seq_len": 6, "norm": "rmsnorm", "positions": "rotary"}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(chunked_loss, "_ENOUGH_LOGITS", 44)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def network(chunked=True, dtype=torch.float64, **options):
    torch.manual_seed(0)
    return models.gpt(**SHAPE, **options, chunked_loss=chunked).to(dtype)


def batch(seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(11, (2, 7), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[seed % 2, : seed % 3] = -100
    return tokens[:, :-1], targets


def train(trainer, ticks=9):
    losses = {}
    for i in range(ticks):
        losses |= {r.microbatch: r.loss for r in trainer.step(*batch(i))}
    losses |= {r.microbatch: r.loss for r in trainer.drain()}
    return losses


def options(method, **others):
    return {"method": method, "stages": 4, "loss": cross_entropy, "optimizer": adamw, **others}


@pytest.mark.parametrize("accumulate", [3])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_as_with_logits(method, accumulate):
    found = []
    for chunked in (True, False):
        trainer = make(network(chunked), **options(method, accumulate=accumulate))
        found.append((train(trainer), trainer.network.state_dict(), trainer.evaluate([batch(0)])))
    (losses, weights, test), (expected_losses, expected_weights, expected_test) = found
    assert losses.keys() == expected_losses.keys()
    for number, loss in losses.items():
        torch.testing.assert_close(loss, expected_losses[number], rtol=1e-9, atol=1e-9)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected_weights[name], rtol=1e-7, atol=1e-7)
    assert test.loss == pytest.approx(expected_test.loss, rel=1e-9)
    assert test.accuracy == expected_test.accuracy is not None


@pytest.mark.parametrize("method", ["petra", "petra-stashed"])
def test_corrections_swap_weights_around_the_loss(method):
    found = []
    for chunked in (True, False):
        trainer = make(network(chunked), **options(method, accumulate=2, corrections=["predict"]))
        train(trainer)
        found.append(trainer.network.state_dict())
    for name, weight in found[0].items():
        torch.testing.assert_close(weight, found[1][name], rtol=1e-7, atol=1e-7)


def test_the_head_can_be_frozen_and_stages_can_have_several_layers():
    net = network()
    net.head.fc.weight.requires_grad_(False)
    before = net.head.fc.weight.clone()
    trainer = make(net, **options("petra", stages=2))
    train(trainer)
    assert torch.equal(net.head.fc.weight, before)
    assert net.head.norm.weight.grad is not None


@pytest.mark.parametrize(
    ("method", "schedule"),
    [("petra", None), ("delayed", None), ("backprop", "1f1b"), ("petra", "1f1b"), ("reversible", None), ("dni", None)],
)
def test_ranks_and_one_process_train_the_same_bits(method, schedule):
    one = make(network(), **options(method, schedule=schedule, accumulate=2))
    expected = train(one)

    def work(transport):
        trainer = make(network(), **options(method, schedule=schedule, accumulate=2, transport=transport))
        losses = train(trainer)
        return losses, trainer.weights()

    (_, nothing), (losses, weights) = run_together(work, ranks=2)
    assert nothing is None
    assert {n: float(loss) for n, loss in losses.items()} == {n: float(loss) for n, loss in expected.items()}
    assert all(torch.equal(weights[name], value) for name, value in one.network.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "accumulate", "autocast"),
    [
        ("petra", 1, None),
        ("petra", 2, torch.bfloat16),
        ("checkpointed", 1, torch.bfloat16),
        ("checkpointed", 2, None),
        ("backprop", 1, None),
        ("backprop", 2, torch.bfloat16),
    ],
)
def test_captured_ticks_are_ordinary_ticks(method, accumulate, autocast):
    def fused(parameters):
        return torch.optim.AdamW(parameters, lr=0.01, fused=True)

    net = network(dtype=torch.float32)
    made = options(method, accumulate=accumulate, optimizer=fused, autocast=autocast)
    plain, captured = (make(copy.deepcopy(net), **made) for _ in range(2))
    captured.executor.capture = TickCapture(captured.executor, OperationCapture())
    for i in range(12 + 4 * accumulate):
        found = [[(r.loss, r.outputs, r.targets) for r in trainer.step(*batch(i))] for trainer in (plain, captured)]
        assert_equal(*found)
        assert_same(plain, captured)
    assert captured.executor.capture.ineligible_reason is None
    assert captured.executor.capture.captured_ticks > 5


def test_autocast_reaches_the_loss():
    trainer = make(network(dtype=torch.float32), **options("petra", autocast=torch.bfloat16, stages=2))
    seen = []
    inner = trainer.stages[-1].loss

    def loss(outputs, targets):
        seen.append([x.dtype for x in outputs])
        return inner(outputs, targets)

    trainer.stages[-1].loss = loss
    train(trainer, 4)
    assert seen == [[torch.bfloat16, torch.float32]] * 4
    assert all(p.dtype == torch.float32 and p.grad.dtype == torch.float32 for p in trainer.network.parameters())


def test_fidelity_measures_the_gradient_of_the_head():
    trainer = make(network(), **options("reversible"))
    with Fidelity(trainer.executor) as fidelity:
        train(trainer, 3)
    heads = [m.similarity.metrics() for m in fidelity.measurements if m.stage == 3]
    assert [(metrics["cosine"], metrics["norm_ratio"]) for metrics in heads] == [pytest.approx((1, 1))] * 3


def test_a_run_on_the_command_line_shows_no_training_accuracy(tmp_path, capsys):
    (tmp_path / "verse.txt").write_text("so long as men can breathe or eyes can see\n" * 12)
    options = {"chunked_loss": "true", "norm": "rmsnorm", "positions": "rotary", "mlp": "swiglu", "kv_heads": 1}
    options |= {"qk_norm": "true", "bias": "false", "residual_scale": 0.5, "embedding_norm": "true"}
    command = ["train", "--model", "rev-gpt", "--data", f"text:{tmp_path / 'verse.txt'}", "--seq-len", "12"]
    command += ["--width", "16", "--depth", "2", "--heads", "2", "--stages", "4", "--epochs", "2", "--device", "cpu"]
    command += ["--optimizer", "adamw", "--batch-size", "8", "--threads", "1"]
    command += [word for name, value in options.items() for word in ("--set", f"{name}={value}")]
    assert main([*command, "--out", str(tmp_path / "run")]) == 0
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["train_accuracy"] for record in records] == [None, None]
    assert 0 < records[-1]["train_loss"] < records[0]["train_loss"]
    assert 0 < records[-1]["test_accuracy"] < 1
    assert "train 0.0%" not in capsys.readouterr().err
    assert main(["generate", str(tmp_path / "run"), "--max-new-tokens", "20", "--device", "cpu"]) == 0
    assert main(["evaluate", str(tmp_path / "run"), "--device", "cpu"]) == 0
