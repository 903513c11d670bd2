"""A small text from a large one: excerpts at equal distances, for trainings of a small model on a CPU."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

SEPARATOR = "\n\n\n"
"""Between excerpts, as between the documents of the text; two blank lines within an excerpt become one."""


def excerpts(text: str, count: int, length: int) -> str:
    """Return so many excerpts of so many characters, which begin at equal distances."""
    if count * length > len(text):
        raise ValueError(
            f"{count} excerpts of {length} characters are longer than the text with {len(text)}: choose fewer"
        )
    starts = (index * len(text) // count for index in range(count))
    return SEPARATOR.join(re.sub(r"\n{3,}", "\n\n", text[start : start + length].strip()) for start in starts)


def main(arguments: list[str] | None = None) -> None:
    """Write the excerpts of one file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--excerpts", type=int, default=250, metavar="N")
    parser.add_argument("--length", type=int, default=20_000, metavar="CHARACTERS")
    given = parser.parse_args(arguments)
    try:
        found = excerpts(given.text.read_text(), given.excerpts, given.length)
    except ValueError as error:
        parser.error(str(error))
    given.out.write_text(found)


if __name__ == "__main__":
    main()
