"""Mistakes on the command line that are easily made: one line says what is wrong and how to mend it."""

from test_cli import SMALL

from petra.cli.main import main


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


def test_options_that_a_command_does_not_have(capsys):
    error = said(capsys, "train", "--recipe", "digits", "--weightdecay", "1")
    assert error == (
        "petra train: error: unrecognized arguments: --weightdecay 1: did you mean --weight-decay? "
        "(see petra train --help)\n"
    )
    assert "(see petra fidelity --help)" in said(capsys, "fidelity", *SMALL, "--ranks", "2")
    assert "did you mean" not in said(capsys, "methods", "petra")


def test_a_comparison_in_a_file(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert "file, which is a file: give a folder" in said(capsys, "compare", *SMALL, "--out", tmp_path / "file")


def test_a_comparison_that_is_resumed_without_its_options(tmp_path, capsys):
    error = said(capsys, "compare", "--resume", "--out", tmp_path)
    assert "--resume needs the options of the comparison" in error


def test_options_that_a_recipe_brings_cannot_be_left_out(tmp_path, capsys):
    (tmp_path / "text").write_text("to be " * 99)
    out = ["--out", tmp_path / "run"]
    error = said(capsys, "train", "--recipe", "sst2", "--data", f"text:{tmp_path / 'text'}", *out)
    assert "leave it out, or give a folder of sentences with labels" in error
    error = said(capsys, "train", "--recipe", "tiny-shakespeare", "--data", "digits", *out)
    assert "leave it out, or give text" in error
