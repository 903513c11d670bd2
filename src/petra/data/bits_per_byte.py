"""Converts the loss of a language model to bits per byte, which do not depend on the tokenizer."""

from __future__ import annotations

from math import log

from petra.data.dataset import Data
from petra.data.text import TextData
from petra.data.token_files import TokenData


def bits_per_byte(data: Data, loss: float) -> float | None:
    """Convert a test loss in nats per token to bits per byte of text.

    The last tokens of a split that do not fill a window have no loss. So the loss is divided by the mean number of
    bytes per token of the whole split: `loss · tokens / (ln 2 · bytes)`.

    Args:
        data: The data set.
        loss: Mean loss over the test split.

    Returns:
        Bits per byte; None if the data is not a running text.

    """
    return loss / (log(2) * data.bytes_per_token) if isinstance(data, TextData | TokenData) else None
