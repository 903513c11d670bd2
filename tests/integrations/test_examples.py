"""The scripts in `examples/` run as they are and are short."""

import runpy
import sys
import warnings

import pytest
import torch
from helpers import fork_server
from helpers.example_rank import EXAMPLES, run_script, trained
from helpers.libraries import library
from torch.distributed import TCPStore

pytestmark = pytest.mark.slow

SCRIPTS = sorted(EXAMPLES.glob("*.py"))
NEEDS = {
    "finetune_gpt2": ("transformers", "accelerate"),
    "image_folder": ("PIL",),
    "lightning_petra": ("lightning",),
    "timm_vit": ("timm",),
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a script in an empty folder; return what its `main` returns."""
    monkeypatch.chdir(tmp_path)

    def run_main(name, *arguments):
        for package in NEEDS.get(name, ()):
            library(package)
        main = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of libraries, about few workers and other settings
            return main(["--smoke", *arguments]) if name != "own_cnn" else main(smoke=True)

    return run_main


def test_own_cnn(run):
    assert run("own_cnn") > 0.1


def test_finetune_gpt2(run, tmp_path):
    assert run("finetune_gpt2") < 6
    assert (tmp_path / "runs" / "gpt2" / "model.safetensors").exists()


def test_timm_vit(run, tmp_path):
    assert run("timm_vit") > 0.05
    names = torch.load(tmp_path / "vit.pt", weights_only=True).keys()
    assert "blocks.0.attn.qkv.weight" in names


def test_image_folder(run, tmp_path, capsys):
    assert run("image_folder", "--epochs", "5") > 0.9
    assert "first image: bottom" in capsys.readouterr().out
    assert (tmp_path / "runs" / "images-run" / "weights.safetensors").exists()
    assert (
        run(
            "image_folder",
            "--epochs",
            "1",
            "--data",
            str(tmp_path / "runs" / "images"),
            "--out",
            str(tmp_path / "other"),
        )
        > 0.1
    )


def test_lightning_petra(run, tmp_path):
    assert run("lightning_petra") > 0.3
    assert list(tmp_path.glob("runs/lightning_logs/version_0/checkpoints/last.ckpt"))


def test_torchrun_script_on_two_ranks_and_in_one_process(run, tmp_path):
    import torch.distributed.checkpoint as dcp

    run("torchrun_script")
    folder = tmp_path / "ranks"
    folder.mkdir()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [fork_server.start(run_script, rank, 2, store.port, folder) for rank in range(2)]
    try:
        for process in ranks:
            process.join(120)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    errors = [(folder / f"rank{rank}.log").read_text() for rank in range(2)]
    assert [process.exitcode for process in ranks] == [0, 0], "\n".join(errors)
    alone, together = (
        torch.load(f / "weights.pt", weights_only=True) for f in (tmp_path / "runs" / "torchrun", folder)
    )
    assert alone.keys() == together.keys()
    assert all(torch.equal(value, together[name]) for name, value in alone.items())

    expected = trained().network.state_dict()  # each rank wrote its own stages into one checkpoint
    state = {name: torch.zeros_like(value) for name, value in expected.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # there is one process
        dcp.load(state, checkpoint_id=folder / "dcp")
    assert all(torch.equal(value, state[name]) for name, value in expected.items())


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_scripts_are_short_and_listed(script):
    text = script.read_text()
    assert len(text.splitlines()) < 60
    assert text.startswith('"""')
    assert f"`{script.name}`" in (EXAMPLES / "README.md").read_text()


def test_there_are_tests_for_all_scripts():
    tests = "\n".join(name for name in vars(sys.modules[__name__]) if name.startswith("test_"))
    assert all(f"test_{script.stem}" in tests for script in SCRIPTS)
