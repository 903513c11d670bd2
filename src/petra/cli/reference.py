"""The command-line reference as a Markdown page, derived from the parsers of all commands."""

from __future__ import annotations

import argparse
from typing import Any

from petra.cli.parser import COMMANDS, CommandParser, build_parser


def markdown() -> str:
    """Return the reference of all commands and their options.

    Returns:
        A Markdown page: for each command its description, an example, and tables of its options with default, allowed
        values and help.
    """
    parser = build_parser()
    lines = ["# Command line", "", f"{parser.description} `petra COMMAND --help` prints the same texts.", ""]
    lines += ["| command | |", "| --- | --- |"]
    lines += [f"| [`petra {name}`](#petra-{name}) | {_cell(text)} |" for name, (_, text) in COMMANDS.items()]
    for command in parser.commands:
        command.add_command_options()
        lines += ["", *_command(command)]
    return "\n".join(lines) + "\n"


def _command(parser: CommandParser) -> list[str]:
    lines = [f"## petra {parser.command}", "", parser.description or ""]
    if parser.epilog:
        lines += ["", parser.epilog]
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if action.dest != "help"]
        if actions:
            title = "Options" if group.title in ("options", "positional arguments") else str(group.title).capitalize()
            if group.title == "positional arguments":
                title = "Arguments"
            lines += ["", f"**{title}**", "", "| option | default | description |", "| --- | --- | --- |"]
            lines += [
                f"| {_names(action)} | {_cell(_default(action))} | {_description(action)} |" for action in actions
            ]
    return lines


def _names(action: argparse.Action) -> str:
    """The flags with the placeholder of the value."""
    value = action.metavar if isinstance(action.metavar, str) else ""
    if not value and action.choices is not None:
        value = "|".join(map(str, action.choices))
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        value = ""
    if not action.option_strings:
        return f"`{value or action.dest}`"
    return ", ".join(f"`{_cell(f'{flag} {value}'.strip())}`" for flag in action.option_strings)


def _default(action: argparse.Action) -> str:
    if "default_text" in vars(action):
        return str(vars(action)["default_text"])
    return "" if action.default in (None, False, argparse.SUPPRESS) else str(action.default)


def _description(action: argparse.Action) -> str:
    option: Any = vars(action).get("option")
    if option is None:
        return _cell((action.help or "") % {"default": action.default})
    notes = [f"one of {', '.join(option.choices)}" if option.choices and option.metavar else "", option.limits()]
    return _cell("; ".join([option.help, *(note for note in notes if note)]))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
