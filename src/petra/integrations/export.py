"""Networks for other programs: weights in files, programs of `torch.export`, and ONNX.

An exported program computes the forward pass in evaluation mode, for a batch of any size. It has no reversible
backward pass.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from petra.conversion import ModuleNetwork
from petra.reversible import Network
from petra.trainer import Trainer

if TYPE_CHECKING:
    from torch.export import ExportedProgram

TOLERANCE = 1e-4
"""The largest difference between the outputs of the network and of a program, relative to the largest output."""


def save_safetensors(network: nn.Module, path: str | Path, metadata: Mapping[str, str] | None = None) -> None:
    """Save the weights and buffers of a network as a safetensors file, under their own names.

    Tensors that share memory are written once for each name.

    Args:
        network: The network.
        path: The file to write.
        metadata: Strings for the header of the file.

    Raises:
        ValueError: If the network has extra state that is not a tensor.
    """
    found = _tensors(network)
    save_file(
        {k: v.detach().cpu().contiguous().clone() for k, v in found.items()}, path, {"format": "pt", **(metadata or {})}
    )


def save_distributed(source: nn.Module | Trainer, folder: str | Path) -> None:
    """Save weights and buffers as a checkpoint of `torch.distributed.checkpoint`, which any number of ranks can read.

    Where a process group is initialised, all ranks call this together. Each rank writes the stages that it holds, so
    no rank needs memory for the whole network.

    Args:
        source: A network, or a trainer, possibly with stages on several ranks. Call `drain` first: micro-batches in
            flight are not saved.
        folder: The folder to write.

    Raises:
        ValueError: If the network has extra state that is not a tensor.

    Example:
        ```python
        save_distributed(trainer, "weights")
        state = network.state_dict()
        torch.distributed.checkpoint.load(state, checkpoint_id="weights")  # reads into the tensors of the network
        ```
    """
    from torch.distributed.checkpoint.state_dict_saver import save

    network = source.network if isinstance(source, Trainer) else source
    found = {name: tensor.detach() for name, tensor in _tensors(network).items() if not tensor.is_meta}
    alone = not (torch.distributed.is_available() and torch.distributed.is_initialized())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is ", UserWarning)  # as intended, if there is one process
        save(found, checkpoint_id=str(folder), no_dist=alone)


def export_program(network: nn.Module, *example: Tensor, check: bool = True) -> ExportedProgram:
    """Trace a network with `torch.export`, in evaluation mode and for a batch of any size.

    Args:
        network: The network.
        *example: Inputs with two samples or more. Their first dimension is the batch.
        check: Compare the outputs of program and network for a batch of another size.

    Returns:
        The program; `torch.export.save` writes it to a file.

    Raises:
        ValueError: If the example has less than two samples, or the outputs differ.
    """
    _check_example(example)
    batch = torch.export.Dim("batch")
    shapes: Any = tuple({0: batch} for _ in example)
    if isinstance(network, ModuleNetwork):
        network = Network(*network)  # the program needs weights under the names of the layers
    parameters = inspect.signature(network.forward).parameters.values()
    for parameter in parameters:
        if parameter.kind is parameter.VAR_POSITIONAL:
            shapes = {parameter.name: shapes}
            break
    with _evaluating(network):
        program = torch.export.export(network, example, dynamic_shapes=shapes)
        if check:
            more = _more(example)
            _compare(network(*more), program.module()(*more), "the program")
    return program


def export_onnx(network: nn.Module, *example: Tensor, path: str | Path, check: bool = True) -> None:
    """Write a network as an ONNX model, in evaluation mode and for a batch of any size.

    Args:
        network: The network.
        *example: Inputs with two samples or more. Their first dimension is the batch.
        path: The file to write.
        check: Compare the outputs of model and network for a batch of another size, with the reference evaluator of
            ONNX, which is slow for large networks.

    Raises:
        ValueError: If a package is missing, the example has less than two samples, or the outputs differ.
    """
    try:
        import onnx
        import onnx.reference
        import onnxscript  # noqa: F401  # the exporter of PyTorch needs it
    except ImportError as error:
        raise ValueError(f"ONNX needs a package that is not installed ({error}): pip install 'petra[onnx]'") from error
    program = export_program(network, *example, check=False)
    names = [f"input{i}" for i in range(len(example))] if len(example) > 1 else ["input"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of PyTorch, about its own exporter
        exported = torch.onnx.export(program, dynamo=True, verbose=False, input_names=names)
    assert exported is not None
    exported.save(str(path))
    if check:
        more = _more(example)
        given = {name: x.detach().cpu().numpy() for name, x in zip(names, more, strict=True)}
        model = onnx.load(str(path))
        onnx.checker.check_model(model)
        found = onnx.reference.ReferenceEvaluator(model).run(None, given)
        with _evaluating(network):
            expected = network(*more)
        outputs = tuple(torch.from_numpy(y) for y in found)
        _compare(expected, outputs if isinstance(expected, tuple) else outputs[0], "the ONNX model")


def _tensors(network: nn.Module) -> dict[str, Tensor]:
    found = network.state_dict()
    for name, value in found.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} is extra state and not a tensor: save it on its own")
    return dict(found)


def _check_example(example: tuple[Tensor, ...]) -> None:
    if not example:
        raise ValueError("there is no example: give inputs of the network with two samples or more")
    if any(x.ndim == 0 or len(x) < 2 for x in example):
        shapes = ", ".join(str(tuple(x.shape)) for x in example)
        raise ValueError(
            f"the example has shape {shapes}: give two samples or more, so that the batch can be of any size"
        )


def _more(example: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return a batch of another size."""
    return tuple(torch.cat([x, x[:1]]) for x in example)


@contextmanager
def _evaluating(network: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in network.modules()}
    network.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes.items():
            module.training = training


def _compare(expected: Any, found: Any, name: str) -> None:
    pairs = zip(expected, found, strict=True) if isinstance(expected, tuple) else [(expected, found)]
    for a, b in pairs:
        difference = float((a.cpu() - b.cpu()).abs().max())
        largest = float(a.abs().max())
        if not difference <= TOLERANCE * max(largest, 1e-30):
            raise ValueError(
                f"the outputs of {name} differ from those of the network by {difference:.1e}, and the largest output "
                f"is {largest:.1e}: part of the network depends on values or shapes that were fixed by the example"
            )
