"""`petra export`: writes the network of a finished run for other programs."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from petra.cli.options import add_options
from petra.integrations.checkpoint_export import export_checkpoint
from petra.integrations.export import export_onnx, export_program, save_distributed, save_safetensors
from petra.runs.config import RunConfig
from petra.runs.option_fields import check_values, option
from petra.runs.run_folder import CONFIG
from petra.runs.trained_network import NetworkSpec, load

SUFFIXES = {
    "safetensors": ".safetensors",
    "dcp": "-dcp",
    "dcp-checkpoint": "-checkpoint-dcp",
    "torch-export": ".pt2",
    "onnx": ".onnx",
}
"""The formats, and the end of the default names of their files or folders."""


@dataclass(kw_only=True)
class ExportOptions:
    """The options of `petra export`."""

    folder: Path = option(help="folder of `petra train`", metavar="FOLDER", positional=True)
    format: str = option("safetensors", help="format of the file", choices=tuple(SUFFIXES))
    checkpoint: int | None = option(
        None,
        help="number of the checkpoint, for dcp-checkpoint",
        metavar="N",
        minimum=1,
        default_text="the last one",
    )
    out: Path | None = option(
        None,
        help="file to write; a folder for dcp and dcp-checkpoint",
        metavar="PATH",
        default_text="network.* in the folder of the run",
    )
    image_size: int | None = option(
        None,
        help="height and width of images, for torch-export and onnx",
        metavar="N",
        minimum=1,
        default_text="that of the run's data",
    )
    no_check: bool = option(False, help="do not compare outputs with those of the network")


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "export",
        description="Writes the network of a run: its weights as safetensors or as a checkpoint of "
        "torch.distributed.checkpoint (dcp), a checkpoint of the run with the state of its optimizers, finished or not "
        "(dcp-checkpoint), or its forward pass in evaluation mode as a program of torch.export or an "
        "ONNX model, for a batch of any size.",
        epilog="Example: petra export runs/digits --format onnx",
    )
    add_options(parser, ExportOptions)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Write the file."""
    check_values(ExportOptions, vars(options))
    if options.checkpoint is not None and options.format != "dcp-checkpoint":
        raise ValueError(f"--checkpoint is {options.checkpoint}, but --format is {options.format}: give dcp-checkpoint")
    out = options.out or options.folder / f"network{SUFFIXES[options.format]}"
    if out.exists():
        raise ValueError(f"{out} exists: delete it, or give another --out")
    if options.format == "dcp-checkpoint":
        export_checkpoint(options.folder, out, options.checkpoint)
        print(f"checkpoint in {out}")
        return
    network, spec = load(options.folder), NetworkSpec.read(options.folder)
    out.parent.mkdir(parents=True, exist_ok=True)
    if options.format == "safetensors":
        metadata = {"model": spec.model, "arguments": json.dumps(spec.arguments)}
        save_safetensors(network, out, metadata)
    elif options.format == "dcp":
        save_distributed(network, out)
    else:
        example = example_inputs(options.folder, spec, options.image_size)
        if options.format == "onnx":
            export_onnx(network, example, path=out, check=not options.no_check)
        else:
            torch.export.save(export_program(network, example, check=not options.no_check), out)
    print(f"{spec.model} in {out}")


def example_inputs(folder: Path, spec: NetworkSpec, image_size: int | None) -> Tensor:
    """Return two random samples with the shape of the run's data.

    Args:
        folder: The folder of the run.
        spec: The network.
        image_size: The height and width of images; None for those of the data, which are read where the network does
            not tell.

    Returns:
        Images or tokens.
    """
    arguments = spec.arguments
    generator = torch.Generator().manual_seed(0)
    if "vocab_size" in arguments:
        return torch.randint(arguments["vocab_size"], (2, arguments["seq_len"]), generator=generator)
    size = image_size or arguments.get("image_size")
    if size is None:
        size = RunConfig.read(folder / CONFIG).load_data(test_only=True).arguments["image_size"]
    height, width = (size, size) if isinstance(size, int) else size
    return torch.randn(2, arguments["in_channels"], height, width, generator=generator)
