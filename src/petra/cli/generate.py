"""`petra generate`: writes text with the language model of a finished run."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from petra.cli.device import set_up_device
from petra.cli.options import DeviceOptions, add_options
from petra.models.registry import task
from petra.runs.generation import generate
from petra.runs.model_arguments import accepted
from petra.runs.option_fields import check_values, like, option
from petra.runs.run_folder import check_finished
from petra.runs.run_options import RunOptions
from petra.runs.trained_network import NetworkSpec, load, read_tokenizer


@dataclass(kw_only=True)
class GenerateOptions(DeviceOptions):
    """The options of `petra generate`."""

    folder: Path = option(
        help="folder of `petra train --data text:FILE`, bytes:FILE or tokens:FOLDER", metavar="FOLDER", positional=True
    )
    prompt: str = option("", help="start of the text", metavar="TEXT", default_text="a new line, or a new document")
    max_new_tokens: int = option(500, help="characters, bytes or other tokens to write", metavar="N", minimum=1)
    temperature: float = option(
        1.0, help="below 1 for likelier text; 0 always takes the likeliest token", metavar="T", minimum=0
    )
    top_k: int = option(0, help="sample from the K likeliest tokens; 0 for all", metavar="K", minimum=0)
    top_p: float = option(
        1.0, help="sample from the likeliest tokens that together have probability P", metavar="P", above=0, maximum=1
    )
    seed: int = like(RunOptions, "seed", help="seed of the random choices", group=None)


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "generate",
        description="Prints a text that the language model of a run writes, token by token. A run on tokens:FOLDER "
        "stops at the end of a document.",
        epilog="Example: petra generate runs/shakespeare --prompt 'ROMEO:' --max-new-tokens 300 --temperature 0.8",
    )
    add_options(parser, GenerateOptions)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Print the prompt and its continuation."""
    check_values(GenerateOptions, vars(options))
    device = set_up_device(options)
    check_finished(options.folder)
    spec = NetworkSpec.read(options.folder)
    takes = accepted(spec.model)
    if "vocab_size" not in takes or "num_classes" in takes:
        raise ValueError(
            f"{spec.model} in {options.folder} is for {task(takes)}, not for writing text: give the folder of a "
            "language model, like rev-gpt"
        )
    tokenizer = read_tokenizer(options.folder, "--prompt")
    prompt = tokenizer.encode(options.prompt)
    written = generate(
        load(options.folder, device),
        prompt or [tokenizer.start],
        options.max_new_tokens,
        context=spec.arguments["seq_len"],
        entries=tokenizer.vocab_size,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        stop=tokenizer.end,
    )
    print(tokenizer.decode([*prompt, *written]))
