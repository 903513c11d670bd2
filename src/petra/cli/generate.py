"""`petra generate`: text from a language model that a run has trained."""

from __future__ import annotations

import argparse
from math import isfinite
from pathlib import Path
from typing import Any

from petra.cli.options import add_device_options, set_up_device
from petra.training.data.text import encode_characters
from petra.training.files import refuse_unfinished
from petra.training.fitting import accepted, task
from petra.training.generation import generate
from petra.training.trained import Blueprint, load, read_vocabulary


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "generate",
        help="write text with the language model of a run",
        description="Prints a text that the language model of a run goes on with, character by character (or byte by "
        "byte, for a run on bytes:FILE).",
        epilog="Example: petra generate runs/shakespeare --prompt 'ROMEO:' --length 300 --temperature 0.8",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="of `petra train --data text:FILE`")
    parser.add_argument("--prompt", default="", metavar="TEXT", help="what the text begins with (default: a new line)")
    parser.add_argument(
        "--length", type=int, default=500, metavar="N", help="characters, or bytes, to write (default %(default)s)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        metavar="T",
        help="less than 1 is more careful, 0 always takes the likeliest (default %(default)g)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default %(default)s)")
    add_device_options(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Print the prompt and what comes after it."""
    if options.length < 1:
        raise ValueError(f"--length is {options.length}: give 1 or more")
    if not (isfinite(options.temperature) and options.temperature >= 0):
        raise ValueError(f"--temperature is {options.temperature}: give 0 or more")
    if not 0 <= options.seed < 2**63:
        raise ValueError(f"--seed is {options.seed}: give 0 or more, and less than 2^63")
    device = set_up_device(options)
    refuse_unfinished(options.folder)
    blueprint = Blueprint.read(options.folder)
    takes = accepted(blueprint.model)
    if "vocab_size" not in takes or "num_classes" in takes:
        raise ValueError(
            f"{blueprint.model} in {options.folder} is for {task(takes)}, and writes no text: give the folder of a "
            "language model, like rev-gpt"
        )
    vocabulary = read_vocabulary(options.folder)
    prompt = _encode(options.prompt, vocabulary)
    written = generate(
        load(options.folder, device),
        prompt or [_start(vocabulary)],
        options.length,
        context=blueprint.arguments["length"],
        entries=len(vocabulary) or 256,
        temperature=options.temperature,
        seed=options.seed,
    )
    print(_decode([*prompt, *written], vocabulary))


def _encode(text: str, vocabulary: tuple[str, ...]) -> list[int]:
    if not vocabulary:
        return list(text.encode("utf-8", "surrogateescape"))
    return [int(token) for token in encode_characters(text, vocabulary, "--prompt")]


def _decode(tokens: list[int], vocabulary: tuple[str, ...]) -> str:
    if not vocabulary:
        return bytes(tokens).decode("utf-8", "replace")
    return "".join(vocabulary[token] for token in tokens)


def _start(vocabulary: tuple[str, ...]) -> int:
    """What stands before a text that has no prompt."""
    if not vocabulary:
        return ord("\n")
    return vocabulary.index("\n") if "\n" in vocabulary else 0
