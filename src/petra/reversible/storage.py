"""The storage of a layer: its activations are stored, recomputed, moved to the host or reconstructed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache
from itertools import groupby
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from petra.reversible.coupling import Coupling
from petra.reversible.layer import ReversibleLayer
from petra.reversible.module_state import discarded_statistics, normalisations
from petra.reversible.randomness import capturing, note_draws, random_state
from petra.reversible.streams import Streams, as_streams

STORAGES = {
    "reconstruct": "nothing: inputs are computed from outputs (reversible layers only)",
    "store": "all that autograd needs",
    "store:B": "compiled as a whole; of what that would save, a share of about B, between 0 and 1",
    "selective": "results of matrix products, convolutions and attention; the rest is computed again",
    "recompute": "the inputs; the layer is computed again",
    "offload": "all that autograd needs, in host memory",
}
"""The values that a layer keeps between its forward and its backward pass, by the name of the storage."""


def storage_of(layer: nn.Module) -> str | None:
    """Return the storage of a layer.

    Args:
        layer: The layer.

    Returns:
        A name; None if none has been set and the layer is not reversible, so that its container decides.
    """
    default = "reconstruct" if isinstance(layer, ReversibleLayer) else None
    return getattr(layer, "storage", default)


def set_storage(layers: Sequence[nn.Module], storages: Sequence[str]) -> None:
    """Set the storage of each layer.

    Args:
        layers: The layers.
        storages: A name for each, or one for all reversible layers.

    Raises:
        ValueError: If the number of names is wrong, a name is unknown, or a layer is not reversible.
    """
    for layer, storage in assign_storages(layers, storages):
        layer.storage = storage  # type: ignore[assignment]


def assign_storages(layers: Sequence[nn.Module], storages: Sequence[str]) -> list[tuple[nn.Module, str]]:
    """Return the layers with their storages.

    Args:
        layers: The layers.
        storages: A name for each, or one for all reversible layers.

    Returns:
        The layers whose storage is given.

    Raises:
        ValueError: If the number of names is wrong, a name is unknown, or a layer is not reversible.
    """
    if len(storages) == 1 and len(layers) != 1:
        layers = [layer for layer in layers if isinstance(layer, ReversibleLayer)]
        storages = list(storages) * len(layers)
    if len(storages) != len(layers):
        raise ValueError(f"{len(storages)} storages for {len(layers)} layers: give one for each")
    for index, (layer, storage) in enumerate(zip(layers, storages, strict=True)):
        budget_of(storage)
        if storage == "reconstruct" and not isinstance(layer, ReversibleLayer):
            raise ValueError(
                f"layer {index} ({type(layer).__name__}) is not reversible, so its inputs cannot be reconstructed: "
                "give 'store' or 'recompute'"
            )
    return list(zip(layers, storages, strict=True))


def expand_storages(names: Sequence[str]) -> list[str]:
    """Return the storage of each layer.

    Args:
        names: Storages, where `12*store` stands for twelve layers.

    Returns:
        One name for each layer.

    Raises:
        ValueError: If there is no such storage, or a number is not positive.
    """
    found: list[str] = []
    for name in names:
        count, _, storage = name.partition("*") if "*" in name else ("1", "", name)
        if not count.strip().isdecimal() or int(count) < 1:
            raise ValueError(f"{name!r} should begin with a number of layers, as in '12*store'")
        budget_of(storage.strip())
        found += [storage.strip()] * int(count)
    return found


def shorten_storages(storages: Sequence[str]) -> tuple[str, ...]:
    """Return the shortest argument of `expand_storages`: equal neighbours are joined."""
    groups = [(storage, len(list(equal))) for storage, equal in groupby(storages)]
    return tuple(storage if count == 1 else f"{count}*{storage}" for storage, count in groups)


def budget_of(storage: str) -> float | None:
    """Return the share of activations that a compiled layer keeps.

    Args:
        storage: The name of a storage.

    Returns:
        The share; None for a storage that does not compile the layer.

    Raises:
        ValueError: If there is no such storage.
    """
    if storage in STORAGES and storage != "store:B":
        return None
    kind, _, share = storage.partition(":")
    try:
        budget = float(share)
    except ValueError:
        budget = -1.0
    if kind != "store" or not 0 <= budget <= 1:
        names = ", ".join(STORAGES)
        raise ValueError(f"storage is {storage!r}: give one of {names}, with a B between 0 and 1 as in 'store:0.5'")
    return budget


Function = nn.Module | Coupling


def evaluate(functions: Sequence[Function], streams: Streams, storage: str | None, **kwargs: Any) -> Streams:
    """Compute the outputs of couplings, or of a layer; the storage decides which values autograd keeps.

    Args:
        functions: The layer, or the couplings of a reversible layer.
        streams: The inputs.
        storage: The storage; None, and `"reconstruct"` outside of a reversible segment, mean `"store"`.
        **kwargs: Keyword arguments for a layer.

    Returns:
        The outputs.
    """
    if storage in (None, "store", "reconstruct") or not torch.is_grad_enabled():
        return _plain(functions, kwargs, *streams)
    if storage == "offload":
        with offloaded():
            return _plain(functions, kwargs, *streams)
    budget = budget_of(storage)
    if budget is not None:
        from torch._functorch import config

        with config.patch(activation_memory_budget=budget):
            return _compiled(budget, tuple(x.shape for x in streams))(functions, kwargs, *streams)
    selective = storage == "selective"
    modules = [m for f in functions for m in (f.modules if isinstance(f, Coupling) else (f,))]
    norms, device = normalisations(modules), streams[0].device
    before = random_state(device)

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        first: AbstractContextManager[Any] = ExitStack()
        again: AbstractContextManager[Any] = ExitStack()
        if selective:
            first, again = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
        return first, _recomputing(again, norms)

    outputs: Streams = checkpoint(
        _plain,
        functions,
        kwargs,
        *streams,
        use_reentrant=False,
        preserve_rng_state=not capturing(device),
        context_fn=contexts,
    )
    note_draws(modules, device, before)
    return outputs


def _plain(functions: Sequence[Function], kwargs: dict[str, Any], *streams: Tensor) -> Streams:
    for function in functions:
        if isinstance(function, Coupling):
            streams = function.forward(streams)
        else:
            streams = as_streams(function(*streams, **kwargs))
    return streams


@cache
def _compiled(budget: float, shapes: tuple[torch.Size, ...]) -> Callable[..., Streams]:
    """Return a separate compiled function for each budget and shape.

    With a single function, `torch.compile` would check the guards of all its versions in each call, which takes time.
    """
    own = FunctionType(_plain.__code__.replace(co_name=f"layer_with_budget_{budget:g}"), _plain.__globals__)
    return torch.compile(own, dynamic=False)


@contextmanager
def _recomputing(context: AbstractContextManager[Any], norms: list[nn.Module]) -> Iterator[None]:
    # Recomputation must not update running statistics again. They are copied first, outside of `context`.
    with discarded_statistics(norms), context:
        yield


_SAVED = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "convolution",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)


@cache
def _saved_operations() -> frozenset[Any]:
    found = (getattr(torch.ops.aten, name, None) for name in _SAVED)
    return frozenset(packet.default for packet in found if packet is not None)


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = operation in _saved_operations()
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


_COPY_STREAMS: dict[torch.device, torch.cuda.Stream] = {}
_SMALL = 2**16
"""Bytes below which a tensor is not worth a copy."""
_MOST_PADDING = 2
"""A tensor that spans more than this many times its values is part of a larger one, and its padding is not restored."""


def offloaded() -> AbstractContextManager[None]:
    """Keep what autograd saves in pinned host memory.

    Tensors are copied on a separate CUDA stream, and copied back when the backward pass needs them. Parameters,
    small tensors and tensors on a CPU stay where they are.

    Returns:
        A context manager for the forward pass.
    """

    def pack(x: Tensor) -> Any:
        parameter = isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter)
        if not x.is_cuda or parameter or x.nbytes < _SMALL:
            return x
        if x.device not in _COPY_STREAMS:
            _COPY_STREAMS[x.device] = torch.cuda.Stream(x.device)  # type: ignore[no-untyped-call]
        stream = _COPY_STREAMS[x.device]
        stream.wait_stream(torch.cuda.current_stream(x.device))
        values = _distinct(x.detach())
        host = torch.empty_like(values, device="cpu", pin_memory=True)
        with torch.cuda.stream(stream):
            host.copy_(values, non_blocking=True)
            copied = stream.record_event()
        x.record_stream(stream)  # its memory is not used again before it has been copied
        return x.device, host, copied, x.shape, x.stride()

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        device, host, copied, shape, strides = packed
        torch.cuda.current_stream(device).wait_event(copied)
        return _with_layout(host.to(device, non_blocking=True), shape, strides)

    return saved_tensors_hooks(pack, unpack)


def _distinct(x: Tensor) -> Tensor:
    """Return a view without the dimensions along which a tensor repeats its values."""
    for dimension, stride in enumerate(x.stride()):
        if stride == 0 and x.shape[dimension] > 1:
            x = x.narrow(dimension, 0, 1)
    return x


def _with_layout(values: Tensor, shape: torch.Size, strides: tuple[int, ...]) -> Tensor:
    """Undo `_distinct`, and restore padding, because kernels may rely on the alignment that it gives."""
    extent = 1
    for stride, size in sorted(zip(strides, values.shape, strict=True)):
        if size > 1 and stride < extent:  # elements may overlap, and such a tensor cannot be written to
            return values.expand(shape)
        extent += (size - 1) * stride
    if values.numel() < extent <= _MOST_PADDING * values.numel():
        values = values.new_empty_strided(values.shape, strides).copy_(values)
    return values.expand(shape)
