"""Folders of tokens, written without a tokenizer."""

import hashlib
import json
from pathlib import Path

import numpy as np

from petra.data import TokenCounts, TokenInfo
from petra.data.token_files import TOKEN_FILES, token_dtype


def write_tokens(folder: Path, train, test, vocab_size: int, test_bytes: int = 1) -> Path:
    """Write rows of tokens as `petra tokenize` does; `train` may be None."""
    folder.mkdir(parents=True, exist_ok=True)
    counts = {}
    for split, row in (("train", train), ("test", test)):
        if row is not None:
            content = np.asarray(row).astype(token_dtype(vocab_size)).tobytes()
            (folder / TOKEN_FILES[split]).write_bytes(content)
            counts[split] = TokenCounts(len(row), test_bytes, 1, hashlib.sha256(content).hexdigest())
    (folder / "tokenizer.json").write_text("{}")
    digest = hashlib.sha256(b"{}").hexdigest()
    info = TokenInfo(vocab_size, 0, digest, counts.get("train"), counts["test"])
    (folder / "tokens.json").write_text(json.dumps(info.to_json()))
    return folder
