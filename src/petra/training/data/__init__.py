"""Image data sets in memory, and batches of them that are a pure function of seed, epoch and index."""

from petra.training.data.batches import Batches
from petra.training.data.images import ImageData
from petra.training.data.sources import describe, load

__all__ = ["Batches", "ImageData", "describe", "load"]
