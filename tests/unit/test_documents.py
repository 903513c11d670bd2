"""Documents of text files: the same for every size of what is read at a time, compressed or not."""

import gzip
import lzma
import re
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest
from helpers.data_files import refused
from hypothesis import given
from hypothesis import strategies as st

from petra.data import documents
from petra.data.documents import DocumentReader, Piece, divide, find_files, read_text_parts

PARTS = ["\n\n", "\n\n\n", "a\na", "\n# ", *"ab é€𝄞.#'\n\r\t\u00a0\x1c1"]
TEXTS = st.lists(st.sampled_from(PARTS), max_size=40).map("".join)


def joined(pieces) -> list[str]:
    """The documents of pieces."""
    found, text = [], ""
    for piece, ends in pieces:
        text += piece
        if ends:
            found, text = [*found, text], ""
    assert not text, "the last document does not end"
    return found


@given(TEXTS, st.sampled_from(["", "\n\n", "#", "a\na", "\n\n\n"]), st.integers(1, 9), st.integers(1, 9))
def test_separators_are_found_however_the_file_is_read(text: str, separator: str, read: int, size: int) -> None:
    expected = [part for part in (text.split(separator) if separator else [text]) if part]
    with TemporaryDirectory() as folder, patch.object(documents, "_READ_BYTES", read):
        file = Path(folder, "a.txt")
        file.write_bytes(text.encode())
        assert joined(DocumentReader([file], separator, size=size)) == expected
        assert joined(DocumentReader([file, file], separator, size=size)) == expected * 2


@given(TEXTS, st.sampled_from(["#", "a", "# ", "\n"]), st.integers(1, 9))
def test_documents_that_begin_with_a_line(text: str, start: str, read: int) -> None:
    expected = [part for part in re.split(f"(?<=\n)(?={start})", text) if part]
    with TemporaryDirectory() as folder, patch.object(documents, "_READ_BYTES", read):
        file = Path(folder, "a.txt")
        file.write_bytes(text.encode())
        assert joined(DocumentReader([file], start=start)) == expected


@given(TEXTS, st.integers(1, 20), st.integers(1, 9))
def test_pieces_end_before_white_space(text: str, size: int, part: int) -> None:
    parts = [Piece(text[i : i + part], i + part >= len(text)) for i in range(0, len(text), part)] or [Piece("", True)]
    pieces = list(divide(parts, size))
    assert joined(pieces) == [text]
    for (before, ends), (after, _) in pairwise(pieces):
        assert not ends
        assert after[0] in " \t\n\r"
        assert not before[-1].isspace()


def test_pieces_are_short_where_there_is_white_space() -> None:
    pieces = list(divide([Piece("word and, more\n" * 1000, True)], 100))
    assert max(len(text) for text, _ in pieces) <= 100
    assert sum(len(text) for text, _ in pieces) / len(pieces) > 85
    assert sum(text.startswith(" and") for text, _ in pieces) == len(pieces) - 1  # between letters, if there are any
    whole = "x" * 500
    assert list(divide([Piece(whole, True)], 100)) == [Piece(whole, True)]


@given(TEXTS, st.integers(1, 20), st.integers(1, 9), st.integers(1, 30))
def test_pieces_do_not_depend_on_what_is_read_at_a_time(text: str, size: int, part: int, longest: int) -> None:
    parts = [Piece(text[i : i + part], False) for i in range(0, len(text), part)]
    with patch.object(documents, "LONGEST_PIECE", longest):
        pieces = list(divide([Piece(text, True)], size))
        assert list(divide([*parts, Piece("", True)], size)) == pieces
    assert joined(pieces) == [text]
    assert all(len(piece) <= max(size, longest) for piece, _ in pieces)


def test_a_text_without_white_space_is_cut() -> None:
    text = "x" * 25 + " " + "y" * 9
    with patch.object(documents, "LONGEST_PIECE", 10):
        pieces = [piece for piece, _ in divide([Piece(text, True)], 4)]
    assert pieces == ["x" * 10, "x" * 10, "x" * 5, " " + "y" * 9]


