"""The parser of all commands: it imports the module of a command only when the command is chosen."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from typing import Any, NoReturn

import petra
from petra.formatting import suggestion

COMMANDS = {
    "train": ("train", "train a network"),
    "evaluate": ("evaluate", "test the network of a run"),
    "tokenize": ("tokenize", "encode texts as tokens for language models"),
    "export": ("export", "write the network of a run for other programs"),
    "generate": ("generate", "write text with the language model of a run"),
    "compare": ("compare", "train with several methods and compare them"),
    "fidelity": ("fidelity", "train, and compare gradients with those of backprop"),
    "plot": ("plot", "draw runs side by side"),
    "report": ("report", "write an HTML report of one run or several"),
    "memory": ("memory", "count activations for several numbers of stages"),
    "advise": ("advise", "recommend a method, k and a learning rate"),
    "plan": ("plan", "find where to cut a network for several processes"),
    "doctor": ("doctor", "test the machine for pipelines of several processes"),
    "schedule": ("schedule", "draw a schedule"),
    "methods": ("lists", "list the training methods"),
    "corrections": ("lists", "list the corrections for staleness"),
    "models": ("lists", "list the networks"),
    "recipes": ("lists", "list the recipes, or show the options of one"),
}
"""The module in `petra.cli` and the one-line help of every command. `petra --help` reads nothing else."""

RENAMED = {
    "--order": "--schedule",
    "--drops": "--lr-milestones",
    "--messages": "--comm-dtype",
    "--capture": "--cuda-graph",
    "--no-capture": "--no-cuda-graph",
    "--benchmark": "--cudnn-benchmark",
    "--length": "--seq-len or --max-new-tokens",
    "--weights": "--init-from",
    "--exact": "--coupling fixed-point",
    "--correct": "--corrections",
}
"""Old names of options, and the new ones. `RunConfig.validate` handles the old `--schedule` of the learning rate."""


class _HelpFormatter(argparse.HelpFormatter):
    """A formatter that gives the longest command a line together with its help."""

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):
            self._action_max_length += self._indent_increment  # argparse does not count the indent of commands


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors are one line: value, reason, remedy."""

    commands: Commands

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Exit with the message in one line."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        convert: Any = action.type if action.type is not None else str
        try:
            return convert(arg_string)
        except ValueError as error:
            raise argparse.ArgumentError(None, f"{_name(action)} is {arg_string!r}: {error}") from None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            remedy = suggestion(str(value), [str(choice) for choice in action.choices])
            raise argparse.ArgumentError(None, f"{_name(action)} is {value!r}: {remedy}")


class CommandParser(Parser):
    """The parser of one command, which adds its options when it is used for the first time."""

    def add_command_options(self) -> None:
        """Import the module of the command and add its options."""
        if self.description is None:
            import_module(f"petra.cli.{COMMANDS[self.command][0]}").add_to(self.commands)

    @property
    def command(self) -> str:
        """The name of the command."""
        return self.prog.split()[-1]

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and reject unknown arguments here: the parser of all commands would refer to its own help."""
        self.add_command_options()
        known = self._option_string_actions
        for old in (argument.partition("=")[0] for argument in args):
            for new in RENAMED.get(old, "").split(" or "):
                if old not in known and new.partition(" ")[0] in known:
                    self.error(f"{old} is now {new}")
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            names = [name.lstrip("-") for name in known]
            unknown = rest[0].partition("=")[0].lstrip("-")
            close = [name for name in names if unknown and name.startswith(unknown)]
            close = close or get_close_matches(unknown, names, n=1, cutoff=0.75)
            self.error(f"unrecognized arguments: {' '.join(rest)}" + (f": did you mean --{close[0]}?" if close else ""))
        return found, rest


@dataclass(frozen=True)
class Commands:
    """The parsers of all commands. A module adds its own to them with `add_parser`, as to argparse's subparsers."""

    parsers: Mapping[str, CommandParser]

    def add_parser(self, name: str, *, description: str, epilog: str | None = None) -> CommandParser:
        """Describe a command.

        Args:
            name: The name of the command, which is in `COMMANDS`.
            description: What the command does.
            epilog: An example.

        Returns:
            The parser, to add options to.
        """
        parser = self.parsers[name]
        parser.description, parser.epilog = description, epilog
        return parser

    def __iter__(self) -> Iterator[CommandParser]:
        return iter(self.parsers.values())


def build_parser() -> Parser:
    """Return the parser of all commands; those in its `commands` have no options until they are used."""
    parser = Parser(
        prog="petra",
        formatter_class=_HelpFormatter,
        description="Trains reversible neural networks in parallel, and compares the ways to do it.",
        epilog="`petra COMMAND --help` explains a command. PETRA_TRACEBACK=1 shows where an error came from.",
    )
    parser.add_argument("--version", action="version", version=f"petra {petra.__version__}")
    added = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=CommandParser)
    parsers = {name: added.add_parser(name, help=text) for name, (_, text) in COMMANDS.items()}
    parser.commands = Commands(parsers)
    for command in parsers.values():
        command.commands = parser.commands
    return parser


def _name(action: argparse.Action) -> str:
    """The flag of an option, or the placeholder of an argument, as in `petra --help`."""
    name = action.option_strings[-1] if action.option_strings else action.metavar or action.dest
    return str(name)
