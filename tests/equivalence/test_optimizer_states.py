"""Runs whose AdamW keeps its moments in bfloat16 or 8 bits: resumed, on ranks, at other cuts, and their memory."""

import importlib.util
import json
import os
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers.commands import SMALL
from helpers.small_runs import DATA, OPEN, make
from torch import nn

from petra.cli.main import main
from petra.distributed import run_together
from petra.measure import at_rest
from petra.memory.fit import allocated_bytes
from petra.optim import AdamWBF16
from petra.runs.config import RunConfig
from petra.runs.dry_run import dry_run

pytestmark = pytest.mark.slow

ADAMW = {"optimizer": "adamw", "lr": 0.01, "batch_size": 256}
needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
STATES = ["bf16", pytest.param("8bit", marks=needs_torchao)]


@pytest.fixture(autouse=True, scope="module")
def final_tick():
    yield
    for run in OPEN:
        run.close()


@pytest.fixture(autouse=True)
def without_compiler():
    """The optimizers of torchao are compiled, which takes minutes."""
    with torch.compiler.set_stance("force_eager"):
        yield


def wide(folder, transport=None, **changes):
    """A run with parameters of 4096 values and more, which torchao quantizes."""
    options = {"model_options": {"width": 16, "depths": [1, 1]}, "keep": 3, "checkpoint_every": 3}
    return make(folder, transport, **{**ADAMW, **options, **changes})


@pytest.mark.parametrize("state", STATES)
def test_a_run_resumed_in_flight_ends_with_the_same_bits_on_ranks_too(state, tmp_path):
    run = wide(tmp_path / "run", optimizer_state=state)
    whole = run()
    folder = tmp_path / "run" / "checkpoint"
    oldest = min(int(name) for name in os.listdir(folder) if name.isdigit())
    for ranks in (1, 2, 3):
        shutil.copytree(tmp_path / "run", tmp_path / str(ranks))

        def go_on(transport=None, to=tmp_path / str(ranks)):
            again = wide(to, transport, resume=True, from_checkpoint=oldest, optimizer_state=state)
            assert again.trainer.executor.in_flight or transport is not None
            found = moments_of(again)
            assert found
            if state == "bf16":
                assert {x.dtype for x in found} == {torch.bfloat16}
            elif transport is None:  # a rank may have small parameters only
                assert "OptimState8bit" in {type(x).__name__ for x in found}
            return again()["weights_sha256"]

        found = [go_on()] if ranks == 1 else run_together(go_on, ranks)
        assert found[-1] == whole["weights_sha256"]


def moments_of(run):
    states = [state for stage in run.trainer.stages for state in stage.optimizer.state.values()]
    return [state[key] for state in states for key in ("exp_avg", "exp_avg_sq")]


def test_another_cut_has_the_same_moments(tmp_path):
    run = wide(tmp_path / "run", optimizer_state="bf16", epochs=1)
    run()
    again = wide(tmp_path / "run", resume=True, optimizer_state="bf16", epochs=1, stages=2)
    found = [named_moments(one) for one in (run, again)]
    assert found[0].keys() == found[1].keys()
    assert all(x.dtype == torch.bfloat16 and x.equal(found[1][name]) for name, x in found[0].items())


def named_moments(run):
    names = {p: name for name, p in run.trainer.network.named_parameters()}
    states = [(names[p], state) for stage in run.trainer.stages for p, state in stage.optimizer.state.items()]
    return {(name, key): state[key] for name, state in states for key in ("exp_avg", "exp_avg_sq")}


def test_training_is_as_good_as_with_float32_moments(tmp_path):
    losses = {}
    for state in ("float32", "bf16"):
        options = {**ADAMW, "optimizer_state": state, "batch_size": 32, "epochs": 3, "method": "backprop"}
        losses[state] = make(tmp_path / state, **options)()["test_loss"]
    assert losses["bf16"] == pytest.approx(losses["float32"], abs=0.05)
    assert losses["float32"] < 1.5


