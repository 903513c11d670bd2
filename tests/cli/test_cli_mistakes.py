"""Mistakes on the command line that are easily made: one line says what is wrong and how to fix it."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from helpers.commands import SMALL

from petra.cli.main import main
from petra.cli.parser import build_parser
from petra.trainer.checkpoint import write_atomically


def said(capsys, *arguments):
    """The one line that a command ends with, before it has begun to work."""
    try:
        code = main([str(argument) for argument in arguments])
    except SystemExit as ended:
        code = ended.code
    error = capsys.readouterr().err
    assert code == 2
    assert len(error.strip().splitlines()) == 1
    return error


def test_without_a_command_there_is_help(capsys):
    assert main([]) == 0
    assert capsys.readouterr().out == build_parser().format_help()


def test_interrupted_while_a_command_is_imported(monkeypatch, capsys):
    parser = build_parser()

    def interrupt(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(parser, "parse_args", interrupt)
    monkeypatch.setattr("petra.cli.main.build_parser", lambda: parser)
    assert main(["train"]) == 130
    assert capsys.readouterr().err == "petra: stopped\n"


def test_an_error_that_cannot_be_printed_keeps_its_exit_code(monkeypatch):
    full = SimpleNamespace(write=Mock(side_effect=OSError(27, "File too large")), flush=lambda: None)
    monkeypatch.setattr("sys.stderr", full)
    assert main(["evaluate", "/no/such/folder"]) == 2
    assert full.write.called


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    def fail(file):
        raise OSError(27, "File too large")

    with pytest.raises(OSError, match=r"File too large: '.*weights.safetensors'"):
        write_atomically(tmp_path / "weights.safetensors", fail)
    assert list(tmp_path.iterdir()) == []


def test_options_that_a_command_does_not_have(capsys):
    error = said(capsys, "train", "--recipe", "digits", "--weightdecay", "1")
    assert error == (
        "petra train: error: unrecognized arguments: --weightdecay 1: did you mean --weight-decay? "
        "(see petra train --help)\n"
    )
    error = said(capsys, "fidelity", *SMALL, "--ranks", "2")  # its nearest is --threads, which is something else
    assert error == "petra fidelity: error: unrecognized arguments: --ranks 2 (see petra fidelity --help)\n"
    assert "did you mean" not in said(capsys, "methods", "petra")


def test_words_that_are_not_among_those_to_choose_from(capsys):
    words = "petra: error: COMMAND is 'trian': did you mean 'train'? "
    assert said(capsys, "trian") == words + "(see petra --help)\n"
    assert "COMMAND is 'x': choose from train, evaluate, " in said(capsys, "x")
    assert "--autocast is 'fp8': choose from bf16" in said(capsys, "train", "--autocast", "fp8")
    assert "--method is 'petre': did you mean 'petra'?" in said(capsys, "train", "--method", "petre")
    assert "--comm-dtype is 'int4': there is no codec named 'int4': did you mean 'int8'?" in said(
        capsys, "train", "--comm-dtype", "int4"
    )
    assert "write it like streams=bf16,gradients=int8" in said(capsys, "train", "--comm-dtype", "stream=int8")
    assert "--epochs is 'ten': give a whole number" in said(capsys, "train", "--epochs", "ten")
    assert "--depths is '2;2': give a whole number, or several separated by commas" in said(
        capsys, "train", "--depths", "2;2"
    )


@pytest.mark.parametrize(
    "arguments",
    [["compare", *SMALL], ["fidelity", *SMALL], ["plan", "--model", "revnet18", "--ranks", "2", "--no-run"]],
    ids=lambda arguments: arguments[0],
)
def test_processes_for_what_is_done_in_one(arguments, tmp_path, monkeypatch):
    """Two would train in the same folder, or take each other's cores while they are timed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    options = build_parser().parse_args(arguments)
    with pytest.raises(ValueError, match=r"2 processes were started: .* start it without torchrun"):
        options.run(options)
    assert not any(tmp_path.iterdir())


def test_a_comparison_in_a_file(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert "file, which is a file: give a folder" in said(capsys, "compare", *SMALL, "--out", tmp_path / "file")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--schedule", "lock-step"], "which backprop and dni cannot use: leave it out, choose gpipe, 1f1b"),
        (["--corrections", "predict"], "backprop and dni have no staleness to correct: leave it out"),
    ],
)
def test_a_comparison_in_which_nothing_takes_an_option(options, message, tmp_path, capsys):
    words = ["compare", *SMALL, "--methods", "backprop", "dni", *options, "--out", tmp_path / "no"]
    assert message in said(capsys, *words)
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("arguments", [["train", "--out", ""], ["evaluate", ""], ["plot", ""]])
def test_a_path_that_is_empty_is_not_this_folder(arguments, capsys):
    assert "is '': give a path" in said(capsys, *arguments)


def test_a_comparison_that_is_resumed_without_its_options(tmp_path, capsys):
    error = said(capsys, "compare", "--resume", "--out", tmp_path)
    assert "--resume needs the options of the comparison" in error


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert main(["train", *SMALL, "--epochs", "1", "--stages", "1", "--quiet", "--out", str(folder)]) == 0
    return folder


def test_one_is_not_several(tmp_path, capsys):
    once = ["--epochs", "1", "--warmup-epochs", "1", "--stages", "1"]
    assert main(["train", *SMALL, *once, "--out", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr()
    assert "1 epoch of warm-up for 1 of training" in shown.err
    assert "on 1 stage (" in shown.out


@pytest.mark.parametrize(("model", "method"), [("resnet18", "petra"), ("resnet18", "delayed"), ("revnet18", "petra")])
def test_a_method_for_reversible_layers_without_any(tmp_path, capsys, model, method):
    options = ["--model", model, "--method", method, "--epochs", "1"]
    assert main(["train", *SMALL, *options, "--out", str(tmp_path / "run")]) == 0
    word = "no layer of resnet18 is reversible, so petra stores their inputs and computes them again"
    assert (word in capsys.readouterr().err) == ((model, method) == ("resnet18", "petra"))


def test_what_has_been_trained_already_cannot_be_measured(trained, capsys):
    before = {path.name for path in trained.iterdir()}
    error = said(capsys, "fidelity", "--resume", "--device", "cpu", "--out", trained)
    assert "has ended without a measurement: give --overwrite" in error
    assert {path.name for path in trained.iterdir()} == before


def test_where_figures_are_drawn(trained, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["plot", str(trained), "--out", str(tmp_path / "new" / "one.png")]) == 0
    assert capsys.readouterr().out.startswith("1 run in ")
    assert (tmp_path / "new" / "one.png").exists()
    assert "which is a folder: give a file" in said(capsys, "plot", trained, "--out", tmp_path)
    assert "give a name that ends in .png" in said(capsys, "plot", trained, "--out", tmp_path / "one.pdf")
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_a_plan_is_not_made_for_a_file_that_cannot_be_written(tmp_path, capsys):
    error = said(capsys, "plan", "--model", "revnet18", "--ranks", "2", "--json", tmp_path)
    assert "which is a folder: give a file" in error


def test_options_that_a_recipe_brings_cannot_be_left_out(tmp_path, capsys):
    (tmp_path / "text").write_text("to be " * 99)
    out = ["--out", tmp_path / "run"]
    error = said(capsys, "train", "--recipe", "sst2", "--data", f"text:{tmp_path / 'text'}", *out)
    assert "leave it out, or give a folder of labelled texts" in error
    error = said(capsys, "train", "--recipe", "tiny-shakespeare", "--data", "digits", *out)
    assert "leave it out, or give text" in error
