"""Options are derived from dataclass fields, commands from a table: each is complete, and starts quickly."""

import ast
import json
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from test_cli_mistakes import said

import petra
from petra.cli.main import main
from petra.cli.options import given
from petra.cli.parser import COMMANDS, RENAMED, build_parser
from petra.cli.reference import markdown
from petra.distributed import Recovery
from petra.runs.config import RunConfig
from petra.runs.option_fields import Option, check_values, flag_of, like, option, options_of


def test_every_command_has_its_module_and_its_help():
    parser = build_parser()
    assert [command.command for command in parser.commands] == list(COMMANDS)
    for command in parser.commands:
        command.add_command_options()
        assert command.description
        assert command.get_default("run") is not None


def test_an_option_like_another_has_its_metadata_except_for_the_changes():
    @dataclass
    class Other:
        size: int = like(RunConfig, "batch_size")
        batch_size: int | None = like(RunConfig, "batch_size", default=None, help="other", group=None)

    source, described = options_of(RunConfig)["batch_size"]
    (same, metadata), (changed, other) = options_of(Other).values()
    assert (same.default, metadata) == (source.default, described)
    assert (changed.default, other) == (None, replace(described, help="other", group=None))


@pytest.mark.parametrize("arguments", [["--help"], []])
def test_help_lists_the_commands_without_importing_torch(arguments):
    code = (
        f"import sys; from petra.cli.main import main\n"
        f"try: main({arguments!r})\nexcept SystemExit: pass\n"
        f"assert 'torch' not in sys.modules"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert all(f"    {name}" in shown and text in shown for name, (_, text) in COMMANDS.items())


@pytest.mark.parametrize(
    ("command", "old", "new"),
    [
        ("train", "--order", "--schedule"),
        ("train", "--drops=0.5", "--lr-milestones"),
        ("compare", "--messages", "--comm-dtype"),
        ("fidelity", "--capture", "--cuda-graph"),
        ("train", "--no-capture", "--no-cuda-graph"),
        ("train", "--benchmark", "--cudnn-benchmark"),
        ("train", "--length", "--seq-len"),
        ("generate", "--length", "--max-new-tokens"),
        ("train", "--weights", "--init-from"),
        ("train", "--exact", "--coupling fixed-point"),
        ("train", "--correct", "--corrections"),
        ("plan", "--order", "--schedule"),
    ],
)
def test_an_old_name_gives_the_new_one(command, old, new, capsys):
    name = old.partition("=")[0]
    assert f"error: {name} is now {new} (see" in said(capsys, command, old, "predict")
    assert name in RENAMED


def test_a_schedule_of_the_learning_rate_has_its_own_option(capsys, tmp_path):
    error = said(capsys, "train", "--recipe", "digits", "--schedule", "cosine", "--out", tmp_path / "run")
    assert "--schedule is cosine, which is a learning-rate schedule: give --lr-schedule cosine" in error


def test_options_are_not_abbreviated(capsys):
    assert "did you mean --batch-size?" in said(capsys, "train", "--batch", "3")


@pytest.mark.parametrize("command", ["train", "compare", "fidelity"])
def test_every_field_of_a_configuration_is_an_option(command):
    parser = build_parser().commands.parsers[command]
    parser.add_command_options()
    absent = {
        "compare": {"method", "replicas", "checkpoint_every", "checkpoint_epochs", "keep", "save_best"},
        "fidelity": {"replicas"},
    }
    for name, (_, described) in options_of(RunConfig).items():
        flag = flag_of(name, described)
        assert (flag in parser._option_string_actions) == (name not in absent.get(command, ()))
        assert described.help
    assert options_of(RunConfig).keys() | {"model_options", "optimizer_options"} == set(RunConfig.__dataclass_fields__)


def test_options_that_are_not_given_are_left_to_the_recipe():
    assert given(build_parser().parse_args(["train"])) == {}
    options = build_parser().parse_args(["train", "--lr", "0.5", "--no-nesterov", "--width", "3", "--set", "a=1,2"])
    assert given(options) == {"lr": 0.5, "nesterov": False, "model_options": {"width": 3, "a": [1, 2]}}


@pytest.mark.parametrize(
    ("limits", "good", "bad", "words"),
    [
        ({"minimum": 1}, [1, 7, None], [0, -3], "1 or more"),
        ({"above": 0}, [1e-9, 3.0], [0.0, -1.0, float("nan"), float("inf")], "more than 0"),
        ({"minimum": 0, "below": 1}, [0, 0.99], [1.0, -0.1, float("nan")], "0 or more and less than 1"),
        ({"minimum": 0, "maximum": 1}, [(), (0.0, 1.0)], [(0.5, 2.0), (-1.0,)], "numbers between 0 and 1"),
        ({"choices": ("steps", "cosine")}, ["steps"], ["cosin"], "did you mean 'cosine'?"),
        ({"choices": ("bf16",)}, ["bf16", None], ["x"], "choose from bf16"),
    ],
)
def test_limits(limits, good, bad, words):
    described = Option(help="", **limits)
    for value in good:
        described.check("--it", value)
    for value in bad:
        with pytest.raises(ValueError, match=f"--it is .*: (give )?{re.escape(words)}$"):
            described.check("--it", value)


def test_an_option_that_needs_a_parser_says_so():
    from dataclasses import dataclass

    from petra.runs.option_fields import parser_of

    @dataclass
    class Config:
        several: list = option((), help="several")
        one: int = option(1, help="one", minimum=1)

    with pytest.raises(AssertionError, match=r"Config.several needs `parse`"):
        parser_of(Config, "several")
    assert parser_of(Config, "one")("3") == 3
    with pytest.raises(ValueError, match="--one is 0: give 1 or more"):
        check_values(Config, {"one": 0, "unknown": 5})


def test_the_reference_page_has_all_commands_and_options():
    page = markdown()
    parser = build_parser()
    for command in parser.commands:
        command.add_command_options()
        section = page.partition(f"\n## petra {command.command}\n")[2].partition("\n## ")[0]
        assert command.description in section
        for flag in command._option_string_actions.keys() - {"-h", "--help"}:
            assert f"`{flag}" in section
    assert "| `--batch-size N` | 64 | samples in a micro-batch; 1 or more |" in page
    assert "%" not in page.replace("100%", "")


def test_a_configuration_comes_back_from_json():
    config = RunConfig.from_options("digits", {"corrections": ("predict",), "schedule": [3, 2, 1, 0]})
    values = json.loads(json.dumps(config.to_json()))
    assert list(values) == list(RunConfig.__dataclass_fields__)
    assert RunConfig.from_json(values) == config
    with pytest.raises(ValueError, match="another version of Petra: unknown order"):
        RunConfig.from_json({**values, "order": "lock-step"})
    del values["corrections"]
    with pytest.raises(KeyError, match="corrections missing"):
        RunConfig.from_json(values)


def test_the_module_of_the_program_starts_the_ranks(tmp_path, monkeypatch):
    launched = []
    monkeypatch.setattr(
        "petra.cli.train.launch_ranks", lambda *given, **options: launched.append((*given, options)) or 0
    )
    arguments = ["train", "--recipe", "digits", "--ranks", "2", "--out", str(tmp_path / "run")]
    assert main(arguments) == 0
    assert main(arguments, module="program") == 0
    options = {"replicas": 1, "recovery": Recovery()}
    assert launched == [(arguments, 2, "petra", options), (arguments, 2, "program", options)]


class TestPublicNames:
    """`petra` imports its names when they are used."""

    def test_the_lists_agree(self):
        assert petra.__all__ == sorted(
            petra.__all__, key=lambda name: (not name.isupper(), not name[0].isupper(), name)
        )
        tree = ast.parse(Path(petra.__file__).read_text())
        (typed,) = [node for node in tree.body if isinstance(node, ast.If)]
        packages = {alias.name: node.module for node in typed.body for alias in node.names}
        assert {*packages, "__version__"} == set(petra.__all__)
        for name in petra.__all__:
            found = getattr(petra, name)
            if name in packages and packages[name] != "petra":
                module = __import__(packages[name], fromlist=[name])
                assert found is getattr(module, name)
        assert set(petra.__all__) <= set(dir(petra))

    def test_other_names_do_not_exist(self):
        with pytest.raises(AttributeError, match="module 'petra' has no attribute 'trainer_of'"):
            _ = petra.trainer_of
        with pytest.raises(AttributeError, match="has no attribute 'save'"):
            _ = petra.runs.save

    def test_errors_that_documentation_mentions(self):
        assert issubclass(petra.NonFiniteLoss, petra.Diverged)
        assert issubclass(petra.LostRank, RuntimeError)
        assert issubclass(petra.JobFailed, RuntimeError)
