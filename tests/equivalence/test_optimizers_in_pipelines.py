"""Optimizers of petra.optim in pipelines: captured, resumed, cut differently, on ranks and replicas, and in runs."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from helpers.captures import assert_same, data, step, tiny, warming
from helpers.commands import SMALL
from helpers.networks import batches, mixed_network
from helpers.operation_capture import OperationCapture
from helpers.replicas import smooth_network, train_replicas
from helpers.trainers import make
from torch import nn

from petra.cli.main import main
from petra.cudagraph import TickCapture
from petra.distributed import run_together
from petra.measure import MemoryEstimator
from petra.methods import find
from petra.optim import SOAP, AdamWBF16, Muon, NAdamW, hidden_matrices, muon_groups
from petra.pipeline import partition
from petra.runs.run import Run
from petra.schedule import low_staleness
from petra.trainer import checkpoint

pytestmark = pytest.mark.slow

NAMES = ["muon", "soap", "nadamw", "adamw_bf16"]


def factory(name, net, **options):
    """What creates the optimizers of the stages of a network."""
    hidden = hidden_matrices(net)
    if name == "muon":
        return lambda p: Muon(muon_groups(p, hidden, 0.05), 0.02, **options)
    if name == "soap":
        return lambda p: SOAP(p, 0.02, weight_decay=0.05, **{"precondition_frequency": 3, **options})
    make = {"nadamw": NAdamW, "adamw_bf16": AdamWBF16}[name]
    return lambda p: make(p, 0.02, weight_decay=0.05, **options)


def trainer(name, net, options=None, **more):
    return make(net, optimizer=factory(name, net, **(options or {})), **{"scheduler": warming, **more})


@pytest.mark.parametrize(
    ("name", "corrections", "accumulate", "method"),
    [
        *((name, ["predict:2"], 2 + number % 2, "petra") for number, name in enumerate(NAMES)),
        ("muon", ["predict"], 1, "checkpointed"),
        ("muon", [], 1, "delayed"),
        ("soap", ["reschedule:9"], 1, "petra"),
        ("soap", [], 2, "reversible"),
        ("nadamw", ["coast"], 2, "petra"),
        ("adamw_bf16", [], 1, "delayed"),
    ],
    ids=str,
)
def test_captured_ticks_are_ordinary_ticks(name, corrections, accumulate, method):
    net = tiny()
    options = {"stages": 4, "corrections": corrections, "accumulate": accumulate, "method": method, "clip_norm": 0.5}
    plain, captured = (trainer(name, copy.deepcopy(net), **options) for _ in range(2))
    captured.executor.capture = TickCapture(captured.executor, OperationCapture())
    for number, (x, y) in enumerate(data(14 + 7 * accumulate)):
        step((plain, captured), x, y)
        assert_same(plain, captured)
        if number == 8 + 4 * accumulate:  # after a state was loaded, the graph is captured again
            for one in (plain, captured):
                one.load_state_dict(copy.deepcopy(one.state_dict()))
    for one in (plain, captured):
        one.drain()
    assert_same(plain, captured)
    assert captured.executor.capture.ineligible_reason is None
    assert captured.executor.capture.captured_ticks > 5


@pytest.mark.parametrize(("method", "k"), [("petra", 1), ("petra", 3), ("delayed", 2)])
@pytest.mark.parametrize("name", NAMES)
def test_a_run_resumed_in_flight_ends_with_the_same_bits(name, method, k, tmp_path):
    options = {"method": method, "stages": 4, "accumulate": k, "corrections": ["predict:2"]}
    torch.manual_seed(0)
    net, micro_batches = mixed_network(), list(batches(13))
    straight, going = (trainer(name, copy.deepcopy(net), **options) for _ in range(2))
    for x, y in micro_batches:
        straight.step(x, y)
    straight.drain()
    for cut, (x, y) in enumerate(micro_batches, 1):
        going.step(x, y)
        if cut not in (2, 7):
            continue
        checkpoint.save(tmp_path / "c.pt", {"trainer": going.state_dict()})
        resumed = trainer(name, mixed_network(), **options)
        resumed.load_state_dict(checkpoint.load(tmp_path / "c.pt")["trainer"])
        for x, y in micro_batches[cut:]:
            resumed.step(x, y)
        resumed.drain()
        assert all(value.equal(resumed.weights()[key]) for key, value in straight.weights().items())
        assert_same_states(named_state(straight), named_state(resumed))


def assert_same_states(a, b):
    """To the bit, with their dtypes."""
    assert a.keys() == b.keys()
    for name, state in a.items():
        assert state.keys() == b[name].keys()
        for key, value in state.items():
            other = b[name][key]
            if isinstance(value, torch.Tensor):
                assert value.dtype == other.dtype
                assert value.equal(other), (name, key)
            else:
                assert value == other


def named_state(one):
    names = {p: name for name, p in one.network.named_parameters()}
    return {names[p]: state for stage in one.stages if stage.optimizer for p, state in stage.optimizer.state.items()}


@pytest.mark.parametrize("stages", [1, 2, [2, 1, 2]])
@pytest.mark.parametrize("name", NAMES)
def test_another_cut_goes_on_as_before(name, stages):
    """Backprop does not depend on the cut, so training ends alike."""
    options = {"max_precondition_dim": 12} if name == "soap" else {}
    torch.manual_seed(0)
    net = smooth_network().double()
    micro_batches = list(batches(20, size=8, dtype=torch.float64))
    before, straight = (
        trainer(name, copy.deepcopy(net), options, stages=4, method="backprop", accumulate=2) for _ in range(2)
    )
    for x, y in micro_batches[:8]:
        before.step(x, y)
    before.drain()
    after = trainer(name, copy.deepcopy(net), options, stages=stages, method="backprop", accumulate=2)
    after.load_drained(copy.deepcopy(before.state_dict()))
    assert_same_states(named_state(before), named_state(after))
    for x, y in micro_batches[8:]:
        after.step(x, y)
    for x, y in micro_batches:
        straight.step(x, y)
    for a, b in zip(after.network.parameters(), straight.network.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", NAMES)
def test_ranks_equal_one_process_bit_for_bit(name):
    def work(transport=None):
        torch.manual_seed(0)
        one = trainer(name, mixed_network(), transport=transport, stages=4, accumulate=2, seed=3)
        for x, y in batches(18):
            one.step(x, y)
        one.drain()
        return named_state(one), one.weights()

    expected, weights = work()
    ranks = run_together(work, 2)
    assert_same_states(expected, {key: value for states, _ in ranks for key, value in states.items()})
    assert all(value.equal(ranks[-1][1][key]) for key, value in weights.items())


@pytest.mark.parametrize("name", NAMES)
def test_replicas_equal_one_process_with_all_samples(name):
    def optimizer(parameters):
        matrices = {p for p in parameters if p.shape == (6, 6)}
        if name == "muon":
            return Muon(muon_groups(parameters, matrices, 0.05), 0.02)
        if name in ("nadamw", "adamw_bf16"):
            return {"nadamw": NAdamW, "adamw_bf16": AdamWBF16}[name](parameters, 0.02)
        # SOAP's eigenvectors amplify rounding errors, those of singular matrices without limit.
        others = {"params": [p for p in parameters if p not in matrices], "max_precondition_dim": 1}
        return SOAP([others, {"params": list(matrices)}], 0.02, eps=1e-3, precondition_frequency=3)

    def work(transport=None):
        return train_replicas(transport, stages=3, accumulate=2, uneven=True, optimizer=optimizer)

    expected = work()
    first, second = run_together(work, 1, 2)
    for key, value in expected.items():
        assert first[key].equal(second[key])
        torch.testing.assert_close(first[key], value, rtol=0, atol=1e-6 if name == "soap" else 1e-10)


def test_a_checkpoint_of_pytorchs_nadam_can_be_resumed():
    torch.manual_seed(0)
    net, micro_batches = mixed_network().double(), list(batches(14, dtype=torch.float64))

    def theirs(parameters):
        return torch.optim.NAdam(parameters, 0.02, weight_decay=0.05, decoupled_weight_decay=True)

    old = make(copy.deepcopy(net), optimizer=theirs, scheduler=warming, stages=4)
    new = trainer("nadamw", copy.deepcopy(net), stages=4)
    for x, y in micro_batches[:7]:
        old.step(x, y)
    new.load_state_dict(copy.deepcopy(old.state_dict()))
    for one in (old, new):
        for x, y in micro_batches[7:]:
            one.step(x, y)
    for a, b in zip(old.network.parameters(), new.network.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_estimated_without_memory(name):
    """On tensors without values; of each 6×6 weight, SOAP keeps six matrices, Muon one, and AdamWBF16 two halves."""
    makers = {"muon": Muon, "soap": SOAP, "nadamw": NAdamW, "adamw_bf16": AdamWBF16}
    torch.manual_seed(0)
    net = smooth_network()
    estimator = MemoryEstimator(
        list(net),
        find("petra"),
        (torch.zeros(2, 2, 4, 4),),
        torch.zeros(2, dtype=torch.long),
        loss=nn.functional.cross_entropy,
        optimizer=lambda p: makers[name]([x for x in p if x.shape == (6, 6)]),
    )
    cuts = partition(5, [1, 2, 2])
    memory = estimator.memory(cuts[1:2], 1, low_staleness(3))[0]
    matrices = {"muon": 1, "soap": 6, "nadamw": 2, "adamw_bf16": 1}[name]
    numbers = {"muon": 0, "soap": 1, "nadamw": 2, "adamw_bf16": 1}[name]
    assert memory.optimizer == 4 * 4 * (36 * matrices + numbers)


def petra_train(*arguments):
    return main(["train", *SMALL, "--quiet", "--epochs", "1", "--warmup-epochs", "0", *map(str, arguments)])


@pytest.mark.parametrize("name", ["muon", "soap"])
def test_runs(name, tmp_path, monkeypatch):
    made = []
    close = Run.close
    monkeypatch.setattr(Run, "close", lambda run: (made.append(run), close(run)))
    folder = tmp_path / "run"
    options = [
        "--optimizer",
        name,
        "--lr",
        "0.02",
        "--momentum",
        "0.8",
        "--beta2",
        "0.9",
        "--corrections",
        "predict:2",
    ]
    assert petra_train("--out", folder, *options) == 0
    config, summary = (json.loads((folder / f"{file}.json").read_text()) for file in ("config", "summary"))
    assert (config["optimizer"], config["momentum"], config["beta2"]) == (name, 0.8, 0.9)
    assert config["corrections"] == ["predict:2.0"]
    assert summary["test_accuracy"] > 0.2
    stages = made[0].trainer.stages
    groups = [group for stage in stages for group in stage.optimizer.param_groups]
    assert {group["initial_lr"] for group in groups} == {0.02}
    assert {(p.ndim > 1, group["weight_decay"]) for group in groups for p in group["params"]} == {
        (True, 0.05),
        (False, 0.0),
    }
    if name == "soap":
        assert {group["betas"] for group in groups} == {(0.8, 0.9)}
        return
    assert {(group["momentum"], group["betas"]) for group in groups} == {(0.8, (0.9, 0.9))}
    hidden = {p for group in groups if group["orthogonalize"] for p in group["params"]}
    assert hidden == hidden_matrices(made[0].trainer.network)
    assert hidden


def test_what_is_neither_fused_nor_capturable_says_so():
    net = tiny()
    one = make(net, stages=4, optimizer=lambda p: torch.optim.NAdam(p, 0.01))
    reason = TickCapture(one.executor, SimpleNamespace()).ineligible_reason
    assert reason.startswith("NAdam is neither fused nor a CapturableOptimizer of petra.optim")
