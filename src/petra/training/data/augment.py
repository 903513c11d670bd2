"""Random crop and horizontal flip of a whole batch at once, on whatever device it lies."""

import torch
import torch.nn.functional as F
from torch import Tensor


def draw_moves(count: int, padding: int, flip: bool, generator: torch.Generator) -> Tensor:
    """One move per image, drawn on the CPU: int64 of shape (3, count) with rows top, left, mirrored."""
    corner = torch.randint(0, 2 * padding + 1, (2, count), generator=generator, device="cpu")
    mirrored = torch.randint(0, 2 if flip else 1, (1, count), generator=generator, device="cpu")
    return torch.cat((corner, mirrored))


def crop_and_flip(images: Tensor, moves: Tensor, padding: int) -> Tensor:
    """Pads NCHW images with zeros, cuts each at its own (top, left), then mirrors those marked."""
    n, c, h, w = images.shape
    padded = F.pad(images, (padding, padding, padding, padding))
    top, left, mirrored = moves.view(3, n, 1, 1)
    y = torch.arange(h, device=images.device).view(h, 1)
    x = torch.arange(w, device=images.device)
    rows = top + y
    columns = left + torch.where(mirrored.bool(), w - 1 - x, x)
    pixels = rows * padded.shape[3] + columns  # (n, h, w): positions in a flattened padded image
    picked = padded.flatten(2).gather(2, pixels.view(n, 1, h * w).expand(n, c, h * w))
    return picked.view(n, c, h, w)