@pytest.mark.parametrize("state", ["float32", *STATES])
def test_predicted_memory_is_that_of_a_run(state, tmp_path):
    run = wide(tmp_path / "run", optimizer_state=state, epochs=1)
    run()
    sizes = [[p.numel() for p in stage.parameters] for stage in run.trainer.stages]
    expected = {
        "float32": [sum(8 * n + 4 for n in stage) for stage in sizes],
        "bf16": [sum(4 * n + 4 for n in stage) for stage in sizes],
        # A code for each value, a scale for each block of 256 values, and a table of 256 numbers, for both moments.
        "8bit": [sum((2 * n + 8 * n // 256 + 8 * 256 if n >= 4096 else 8 * n) + 4 for n in stage) for stage in sizes],
    }[state]
    assert [row.optimizer for row in at_rest(run.trainer.executor)] == expected
    assert [row.optimizer for row in dry_run(run.config, torch.device("cpu"), data=DATA).memory] == expected
    optimizers = [stage.optimizer for stage in run.trainer.stages]
    weights = allocated_bytes(run.trainer.network, [])
    assert allocated_bytes(run.trainer.network, optimizers) - weights == sum(expected)


def train(folder, *options):
    return main(["train", *SMALL, "--quiet", "--out", str(folder), *options])


def test_the_command_line(tmp_path, capsys):
    options = ["--optimizer", "adamw", "--optimizer-state", "bf16", "--epochs", "1"]
    assert train(tmp_path / "run", *options) == 0
    file = tmp_path / "run" / "config.json"
    assert json.loads(file.read_text())["optimizer_state"] == "bf16"
    config = RunConfig.read(file)
    optimizer = config.make_optimizer([nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))])
    assert isinstance(optimizer, AdamWBF16)
    assert [(len(g["params"]), g["weight_decay"], g["betas"]) for g in optimizer.param_groups] == [
        (1, 0.05, (0.9, 0.999)),
        (1, 0.0, (0.9, 0.999)),
    ]
    assert train(tmp_path / "run", *options, "--resume") == 0
    capsys.readouterr()
    assert train(tmp_path / "run", *options, "--optimizer-state", "float32", "--resume") == 2
    assert "has optimizer_state bf16, not float32" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--optimizer-state", "bf16"], "--optimizer-state bf16 is for adamw, not for sgd: add --optimizer adamw, or"),
        (["--optimizer", "muon", "--optimizer-state", "8bit"], "--optimizer-state 8bit is for adamw, not for muon"),
        (["--optimizer", "adamw", "--optimizer-state", "8bits"], "8bits"),
    ],
)
def test_mistakes_are_explained(options, message, tmp_path, capsys):
    try:
        code = train(tmp_path / "run", *options)
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_without_torchao_the_error_says_how_to_install_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(ValueError, match="8-bit moments need torchao"):  # before data is loaded
        RunConfig(model="revnet18", data="digits", **ADAMW, optimizer_state="8bit").validate()
    assert train(tmp_path / "run", "--optimizer", "adamw", "--optimizer-state", "8bit") == 2
    assert "8-bit moments need torchao" in (error := capsys.readouterr().err)
    assert "pip install torchao" in error
    assert not (tmp_path / "run").exists()


def test_8bit_moments_are_those_of_torchao(monkeypatch):
    class AdamW8bit(torch.optim.AdamW):
        pass

    monkeypatch.setitem(sys.modules, "torchao.optim", SimpleNamespace(AdamW8bit=AdamW8bit))
    config = RunConfig(model="revnet18", data="digits", **ADAMW, optimizer_state="8bit", beta2=0.99)
    config.validate()
    optimizer = config.make_optimizer([nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))])
    assert type(optimizer) is AdamW8bit
    assert [(g["lr"], g["betas"], g["weight_decay"]) for g in optimizer.param_groups] == [
        (0.01, (0.9, 0.99), 0.05),
        (0.01, (0.9, 0.99), 0.0),
    ]


def test_older_runs_have_float32_moments():
    values = RunConfig(model="revnet18", data="digits").to_json()
    del values["optimizer_state"]
    assert RunConfig.from_json(values).optimizer_state == "float32"
