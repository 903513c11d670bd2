"""Reads pickles of plain values and NumPy arrays, and rejects everything that could run code."""

import codecs
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from petra.formatting import first_line

_reconstruct = np.empty(0).__reduce__()[0]

_PERMITTED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): codecs.encode,  # how Python 3 writes bytes in protocols 0 to 2
}


class _RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _PERMITTED[module, name]
        except KeyError:
            raise ValueError(f"it refers to {module}.{name}") from None


def read_pickle(path: Path) -> Any:
    """Read a pickle file; strings of Python 2 become bytes."""
    try:
        with path.open("rb") as file:
            return _RestrictedUnpickler(file, encoding="bytes").load()
    except Exception as error:  # a malformed pickle can raise any exception
        raise ValueError(
            f"{path} is not a readable pickle of plain arrays ({first_line(error)}): "
            "download it again from a source you trust"
        ) from error
