"""Holds out a part of a data set for testing, if it has no test split."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

DEFAULT_TEST_FRACTION = 0.1


def hold_out(names: Sequence[str], labels: Tensor, fraction: float, where: object) -> tuple[Tensor, Tensor]:
    """Choose the samples of each class that are held out, by a hash of their names.

    The choice depends on nothing else. So it stays the same for the samples that are there when others are added or
    removed, except for a few at the limit.

    Args:
        names: Name of each sample.
        labels: One class per sample.
        fraction: Share of the samples of each class, rounded, but at least one sample and not all.
        where: The name of the data in messages.

    Returns:
        Indices of training and of test samples, in ascending order.

    Raises:
        ValueError: If the fraction is not between 0 and 1, or a class has fewer than two samples.

    """
    if not 0 < fraction < 1:
        raise ValueError(f"--test-fraction is {fraction}: give more than 0 and less than 1")
    rank = [hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).digest() for name in names]
    members: dict[int, list[int]] = {}
    for index, label in enumerate(labels.tolist()):
        members.setdefault(label, []).append(index)
    test: list[int] = []
    for label, indices in members.items():
        if len(indices) < 2:
            raise ValueError(
                f"{where}: class {label} has one sample ({names[indices[0]]}), which cannot be split into training "
                "and test samples: give more, or a test split"
            )
        count = min(max(round(fraction * len(indices)), 1), len(indices) - 1)
        test += sorted(indices, key=lambda i: (rank[i], names[i]))[:count]
    held = torch.zeros(len(names), dtype=torch.bool)
    held[test] = True
    return (~held).nonzero().flatten(), held.nonzero().flatten()
