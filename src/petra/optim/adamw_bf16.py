"""AdamW with moments in bfloat16."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from petra.optim.adamw import adam_directions, fused_adamw, gradient, new_moments
from petra.optim.capturable import CapturableOptimizer, Group, alike, require
from petra.optim.stochastic_rounding import block_bits, position_bits, round_to_bfloat16

SEGMENTS = {"cpu": 2**18, "cuda": 2**21}
"""The most values that are updated at a time: as many as keep a GPU busy, or as few as stay in the cache of a CPU."""
BLOCK = 2**16
"""Values of a parameter with random bits for their positions. The next as many have the same, mixed with others."""
MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamWBF16(CapturableOptimizer):
    """`torch.optim.AdamW` that keeps its moments in bfloat16, which halves their memory.

    An update computes with float32, by PyTorch's fused kernel, and then rounds the moments. Rounding is stochastic:
    with β₂ = 0.999, an update changes the second moment by about a thousandth, which is less than half the distance
    between two bfloat16 numbers, so rounding to the nearest would never change it. The random bits follow from the
    seed, the number of the update and the position in the parameter. So they are the same after a resume, on ranks, in
    a CUDA graph and for any cut into stages.

    At most two million values are updated at a time, so that there are few float32 copies.

    Args:
        params: The parameters, or groups of them.
        lr: The learning rate.
        betas: β₁ and β₂.
        eps: ε.
        weight_decay: The decoupled weight decay.
        seed: Other seeds round differently.

    Raises:
        ValueError: If a setting is out of range or a parameter is complex.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        seed: int = 0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "seed": seed}
        super().__init__(params, defaults)

    def check_group(self, group: Group) -> None:
        super().check_group(group)
        seed = group["seed"]
        require(isinstance(seed, Integral) and int(seed) >= 0, "seed", seed, "give a whole number, 0 or more")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of `AdamWBF16`.

        Args:
            state_dict: What `state_dict` returned.
        """
        # Without the moments, to which PyTorch would give the dtype of their parameter.
        states = state_dict["state"]
        others = {i: {key: x for key, x in state.items() if key not in MOMENTS} for i, state in states.items()}
        super().load_state_dict({**state_dict, "state": others})
        saved = [i for group in state_dict["param_groups"] for i in group["params"]]
        own = [p for group in self.param_groups for p in group["params"]]
        for i, parameter in zip(saved, own, strict=True):
            for key in MOMENTS if states.get(i) else ():
                moment = torch.empty_like(parameter, dtype=torch.bfloat16, requires_grad=False)
                self.state[parameter][key] = moment.copy_(states[i][key])

    def update(self, group: Group, parameters: list[Tensor]) -> None:
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter].update(new_moments(parameter, torch.bfloat16))
        counts = [self.state[p]["step"] for p in parameters]
        steps, largest = torch.stack(counts), max(p.numel() for p in parameters)
        of_blocks = block_bits(steps, -(-largest // BLOCK), group["seed"])
        of_positions = position_bits(min(largest, BLOCK), parameters[0].device)
        dense = [_dense(p) for p in parameters]
        segment = SEGMENTS.get(parameters[0].device.type, SEGMENTS["cuda"])
        for pieces in _batches(self._pieces(parameters, dense, segment), segment):
            moments = _update(group, pieces, steps)
            round_to_bfloat16(moments, _bits(pieces, of_blocks, of_positions))
            stored = [piece.first for piece in pieces] + [piece.second for piece in pieces]
            torch._foreach_copy_(stored, list(moments.flatten().split_with_sizes([len(x) for x in stored])))
        torch._foreach_add_(counts, 1)
        for parameter, own in zip(parameters, dense, strict=True):
            if own is not parameter:
                parameter.copy_(own)

    def _pieces(self, parameters: list[Tensor], dense: list[Tensor], segment: int) -> Iterator[_Piece]:
        """Cut parameters into pieces, in the order of memory."""
        for owner, (parameter, own) in enumerate(zip(parameters, dense, strict=True)):
            state = self.state[parameter]
            for key in MOMENTS:  # the parameter may have another layout than at first
                state[key] = _laid_out_like(state[key], own)
            whole = (own, _laid_out_like(gradient(parameter), own), *(state[key] for key in MOMENTS))
            cut = (x.detach().as_strided((x.numel(),), (1,)).split(segment) for x in whole)
            for number, parts in enumerate(zip(*cut, strict=True)):
                if len(parts[0]):
                    yield _Piece(owner, number * segment // BLOCK, *parts)

    def directions(self, group: Group) -> dict[Tensor, Tensor]:
        found: dict[Tensor, Tensor] = {}
        for parameters in alike(group["params"], lambda p: (p.device, p.dtype)):
            found |= adam_directions(group, parameters, self.state)
        return found


@dataclass(frozen=True)
class _Piece:
    """Consecutive values of a parameter, with their gradients and moments."""

    owner: int
    """The number of the parameter."""
    block: int
    """The number of its first block in the parameter."""
    weights: Tensor
    gradients: Tensor
    first: Tensor
    second: Tensor


def _batches(pieces: Iterable[_Piece], segment: int) -> Iterator[list[_Piece]]:
    """Yield pieces with at most so many values together."""
    batch: list[_Piece] = []
    count = 0
    for piece in pieces:
        if batch and count + len(piece.weights) > segment:
            yield batch
            batch, count = [], 0
        batch.append(piece)
        count += len(piece.weights)
    if batch:
        yield batch


def _update(group: Group, pieces: Sequence[_Piece], steps: Tensor) -> Tensor:
    """Update the weights of pieces, and return their new moments in float32: of shape (2, values)."""
    sizes, dtype = [len(piece.weights) for piece in pieces], pieces[0].weights.dtype
    wide = torch.promote_types(dtype, torch.float32)

    def widened(tensors: list[Tensor]) -> list[Tensor]:
        return tensors if wide == dtype else list(torch.cat(tensors).to(wide).split_with_sizes(sizes))

    moments = torch.cat([piece.first for piece in pieces] + [piece.second for piece in pieces]).to(wide).view(2, -1)
    first, second = (list(moment.split_with_sizes(sizes)) for moment in moments)
    weights = widened([piece.weights for piece in pieces])
    fused_adamw(
        group,
        weights,
        widened([piece.gradients for piece in pieces]),
        first,
        second,
        # Copies, because the kernel counts, but a parameter may have several pieces.
        list(torch.stack([steps[piece.owner] for piece in pieces]).unbind()),
    )
    if wide != dtype:
        torch._foreach_copy_([piece.weights for piece in pieces], weights)
    return moments.float()


def _bits(pieces: Sequence[_Piece], of_blocks: Tensor, of_positions: Tensor) -> Tensor:
    """Return the random bits of pieces, of shape (2, values)."""
    if len(pieces) == 1:
        (piece,) = pieces
        count = len(piece.weights)
        own = of_blocks[:, piece.owner, piece.block : piece.block - (-count // BLOCK), None]
        return (own ^ of_positions).flatten(1)[:, :count]
    keys, positions = [], []
    for piece in pieces:
        for number, part in enumerate(torch.split(piece.weights, BLOCK), piece.block):
            keys.append(of_blocks[:, piece.owner, number, None].expand(2, len(part)))
            positions.append(of_positions[: len(part)])
    return torch.cat(keys, 1).bitwise_xor_(torch.cat(positions))


def _dense(parameter: Tensor) -> Tensor:
    """Return the parameter, or a copy of it if its values are not next to each other in memory."""
    if parameter.is_contiguous() or parameter.stride() == torch.empty_like(parameter, device="meta").stride():
        return parameter
    return torch.empty_like(parameter).copy_(parameter)


def _laid_out_like(x: Tensor, other: Tensor) -> Tensor:
    """Return a tensor with the memory layout of another one of the same shape."""
    if all(n == 1 or a == b for n, a, b in zip(x.shape, x.stride(), other.stride(), strict=True)):
        return x
    return torch.empty_like(other, dtype=x.dtype, requires_grad=False).copy_(x)
