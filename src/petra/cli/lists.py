"""`petra methods`, `petra corrections`, `petra models`, `petra recipes`: one line for each."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
import textwrap
from pathlib import Path
from typing import Any

from petra.cli.parser import COMMANDS
from petra.formatting import render, terminal_width


def add_to(commands: Any) -> None:
    """Add the commands to the parser."""
    for name, run in (("methods", list_methods), ("corrections", list_corrections), ("models", list_models)):
        commands.add_parser(name, description=COMMANDS[name][1].capitalize() + ".").set_defaults(run=run)
    recipes = commands.add_parser(
        "recipes",
        description="Lists the recipes, or shows the command that a recipe stands for.",
    )
    recipes.add_argument("name", nargs="?", metavar="NAME", help="recipe to show (default: list all)")
    recipes.set_defaults(run=show_recipes)


def list_methods(options: argparse.Namespace) -> None:
    """Print each method with what it saves."""
    from petra.methods import METHODS  # imports PyTorch, which `petra models` does without

    rows = [[m.name, m.summary, m.saves, m.backward_weights] for m in METHODS.values()]
    header = ["method", "what it does", "saved per micro-batch in flight", "backward weights"]
    print(render(header, rows, left=4, width=terminal_width(), spaced=True))


def list_corrections(options: argparse.Namespace) -> None:
    """List the corrections, what they do, and whether measurements support them."""
    from petra.corrections import CORRECTIONS

    rows = [
        [c.name, c.summary, c.example, "experimental" if c.experimental else "measured benefit"]
        for c in CORRECTIONS.values()
    ]
    header = ["correction", "what it does", "--corrections", "status"]
    print(render(header, rows, left=4, width=terminal_width(), spaced=True))
    note = "Experimental: this project's measurements (CIFAR-10, digits) show no clear benefit."
    print("\n" + textwrap.fill(note, terminal_width()))


def list_models(options: argparse.Namespace) -> None:
    """Print each network with its size, by task and by family."""
    if "petra.models" in sys.modules:  # a program may have registered networks
        rows = sys.modules["petra.models"].listing()
    else:
        rows = json.loads((Path(__file__).parents[1] / "models" / "listing.json").read_text())
    tables: dict[str, dict[str, list[list[str]]]] = {}
    for row in rows:
        cells = [row["name"], row["summary"], f"{row['parameters'] / 1e6:.1f}M"]
        tables.setdefault(row["task"], {}).setdefault(row["family"], []).append(cells)
    for number, (what, families) in enumerate(tables.items()):
        lines = [line for family in families.values() for line in (["", "", ""], *family)][1:]
        print("\n" * (number > 0) + render([f"for {what}", "what it is", "parameters"], lines, 2, terminal_width()))
    note = "Parameters of networks for images are with the 1000 classes of ImageNet, of those for CIFAR with 10."
    print("\n" + textwrap.fill(note, terminal_width()))


def show_recipes(options: argparse.Namespace) -> None:
    """Print all recipes, or the command that one stands for."""
    from petra.runs.recipes import RECIPES, find

    if options.name is not None:
        from petra.cli.options import spell_options  # which imports much that the lists do not need

        recipe = find(options.name)
        command = shlex.join(["petra", "train", *spell_options(recipe.options)])
        whole = re.sub(" (?!--)", "\0", command)  # an option stays with its value
        lines = textwrap.wrap(whole, max(terminal_width() - 10, 40), break_long_words=False, break_on_hyphens=False)
        print(f"{recipe.summary}\n\n    " + " \\\n        ".join(lines).replace("\0", " "))
        return
    rows = [[r.name, r.summary] for r in RECIPES.values()]
    print(render(["recipe", "what it does"], rows, left=2, width=terminal_width()))
