"""A folder of tokens with a shorter training split, for trainings that are shorter than an epoch."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np


def cut_tokens(source: Path, target: Path, tokens: int) -> None:
    """Copy a folder of `petra tokenize`, with the first `tokens` tokens of its training split.

    The bytes of the shorter split are estimated. They are printed only; losses are those of the test split.

    Args:
        source: The folder.
        target: The new folder; it must not exist.
        tokens: The number of tokens.

    Raises:
        ValueError: The training split is not that long.
    """
    description = json.loads((source / "tokens.json").read_text())
    train = description["train"]
    if not 0 < tokens <= train["tokens"]:
        raise ValueError(f"--train-tokens is {tokens}, but {source} has {train['tokens']} training tokens: give fewer")
    target.mkdir(parents=True)
    for name in ("test.bin", "tokenizer.json"):
        shutil.copy(source / name, target / name)
    kept = np.memmap(source / "train.bin", np.dtype(description["dtype"]).newbyteorder("<"), "r")[:tokens].tobytes()
    (target / "train.bin").write_bytes(kept)
    share = tokens / train["tokens"]
    train |= {"tokens": tokens, "bytes": round(train["bytes"] * share), "sha256": hashlib.sha256(kept).hexdigest()}
    (target / "tokens.json").write_text(json.dumps(description, indent=2) + "\n")
