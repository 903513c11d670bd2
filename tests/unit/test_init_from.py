"""Runs that begin with the weights of an earlier one."""

import json
import shutil

import pytest
import torch
from helpers.data_files import refused
from safetensors.torch import load_file, save_file

from petra.cli.main import main
from petra.distributed import run_together
from petra.runs.config import RunConfig
from petra.runs.run import Run
from petra.runs.weight_files import same_weights

pytestmark = pytest.mark.slow

SMALL = {"model": "revnet18", "model_options": {"width": 4, "depths": [1, 1]}, "data": "digits", "epochs": 1}
COMMAND = [
    *("train", "--model", "revnet18", "--width", "4", "--depths", "1,1", "--data", "digits", "--epochs", "1"),
    *("--device", "cpu", "--threads", "1"),
]


def config(**options):
    return RunConfig(**{**SMALL, **options})


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    folder = tmp_path_factory.mktemp("earlier") / "run"
    Run(config(seed=3, lr=0.5), folder, quiet=True)()
    return folder


def first_weights(config, folder, **options):
    run = Run(config, folder, quiet=True, **options)
    run.close()
    return run.trainer.network.state_dict()


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items())


def test_weights_are_the_same_if_none_is_another_and_there_are_no_more(tmp_path):
    file, weights = tmp_path / "weights.safetensors", {"a": torch.zeros(2), "b": torch.ones(2)}
    assert not same_weights(weights, file)
    save_file(weights, file)
    assert same_weights(weights, file)
    for others in ({"a": torch.zeros(2)}, {**weights, "c": torch.ones(1)}, {**weights, "b": torch.zeros(2)}):
        assert not same_weights(others, file)


def test_a_run_begins_with_them(earlier, tmp_path):
    wanted = load_file(earlier / "weights.safetensors")
    assert not same(first_weights(config(), tmp_path / "random"), wanted)
    for number, source in enumerate((earlier, earlier / "weights.safetensors")):
        assert same(first_weights(config(init_from=str(source)), tmp_path / str(number)), wanted)


def test_the_run_says_so_once(earlier, tmp_path, capsys):
    arguments = [*COMMAND, "--init-from", f"{earlier}/", "--out", str(tmp_path / "run")]
    assert main(arguments) == 0
    error = capsys.readouterr().err
    assert error.count(f"starts from the weights of {earlier}/weights.safetensors\n") == 1
    assert json.loads((tmp_path / "run" / "config.json").read_text())["init_from"] == str(earlier)
    assert main([*arguments, "--resume"]) == 0
    assert "begins" not in capsys.readouterr().err


def test_another_number_of_classes(earlier, tmp_path, capsys):
    data = {"data": "synthetic:1x8x8:3:64"}
    run = Run(config(**data, init_from=str(earlier)), tmp_path / "run")
    run.close()
    assert (
        "; of another shape there, so initialised randomly: head.fc.weight, head.fc.bias"
        in capsys.readouterr().err.splitlines()[0]
    )
    found, wanted = run.trainer.network.state_dict(), load_file(earlier / "weights.safetensors")
    drawn = first_weights(config(**data), tmp_path / "random")
    for name, value in found.items():
        assert torch.equal(value, drawn[name] if name.startswith("head.fc") else wanted[name])


def test_weights_that_do_not_fit(earlier, tmp_path):
    def begin(source, **options):
        Run(config(init_from=str(source), **options), tmp_path / "run", quiet=True)

    with refused(" parameters in ", "weights.safetensors, ", "have another shape in this network: build it with"):
        begin(earlier, model_options={"width": 8, "depths": [1, 1]})
    with refused("weights.safetensors has no ", "give weights of the same network"):
        begin(earlier, model_options={"width": 4, "depths": [2, 1]})
    with refused("weights.safetensors has ", "which this network does not have"):
        begin(earlier, model_options={"width": 4, "depths": [1]}, stages=2)
    assert not (tmp_path / "run").exists()


