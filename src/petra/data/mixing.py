"""Mixup and CutMix: mixes the images of a batch in pairs, and their labels to class probabilities."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from petra.data.batch_plan import pair_bounds, part_bounds
from petra.data.dataset import keyed_generator


@dataclass(frozen=True)
class Mixing:
    """Mixes samples 0 and 1, 2 and 3, … of a batch.

    Training batches are in random order, so these pairs are random too. Neighbours can be mixed by each replica alone,
    which makes a batch the same for any number of replicas. The last sample of an odd number stays as it is. All pairs
    of a batch have the same λ ~ Beta(α, α), drawn from a generator with the key (seed, epoch, index).

    Args:
        num_classes: Number of classes.
        mixup: α of mixup (Zhang et al., 2018): images become λ·a + (1 - λ)·b. 0 for no mixup.
        cutmix: α of CutMix (Yun et al., 2019): a rectangle with the share 1 - λ of the pixels comes from b. 0 for no
            CutMix. With both, each batch has one of them, with equal probability.

    Raises:
        ValueError: If an α is negative or not finite, or both are 0.

    """

    num_classes: int
    mixup: float = 0.0
    cutmix: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("mixup", self.mixup), ("cutmix", self.cutmix)):
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value}: give 0 or more, such as 0.2")
        if not (self.mixup or self.cutmix):
            raise ValueError("mixup and cutmix are both 0: give one of them, such as mixup=0.2")

    def __call__(self, images: Tensor, labels: Tensor, *key: int) -> tuple[Tensor, Tensor]:
        """Mix a batch.

        Args:
            images: Normalised images, NCHW.
            labels: One class per image.
            *key: Seed, epoch and index of the batch.

        Returns:
            Images, and one row of class probabilities per image.

        """
        generator = keyed_generator(*key, "mix")
        cut = bool(self.cutmix)
        if self.mixup and self.cutmix:
            cut = float(torch.rand((), generator=generator)) < 0.5
        share = draw_beta(self.cutmix if cut else self.mixup, generator)
        partner = _neighbours(len(images), images.device)
        others = images.index_select(0, partner)
        if cut:
            top, bottom, left, right = draw_rectangle(images.shape[-2], images.shape[-1], share, generator)
            share = 1 - (bottom - top) * (right - left) / (images.shape[-2] * images.shape[-1])
            mixed = images.clone(memory_format=torch.preserve_format)
            mixed[..., top:bottom, left:right] = others[..., top:bottom, left:right]
        else:
            mixed = images * share + others * (1 - share)
        labels = F.one_hot(labels, self.num_classes).to(images.dtype)
        targets = labels * share + labels.index_select(0, partner) * (1 - share)
        if len(images) % 2:
            mixed[-1], targets[-1] = images[-1], labels[-1]
        return mixed, targets

    def part(
        self, images: Tensor, labels: Tensor, size: int, shard: tuple[int, int], *key: int
    ) -> tuple[Tensor, Tensor]:
        """Mix a replica's part of a batch, as it would be mixed in the whole batch.

        Args:
            images: The images of `pair_bounds`; or one placeholder image.
            labels: One class per image.
            size: Samples in the whole batch.
            shard: `(r, R)` for the r-th of R parts.
            *key: Seed, epoch and index of the batch.

        Returns:
            The images of `part_bounds`, and their class probabilities.

        """
        (low, high), (first, _) = part_bounds(size, shard), pair_bounds(size, shard)
        mixed, targets = self(images, labels, *key)
        keep = slice(None) if low == high else slice(low - first, high - first)
        return mixed[keep], targets[keep]


def _neighbours(count: int, device: torch.device) -> Tensor:
    """1, 0, 3, 2, …: the partner of each sample; the last of an odd number is its own."""
    return (torch.arange(count, device=device) ^ 1).clamp_(max=count - 1)


def draw_beta(alpha: float, generator: torch.Generator) -> float:
    """Draw from Beta(α, α) in float64."""
    gammas = torch._standard_gamma(torch.full((2,), alpha, dtype=torch.float64, device="cpu"), generator=generator)
    total = float(gammas.sum())
    # For a tiny α both underflow to the smallest number; Beta(α, α) is then 0 or 1 with equal probability.
    return float(gammas[0]) / total if total > 1e-300 else float(torch.rand((), generator=generator) < 0.5)


def draw_rectangle(height: int, width: int, share: float, generator: torch.Generator) -> tuple[int, int, int, int]:
    """Draw a rectangle with the share `1 - share` of the pixels around a random centre, cut off at the border.

    Returns:
        Top, bottom, left and right.

    """
    side = math.sqrt(1 - share)
    bounds = []
    for size in (height, width):
        centre = int(torch.randint(size, (), generator=generator, device="cpu"))
        half = int(size * side) // 2
        bounds += [max(centre - half, 0), min(centre + half, size)]
    top, bottom, left, right = bounds
    return top, bottom, left, right
