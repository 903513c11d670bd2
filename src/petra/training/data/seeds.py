"""Random generators named by what they are for, so that no draw depends on an earlier one."""

import hashlib

import torch


def generator(*key: int | str) -> torch.Generator:
    """A fresh CPU generator whose seed is a stable 63-bit hash of the key.

    Python's own `hash` differs from process to process; this one is the same on every machine.
    """
    text = "\0".join(str(part) for part in key)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little") >> 1)