def test_weights_that_were_changed_since(earlier, tmp_path):
    changed = shutil.copytree(earlier, tmp_path / "changed")
    weights = load_file(changed / "weights.safetensors")
    weights["head.fc.bias"][0] += 1
    save_file(weights, changed / "weights.safetensors")
    with refused("weights.safetensors is not what the run wrote", "is not the one in summary.json", "--resume --out"):
        first_weights(config(init_from=str(changed)), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    found = first_weights(
        config(init_from=str(changed / "weights.safetensors")), tmp_path / "run"
    )  # as a file of its own
    assert same(found, weights)


def test_weights_that_are_not_there(earlier, tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("not weights, but long enough to be some")
    unfinished = shutil.copytree(earlier, tmp_path / "unfinished")
    (unfinished / "weights.safetensors").unlink()
    run = shutil.copytree(earlier, tmp_path / "run")
    for source, words in (
        (tmp_path / "nowhere", "nowhere, which does not exist: give the folder of a run, or a .safetensors file"),
        (tmp_path, "holds no run: give the folder of one"),
        (unfinished, "has not finished"),
        (tmp_path / "notes.txt", "notes.txt is damaged or not a safetensors file"),
        (run, "which the run would overwrite: give another --out"),
    ):
        assert main([*COMMAND, "--init-from", str(source), "--overwrite", "--out", str(run)]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert len(error.splitlines()) == 1
        assert (run / "summary.json").exists()


class Killed(Exception):
    pass


def test_a_resumed_run_does_not_need_them_and_takes_no_others(earlier, tmp_path, capsys):
    source = shutil.copytree(earlier, tmp_path / "source")
    begun = config(init_from=str(source), checkpoint_every=3, method="reversible")
    straight = Run(begun, tmp_path / "straight", quiet=True)()
    stopped = Run(begun, tmp_path / "stopped", quiet=True)

    def kill(now, action, stage):
        if now == 8:
            raise Killed

    stopped.trainer.executor.observers.append(kill)
    with pytest.raises(Killed):
        stopped()
    shutil.rmtree(source)
    again = ["train", "--resume", "--quiet", "--device", "cpu", "--out", str(tmp_path / "stopped")]
    assert main([*again, "--init-from", str(earlier)]) == 2
    assert f"has init_from {source}, not {earlier}: leave it out to resume" in capsys.readouterr().err
    for recut in ([], ["--stages", "2"]):
        folder = shutil.copytree(tmp_path / "stopped", tmp_path / f"resumed{len(recut)}")
        assert main([*again, *recut, "--out", str(folder)]) == 0
        assert json.loads((folder / "summary.json").read_text())["weights_sha256"] == straight["weights_sha256"]


def test_ranks_begin_with_the_same(earlier, tmp_path):
    begun = config(init_from=str(earlier), method="petra", data="synthetic:1x8x8:3:64", batch_size=16)
    alone = Run(begun, tmp_path / "alone", quiet=True)()
    both = run_together(lambda transport: Run(begun, tmp_path / "both", quiet=True, transport=transport)(), ranks=2)
    assert both[-1]["weights_sha256"] == alone["weights_sha256"]


def test_comparisons_begin_with_them(earlier, tmp_path, capsys):
    arguments = ["compare", *COMMAND[1:], "--methods", "backprop", "petra", "--init-from", str(earlier)]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().err.count("starts from the weights of") == 2


def test_a_resumed_comparison_does_not_need_them(earlier, tmp_path, capsys):
    weights = tmp_path / "copy.safetensors"
    shutil.copy(earlier / "weights.safetensors", weights)
    arguments = ["compare", *COMMAND[1:], "--init-from", str(weights), "--out", str(tmp_path / "compared")]
    assert main([*arguments, "--methods", "petra"]) == 0
    weights.unlink()
    assert main([*arguments, "--methods", "petra", "--resume"]) == 0
    capsys.readouterr()
    assert main([*arguments, "--methods", "petra", "backprop", "--resume"]) == 2  # a new one does
    assert "which does not exist" in capsys.readouterr().err


def test_another_vocabulary_is_told(tmp_path, capsys):
    options = {"width": 4, "depth": 1, "heads": 1}
    for name, text in (("one", "abcabcabca" * 12), ("two", "abdabdabda" * 12), ("same", "cabcabcabc" * 12)):
        (tmp_path / f"{name}.txt").write_text(text)

    def run(name, **others):
        data = f"text:{tmp_path / name}.txt"
        return Run(
            config(model="rev-gpt", model_options=options, data=data, seq_len=4, stages=2, **others), tmp_path / name
        )

    run("one")()
    for name, told in (("two", True), ("same", False)):
        capsys.readouterr()
        run(name, init_from=str(tmp_path / "one")).close()
        said = capsys.readouterr().err
        assert "starts from the weights of" in said
        assert ("its vocabulary differs, so tokens stand for other texts" in said) == told
