"""Reads the documents of text files of any size in pieces, so that no file has to fit into memory."""

from __future__ import annotations

import codecs
import gzip
import lzma
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

PIECE_CHARACTERS = 2**16
"""Characters from which on a document is divided into pieces."""

LONGEST_PIECE = 2**20
"""Characters after which a text without white space is divided all the same."""

_READ_BYTES = 2**20

_BETWEEN_WORDS = re.compile(r"[^\W\d_](?= [^\W\d_])")
_BEFORE_SPACE = re.compile(r"\S(?=[ \t\n\r])")  # Python's \s has characters that are no white space in Unicode


class Piece(NamedTuple):
    """A part of a document."""

    text: str
    """The text, which may be empty at the end of a document."""
    ends: bool
    """True if the document ends after it."""


@dataclass(frozen=True)
class DocumentReader:
    r"""Reads documents from text files.

    A document is a file, unless `separator` or `start` divides files further. Empty documents are left out. UTF-8
    byte-order marks at the start of files are removed, and nothing else is changed.

    Documents of more than `size` characters come in several pieces. They are divided before a space between two
    letters, or else before other white space. Byte-level tokenizers begin a new token there anyway, so the tokens of
    the pieces are those of the whole document. Only a text without white space that is longer than `LONGEST_PIECE`
    characters is divided elsewhere.
    """

    files: Sequence[Path]
    """The files; names that end in .gz or .xz are decompressed."""
    separator: str = ""
    """The text between documents, which is removed."""
    start: str = ""
    """The text at the start of a line with which a new document begins."""
    size: int = PIECE_CHARACTERS
    """Characters of a piece, approximately."""
    progress: Callable[[int], object] | None = None
    """Called with the number of bytes that have been read from a file since the last call."""

    def __iter__(self) -> Iterator[Piece]:
        for file in self.files:
            yield from divide(self._documents(file), self.size)

    def _documents(self, file: Path) -> Iterator[Piece]:
        """The documents of a file, in pieces of any size."""
        # Of a boundary that has been found, `head` characters belong to the document before it, `tail` to the next.
        boundary, head, tail = self.separator, 0, 0
        if self.start:
            boundary, head, tail = "\n" + self.start, 1, len(self.start)
        rest, empty = "", True
        for text in read_text_parts(file, self.progress):
            rest += text
            begin = 0  # of the document; to copy the rest after each document would take quadratic time
            while boundary and (found := rest.find(boundary, begin)) >= 0:
                if not empty or found + head > begin:
                    yield Piece(rest[begin : found + head], True)
                begin, empty = found + len(boundary) - tail, True
            safe = len(rest) - max(len(boundary) - 1, 0)  # a boundary may begin in the remaining characters
            if safe > begin:
                yield Piece(rest[begin:safe], False)
                begin, empty = safe, False
            rest = rest[begin:]
        if rest or not empty:
            yield Piece(rest, True)


def find_files(paths: Iterable[Path], option: str) -> list[Path]:
    """Return files, and all files below folders in the order of their paths, except for hidden ones.

    Args:
        paths: Files and folders.
        option: The name of the option in errors.

    Returns:
        The files.

    Raises:
        ValueError: If a path does not exist, or a folder contains no file.
    """
    files: list[Path] = []
    for given in paths:
        path = given.expanduser()
        if path.is_dir():
            below = sorted(p for p in path.rglob("*") if p.is_file() and not _hidden(p.relative_to(path)))
            if not below:
                raise ValueError(f"{option} is {given}, which contains no files: give text files, or folders of them")
            files += below
        elif path.exists():
            files.append(path)
        else:
            raise ValueError(f"{option} is {given}, which does not exist: give text files, or folders of them")
    return files


def read_text_parts(file: Path, progress: Callable[[int], object] | None = None) -> Iterator[str]:
    """Read a UTF-8 file, which may be compressed, about a megabyte at a time.

    Args:
        file: The file; a name that ends in .gz or .xz is decompressed.
        progress: Called with the number of bytes that have been read from the file since the last call.

    Returns:
        An iterator over the parts of the text.

    Raises:
        ValueError: If the file is damaged or not UTF-8.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    read, reported = 0, 0
    with file.open("rb") as raw:
        content = _decompressed(file, raw)
        while True:
            try:
                part = content.read(_READ_BYTES)
                pending = len(decoder.getstate()[0])
                text = decoder.decode(part, final=not part)
            except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
                raise ValueError(f"{file} is damaged ({error}): restore a copy") from error
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"{file} is not UTF-8 at byte {read - pending + error.start}: convert it, or leave it out"
                ) from error
            if progress is not None:
                progress(raw.tell() - reported)
                reported = raw.tell()
            if text:
                yield text
            if not part:
                return
            read += len(part)


def divide(parts: Iterable[Piece], size: int) -> Iterator[Piece]:
    """Make pieces of about `size` characters, which end where a token of a byte-level tokenizer ends.

    Args:
        parts: Documents in pieces of any size.
        size: Characters of a piece. A piece is longer where there is no white space. A text without white space that
            is longer than `LONGEST_PIECE` (and `size`) is cut there, possibly within a token.

    Returns:
        An iterator over pieces with the same documents. They do not depend on how `parts` are divided.
    """
    longest = max(size, LONGEST_PIECE)
    rest, searched = "", 0  # `searched` characters of the rest contain no boundary
    for text, ends in parts:
        rest += text
        begin = 0
        while len(rest) - begin > size + (not ends):  # a boundary after `size` characters needs two more
            cut = 0 if searched else _last_boundary(rest, begin, size)
            cut = cut or _next_boundary(rest, begin + max(size, searched), begin + longest)
            if not cut:
                searched = len(rest) - begin - 1
                break
            yield Piece(rest[begin:cut], False)
            begin, searched = cut, 0
        if ends:
            yield Piece(rest[begin:], True)
            begin, searched = len(rest), 0
        rest = rest[begin:]


def _last_boundary(text: str, begin: int, size: int) -> int:
    """The last place within `size` characters after `begin` at which a text may be divided, or 0."""
    end = begin + size
    near = max(begin, end - 2**12)
    for pattern, start in ((_BETWEEN_WORDS, near), (_BEFORE_SPACE, near), (_BEFORE_SPACE, begin)):
        found = 0
        for match in pattern.finditer(text, start, end + 2):
            if match.end() <= end:
                found = match.end()
        if found:
            return found
    return 0


def _next_boundary(text: str, begin: int, end: int) -> int:
    """The first place after `begin` at which a text may be divided, or `end` if the text is longer, or 0."""
    found = _BEFORE_SPACE.search(text, begin, end + 1)
    if found is not None:
        return found.end()
    return end if len(text) > end else 0


def _decompressed(file: Path, raw: IO[bytes]) -> IO[bytes]:
    if file.suffix == ".gz":
        return gzip.GzipFile(fileobj=raw)  # type: ignore[return-value]
    if file.suffix == ".xz":
        return lzma.LZMAFile(raw)
    return raw


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)
