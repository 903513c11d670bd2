"""`petra tokenize`: encodes texts as token files for language models."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from petra.cli.options import add_options
from petra.data.token_files import TOKEN_FILES, TokenInfo, check_tokens
from petra.data.tokenization import DEFAULT_TEST_SHARE, DEFAULT_VOCAB_SIZE, tokenize
from petra.data.tokenizer import END_OF_TEXT, MIN_VOCAB_SIZE
from petra.formatting import counted, render
from petra.runs.option_fields import check_values, option

TEXTS, TOKENS = "texts", "tokens"
TRAIN = "petra train --model rev-gpt --schedule 1f1b --accumulate 4 --batch-size 16 --optimizer muon --lr 2e-3"
"""Exact gradients, with the optimizer and the number of sequences per update of experiments/language."""

_ESCAPES = {"\\n": "\n", "\\r": "\r", "\\t": "\t", "\\\\": "\\"}


def unescape(text: str) -> str:
    r"""Return a text with line breaks and tabs for `\n`, `\r` and `\t`.

    Args:
        text: The text as it was given on the command line.

    Returns:
        The text.

    Raises:
        ValueError: If the text is empty.
    """
    if not text:
        raise ValueError("give a text, such as '\\n\\n\\n'")
    return re.sub(r"\\[nrt\\]", lambda match: _ESCAPES[match[0]], text)


@dataclass(kw_only=True)
class TokenizeOptions:
    """The options of `petra tokenize`."""

    train: tuple[Path, ...] = option(
        (),
        help="training texts: files in UTF-8, also compressed (.gz, .xz), or folders of them",
        group=TEXTS,
        metavar="FILE",
        parse=Path,
        keywords={"nargs": "+"},
    )
    test: tuple[Path, ...] = option(
        (),
        help="test texts",
        group=TEXTS,
        metavar="FILE",
        parse=Path,
        default_text="the last documents of --train",
        keywords={"nargs": "+"},
    )
    test_share: float | None = option(
        None,
        help="share of the documents in --train to test with, or of the text if there is only one document",
        group=TEXTS,
        metavar="X",
        above=0,
        below=1,
        default_text=f"{DEFAULT_TEST_SHARE:g} without --test",
    )
    document_separator: str | None = option(
        None,
        help="text between documents within a file, such as '\\n\\n\\n' for two blank lines; it is removed",
        group=TEXTS,
        metavar="TEXT",
        parse=unescape,
        default_text="each file is one document",
        exclusive="documents",
    )
    document_start: str | None = option(
        None,
        help="start of a line that begins a new document, such as '# '; it is kept",
        group=TEXTS,
        metavar="TEXT",
        parse=unescape,
        exclusive="documents",
    )
    tokenizer: Path | None = option(
        None,
        help="tokenizer.json of any Hugging Face tokenizer",
        group=TOKENS,
        metavar="FILE",
        default_text="train a byte-level one on the training texts",
    )
    vocab_size: int | None = option(
        None,
        help="largest vocabulary of a new tokenizer",
        group=TOKENS,
        metavar="N",
        minimum=MIN_VOCAB_SIZE,
        default_text=str(DEFAULT_VOCAB_SIZE),
    )
    end_of_text: str = option(
        END_OF_TEXT, help="token of the tokenizer to write after each document", group=TOKENS, metavar="TOKEN"
    )
    out: Path | None = option(None, help="folder to write", metavar="FOLDER")
    overwrite: bool = option(False, help="replace the tokens in --out")
    check: Path | None = option(
        None, help="read the tokens in a folder and compare them with their hashes; write nothing", metavar="FOLDER"
    )
    quiet: bool = option(False, help="print no progress")


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "tokenize",
        description="Encodes texts as files of tokens, for `petra train --data tokens:FOLDER`. The texts may be larger "
        "than memory. The folder holds tokenizer.json, train.bin, test.bin and tokens.json.",
        epilog="Example: petra tokenize --train books/ --vocab-size 8192 --out books-8k",
    )
    add_options(parser, TokenizeOptions)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Write the tokens, and print how many there are."""
    check_values(TokenizeOptions, vars(options))
    if options.check is not None:
        if options.train or options.test or options.out is not None:
            raise ValueError("--check reads an existing folder: leave --train, --test and --out out")
        info = check_tokens(options.check.expanduser())
        print(f"{options.check} is as it was written\n{table(info)}")
        return
    if options.out is None:
        raise ValueError("--out is missing: give the folder to write")
    if options.test and options.test_share is not None:
        raise ValueError(f"--test-share is {options.test_share}, but --test is given: leave one of them out")
    if options.tokenizer is not None and options.vocab_size is not None:
        raise ValueError(f"--vocab-size is {options.vocab_size}, but --tokenizer has its own: leave one of them out")
    info = tokenize(
        options.train,
        options.test,
        options.out.expanduser(),
        tokenizer=options.tokenizer,
        vocab_size=options.vocab_size or DEFAULT_VOCAB_SIZE,
        end_of_text=options.end_of_text,
        test_share=options.test_share or DEFAULT_TEST_SHARE,
        separator=options.document_separator or "",
        start=options.document_start or "",
        overwrite=options.overwrite,
        quiet=options.quiet,
    )
    sys.stderr.flush()
    print(table(info))
    if options.train:
        print(f"\ntrain with: {TRAIN} --data {shlex.quote(f'tokens:{options.out}')}")


def table(info: TokenInfo) -> str:
    """Return the number of documents, bytes and tokens of each split, and the size of the vocabulary."""
    rows = []
    for split in TOKEN_FILES:
        if (counts := info.counts(split)) is not None:
            ratio = f"{counts.bytes / counts.tokens:.3f}"
            rows.append([split, f"{counts.documents:,}", f"{counts.bytes:,}", f"{counts.tokens:,}", ratio])
    shown = render(["split", "documents", "bytes", "tokens", "bytes per token"], rows)
    return f"{shown}\nvocabulary of {counted(info.vocab_size, 'token')}, {info.dtype.itemsize} bytes each in the files"
