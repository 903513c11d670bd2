"""Writes token files: trains or reads a tokenizer, and encodes texts of any size."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby
from pathlib import Path

import numpy as np
from tqdm import tqdm

from petra.data.documents import PIECE_CHARACTERS, DocumentReader, Piece, find_files
from petra.data.token_files import INFO, TOKEN_FILES, TOKENIZER, TokenCounts, TokenInfo, token_dtype
from petra.data.tokenizer import END_OF_TEXT, HuggingFaceTokenizer, check_end_of_text, check_vocab_size

DEFAULT_VOCAB_SIZE, DEFAULT_TEST_SHARE = 8192, 0.05
TOKENIZER_BYTES = 2**30
"""Bytes of the training texts that a tokenizer is trained on: more take long and change it little."""

_BATCH_CHARACTERS = 2**20
_PARTIAL = ".partial"


@dataclass(frozen=True)
class _Source:
    """The documents of one split, or of both, which can be read several times."""

    reader: DocumentReader
    assign: Callable[[Iterable[Piece]], Iterator[tuple[str, Piece]]]
    """Gives each piece its split, first `train`, then `test`."""

    def read(self, title: str, quiet: bool) -> Iterator[tuple[str, Piece]]:
        total = sum(file.stat().st_size for file in self.reader.files)
        # Without a terminal there is no bar.
        with tqdm(total=total, desc=title, unit="B", unit_scale=True, leave=False, disable=quiet or None) as bar:
            yield from self.assign(replace(self.reader, progress=bar.update))


def tokenize(
    train: Sequence[Path],
    test: Sequence[Path],
    out: Path,
    *,
    tokenizer: Path | None = None,
    vocab_size: int = DEFAULT_VOCAB_SIZE,
    end_of_text: str = END_OF_TEXT,
    test_share: float = DEFAULT_TEST_SHARE,
    separator: str = "",
    start: str = "",
    overwrite: bool = False,
    quiet: bool = True,
    piece_characters: int = PIECE_CHARACTERS,
) -> TokenInfo:
    """Write a folder with tokens: `tokenizer.json`, `train.bin`, `test.bin` and `tokens.json`.

    Texts are read in pieces, so they may be larger than memory. Files are renamed into place once all are complete.

    Args:
        train: Text files or folders for training. They may be empty if `tokenizer` and `test` are given.
        test: Text files or folders for testing; if there are none, the last documents of `train` are used.
        out: The folder to write.
        tokenizer: An existing `tokenizer.json`; by default, a tokenizer is trained on the training texts.
        vocab_size: Maximum size of the vocabulary of a trained tokenizer.
        end_of_text: The token that is written after each document.
        test_share: Share of the documents to test with, if `test` is empty; of the text, if there is one document.
        separator: Text between documents within a file.
        start: Text at the start of a line that begins a new document within a file.
        overwrite: Replace tokens that are in the folder.
        quiet: Show no progress.
        piece_characters: Characters that are encoded together, approximately.

    Returns:
        The contents of `tokens.json`.

    Raises:
        ValueError: If an argument is invalid, a file cannot be read, or a split has no text.

    """
    if (out / INFO).exists() and not overwrite:
        raise ValueError(f"{out} contains tokens already: give --overwrite to replace them, or another --out")
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out is {out}, which is a file: give a folder")
    if not train and not (test and tokenizer):
        raise ValueError("--train is missing: give text files, or --test and --tokenizer to encode a test text only")
    if separator and start:
        raise ValueError("--document-separator and --document-start are given: leave one of them out")
    check_end_of_text(end_of_text)
    if tokenizer is not None:  # before anything is read or written
        HuggingFaceTokenizer.read(tokenizer.expanduser(), end_of_text)
    else:
        check_vocab_size(vocab_size, end_of_text)

    sources = []
    for split, paths in (("train", train), ("test", test)):
        if paths:
            files = find_files(paths, f"--{split}")
            reader = DocumentReader(files, separator, start, piece_characters)
            sources.append(_Source(reader, partial(_assign_all, split=split)))
    if not test:
        sources = [_hold_out(sources[0], test_share, quiet)]
    with _partial_folder(out) as folder:
        if tokenizer is None:
            texts = _training_texts(sources[0].read("training the tokenizer", quiet))
            made = HuggingFaceTokenizer.train(texts, vocab_size, end_of_text)
            (folder / TOKENIZER).write_text(made.to_json(), encoding="utf-8")
        else:
            shutil.copyfile(tokenizer.expanduser(), folder / TOKENIZER)
        # The tokenizer is read from the file, so the tokens are those that every reader of the file gets.
        used = HuggingFaceTokenizer.read(folder / TOKENIZER, end_of_text)
        counts = {}
        pieces = chain.from_iterable(source.read("encoding", quiet) for source in sources)
        for split, group in groupby(pieces, key=lambda entry: entry[0]):
            counts[split] = _encode((piece for _, piece in group), used, folder / TOKEN_FILES[split])
        for split in ("train", "test") if train else ("test",):
            if split not in counts or not counts[split].bytes:
                raise ValueError(f"the {split} split has no text: give files with text in them")
        digest = hashlib.sha256((folder / TOKENIZER).read_bytes()).hexdigest()
        info = TokenInfo(used.vocab_size, used.end, digest, counts.get("train"), counts["test"])
        (folder / INFO).write_text(json.dumps(info.to_json(), indent=2) + "\n")
        for name in (INFO, *TOKEN_FILES.values()):
            (out / name).unlink(missing_ok=True)
        for name in (TOKENIZER, *TOKEN_FILES.values(), INFO):  # without the last one, the folder holds no tokens
            if (folder / name).exists():
                (folder / name).replace(out / name)
    return info


@contextmanager
def _partial_folder(out: Path) -> Iterator[Path]:
    """A folder for incomplete files, which is removed at the end, also after an error."""
    folder, existed = out / _PARTIAL, out.exists()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if not existed and not any(out.iterdir()):
            out.rmdir()


def _hold_out(source: _Source, share: float, quiet: bool) -> _Source:
    """Hold out the last share of the documents for testing, or of the text if there is only one document."""
    documents = characters = 0
    for _, (text, ends) in source.read("counting documents", quiet):
        documents += ends
        characters += len(text)
    if documents > 1:
        assign, first = _assign_documents, documents - min(max(1, math.floor(documents * share)), documents - 1)
    else:
        assign, first = _assign_characters, characters - max(1, math.floor(characters * share))
    if first < 1:
        raise ValueError(f"the training text has {characters} characters, too few to hold some out: give a longer text")
    return replace(source, assign=partial(assign, first=first))


def _assign_all(pieces: Iterable[Piece], split: str) -> Iterator[tuple[str, Piece]]:
    """All pieces in the same split."""
    return ((split, piece) for piece in pieces)


def _assign_documents(pieces: Iterable[Piece], first: int) -> Iterator[tuple[str, Piece]]:
    """Documents from the one with index `first` on are the test split."""
    document = 0
    for piece in pieces:
        yield "test" if document >= first else "train", piece
        document += piece.ends


def _assign_characters(pieces: Iterable[Piece], first: int) -> Iterator[tuple[str, Piece]]:
    """The characters of a document from the one with index `first` on are the test split."""
    position = 0
    for text, ends in pieces:
        cut = min(max(first - position, 0), len(text))
        if position < first:
            yield "train", Piece(text[:cut], position + cut == first)
        position += len(text)
        if cut < len(text) or ends:
            yield "test", Piece(text[cut:], ends)


def _training_texts(pieces: Iterable[tuple[str, Piece]]) -> Iterator[str]:
    """The texts of the training split, up to `TOKENIZER_BYTES` bytes."""
    remaining = TOKENIZER_BYTES
    for split, (text, _) in pieces:
        if split != "train" or remaining <= 0:
            return
        yield text
        remaining -= len(text.encode())


def _encode(pieces: Iterable[Piece], tokenizer: HuggingFaceTokenizer, file: Path) -> TokenCounts:
    """Write the tokens of documents to a file, each document with an end-of-text token after it."""
    dtype, hashed = token_dtype(tokenizer.vocab_size), hashlib.sha256()
    tokens = text_bytes = documents = 0
    with file.open("wb") as output:
        for batch in _batches(pieces):
            for ids, piece in zip(tokenizer.encode_batch([text for text, _ in batch]), batch, strict=True):
                row = np.array([*ids, tokenizer.end] if piece.ends else ids, dtype)
                output.write(row.data)
                hashed.update(row.data)
                tokens += len(row)
                text_bytes += len(piece.text.encode())
                documents += piece.ends
    return TokenCounts(tokens, text_bytes, documents, hashed.hexdigest())


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Lists of pieces that are encoded together."""
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text) + 1
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
