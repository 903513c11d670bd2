"""Imports scripts of `benchmarks/` and `experiments/`, whose modules have the same names in several folders."""

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def import_scripts(folder: str, *names: str) -> list[ModuleType]:
    """Import modules of a folder as its scripts do, without leaving their names behind for other folders."""
    path = str(ROOT / folder)
    neighbours = [file.stem for file in Path(path).glob("*.py")]
    hidden = {name: sys.modules.pop(name) for name in neighbours if name in sys.modules}
    sys.path.insert(0, path)
    try:
        return [import_module(name) for name in names]
    finally:
        sys.path.remove(path)
        for name in neighbours:
            sys.modules.pop(name, None)
        sys.modules.update(hidden)
