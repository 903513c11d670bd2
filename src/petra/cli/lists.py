"""`petra methods`, `petra corrections`, `petra models`, `petra recipes`: what there is, a line each."""

from __future__ import annotations

import argparse
import re
import shlex
import textwrap
from typing import Any

import torch

from petra import models
from petra.cli.options import spelled
from petra.corrections import CORRECTIONS
from petra.methods import METHODS
from petra.tables import render
from petra.training.fitting import accepted, task
from petra.training.recipes import RECIPES, find


def add_to(commands: Any) -> None:
    """Add the commands to the parser."""
    for name, text, run in (
        ("methods", "list the training methods", list_methods),
        ("corrections", "list what can be done about staleness", list_corrections),
        ("models", "list the networks", list_models),
    ):
        commands.add_parser(name, help=text, description=text.capitalize() + ".").set_defaults(run=run)
    recipes = commands.add_parser(
        "recipes",
        help="list the recipes, or show what one stands for",
        description="Lists the recipes, or shows the options that one stands for.",
    )
    recipes.add_argument("name", nargs="?", metavar="NAME", help="of the recipe to show")
    recipes.set_defaults(run=show_recipes)


def list_methods(options: argparse.Namespace) -> None:
    """Each method with what it keeps."""
    rows = [[m.name, m.summary, m.keeps, m.backward_weights] for m in METHODS.values()]
    print(render(["method", "what it does", "kept per micro-batch in flight", "weights backward"], rows, left=4))


def list_corrections(options: argparse.Namespace) -> None:
    """Each correction with what it does and how it is asked for."""
    rows = [[c.name, c.summary, f"--correct {c.example}"] for c in CORRECTIONS.values()]
    print(render(["correction", "what it does", "how to ask for it"], rows, left=3))


def list_models(options: argparse.Namespace) -> None:
    """Each network with its size, by what it is for and by family."""
    tables: dict[str, dict[Any, list[list[str]]]] = {}
    for entry in models.entries():
        takes = accepted(entry.name)
        imagenet = {"num_classes": 1000, "stem": "imagenet"} if "in_channels" in takes else {}
        unsaid = imagenet.keys() & takes - entry.arguments.keys()
        with torch.device("meta"):
            network = models.create(entry.name, **{name: imagenet[name] for name in unsaid})
        parameters = sum(p.numel() for p in network.parameters())
        row = [entry.name, entry.summary, f"{parameters / 1e6:.1f}M"]
        tables.setdefault(task(takes), {}).setdefault(entry.build, []).append(row)
    for number, (what, families) in enumerate(tables.items()):
        rows = [row for family in families.values() for row in (["", "", ""], *family)][1:]
        print("\n" * (number > 0) + render([f"for {what}", "what it is", "parameters"], rows, left=2))
    print("\nSizes of networks for images are with ImageNet's 1000 classes, of those for CIFAR with 10.")


def show_recipes(options: argparse.Namespace) -> None:
    """Each recipe with what it is for, or the command that one stands for."""
    if options.name is not None:
        recipe = find(options.name)
        command = shlex.join(["petra", "train", *spelled(recipe.options)])
        whole = re.sub(" (?!--)", "\0", command)  # an option stays with its value
        lines = textwrap.wrap(whole, 100, break_long_words=False, break_on_hyphens=False)
        print(f"{recipe.summary}\n\n    " + " \\\n        ".join(lines).replace("\0", " "))
        return
    print(render(["recipe", "what it does"], [[r.name, r.summary] for r in RECIPES.values()], left=2))