class CountedText(str):
    """A text that counts the characters that are copied from it."""

    copied = 0

    def __radd__(self, other: str) -> "CountedText":
        return CountedText(other + str(self))

    def __getitem__(self, index) -> "CountedText":
        part = CountedText(super().__getitem__(index))
        CountedText.copied += len(part)
        return part


@pytest.mark.parametrize("options", [{"separator": "\n"}, {"start": "a"}, {"size": 20}])
def test_the_characters_that_are_copied_grow_with_the_text(options) -> None:
    text = CountedText("a bc def\n" * 1000)
    with (
        patch.object(CountedText, "copied", 0),
        patch.object(documents, "read_text_parts", lambda *_: iter([text])),
    ):
        assert "".join(joined(DocumentReader([Path("a.txt")], **options))).count("def") == 1000
        assert len(text) <= CountedText.copied <= 4 * len(text)


def test_the_characters_that_are_searched_grow_with_the_text() -> None:
    class Counted:
        def __init__(self, pattern):
            self.pattern, self.searched = pattern, 0

        def _count(self, text, start, end):
            self.searched += max(min(end, len(text)) - start, 0)

        def finditer(self, text, start, end):
            self._count(text, start, end)
            return self.pattern.finditer(text, start, end)

        def search(self, text, start, end):
            self._count(text, start, end)
            return self.pattern.search(text, start, end)

    for text in ("x" * 20_000, "a. " * 3000 + "x" * 10_000):
        counted = Counted(documents._BEFORE_SPACE)
        parts = [Piece(text[i : i + 10], False) for i in range(0, len(text), 10)]
        with patch.object(documents, "_BEFORE_SPACE", counted):
            assert joined(divide([*parts, Piece("", True)], 5000)) == [text]
        assert counted.searched < 4 * len(text)


def test_compressed_files_and_byte_order_marks(tmp_path) -> None:
    text = "Zoë\r\nand 𝄞\n" * 9
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + text.encode())
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(text.encode()))
    for file in sorted(tmp_path.iterdir()):
        read = []
        assert "".join(read_text_parts(file, read.append)) == text
        assert sum(read) == file.stat().st_size


def test_what_cannot_be_read(tmp_path) -> None:
    content = ("Zoë " * 3000).encode()
    (tmp_path / "latin.txt").write_bytes(content + b"\xe9t\xe9")
    (tmp_path / "end.txt").write_bytes(content + b"\xc3")
    (tmp_path / "half.gz").write_bytes(gzip.compress(content)[:-9])
    (tmp_path / "half.xz").write_bytes(lzma.compress(content)[:-9])
    (tmp_path / "no.gz").write_bytes(content)
    (tmp_path / "no.xz").write_bytes(content)
    for read in (7, 2**20):
        with patch.object(documents, "_READ_BYTES", read):
            for name, words in (
                ("latin.txt", f"latin.txt is not UTF-8 at byte {len(content)}: convert it, or leave it out"),
                ("end.txt", f"end.txt is not UTF-8 at byte {len(content)}"),
                *((name, f"{name} is damaged (") for name in ("half.gz", "half.xz", "no.gz", "no.xz")),
            ):
                with refused(words):
                    list(read_text_parts(tmp_path / name))


def test_files_of_folders(tmp_path) -> None:
    for name in ("b/2.txt", "b/1.txt", "b/c/0.txt", "b/.hidden/x.txt", "b/.y", "a.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("a")
    (tmp_path / "empty").mkdir()
    found = find_files([tmp_path / "b", tmp_path / "a.txt"], "--train")
    assert [str(file.relative_to(tmp_path)) for file in found] == ["b/1.txt", "b/2.txt", "b/c/0.txt", "a.txt"]
    for name, words in (("none", "which does not exist: give text files"), ("empty", "which contains no files: give")):
        with pytest.raises(ValueError, match=f"--test is {tmp_path / name}, {words}"):
            find_files([tmp_path / name], "--test")
