"""Data sets in memory, and batches of them that are a pure function of seed, epoch and index."""

from petra.training.data.batches import Batches
from petra.training.data.fingerprint import fingerprint
from petra.training.data.images import ImageData
from petra.training.data.protocol import Data
from petra.training.data.sentences import SentenceData
from petra.training.data.sources import load
from petra.training.data.text import TextData
from petra.training.data.vocabulary import Vocabulary

__all__ = ["Batches", "Data", "ImageData", "SentenceData", "TextData", "Vocabulary", "fingerprint", "load"]
