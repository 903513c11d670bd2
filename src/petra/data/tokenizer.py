"""Tokenizers of language models: text to tokens and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from petra.data.text import encode_characters
from petra.formatting import first_line

END_OF_TEXT = "<|endoftext|>"
"""Default text of the token that separates documents."""
MIN_VOCAB_SIZE = 257
"""Size of the smallest byte-level vocabulary: all bytes and the end-of-text token."""
MAX_VOCAB_SIZE = 2**24
"""Size of the largest vocabulary that can be asked for: training reserves memory for it."""


class Tokenizer(Protocol):
    """Converts text to tokens and tokens to text."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens. Tokens are 0 to `vocab_size - 1`."""

    @property
    def start(self) -> int:
        """The token before a text without a prompt."""

    @property
    def end(self) -> int | None:
        """The token at the end of a document, or None if there is none."""

    def encode(self, text: str) -> list[int]:
        """Convert text to tokens."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Convert tokens to text."""


class ByteTokenizer:
    """One token for every byte of UTF-8."""

    vocab_size = 256
    start = ord("\n")
    end = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogateescape"))

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode("utf-8", "replace")


class CharacterTokenizer:
    """One token for every character.

    Args:
        characters: The characters in the order of their code points.
        where: The name of texts in errors.

    """

    end = None

    def __init__(self, characters: Sequence[str], where: str) -> None:
        self._characters, self._where = tuple(characters), where
        self.vocab_size = len(self._characters)
        self.start = self._characters.index("\n") if "\n" in self._characters else 0

    def encode(self, text: str) -> list[int]:
        return [int(token) for token in encode_characters(text, self._characters, self._where)]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self._characters[token] for token in tokens)


class HuggingFaceTokenizer:
    """A tokenizer of the Hugging Face library `tokenizers`.

    Texts are encoded as they are: without special tokens at their start or end, and with special tokens that they
    spell out, such as `<|endoftext|>`, as ordinary text.

    Args:
        tokenizer: The `tokenizers.Tokenizer`.
        end: The token that separates documents.

    """

    def __init__(self, tokenizer: Any, end: int) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        self._tokenizer, self.start, self.end = tokenizer, end, end
        self.vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @classmethod
    def read(cls, file: Path, end: int | str = END_OF_TEXT) -> HuggingFaceTokenizer:
        """Read a `tokenizer.json`.

        Args:
            file: The file.
            end: The token that separates documents, or its text.

        Returns:
            The tokenizer.

        Raises:
            ValueError: If the file cannot be read, is damaged or has no such token, or if `tokenizers` is not
                installed.

        """
        library = _library()
        try:
            content = file.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ValueError(f"{file} does not exist: give the tokenizer.json of a Hugging Face tokenizer") from None
        except IsADirectoryError:
            raise ValueError(f"{file} is a folder: give the tokenizer.json of a Hugging Face tokenizer") from None
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{file} is not a Hugging Face tokenizer (it is not UTF-8 at byte {error.start}): give a tokenizer.json"
            ) from error
        try:
            tokenizer = library.Tokenizer.from_str(content)
        except Exception as error:  # the library raises nothing more specific
            raise ValueError(
                f"{file} is damaged or not a Hugging Face tokenizer ({first_line(error)}): give a tokenizer.json"
            ) from error
        if isinstance(end, int):
            return cls(tokenizer, end)
        token = tokenizer.token_to_id(end)
        if token is None:
            added = [entry.content for entry in tokenizer.get_added_tokens_decoder().values()]
            known = f"--end-of-text with one of {', '.join(added[:8])}" if added else "another tokenizer"
            raise ValueError(f"{file} has no token {end!r} to separate documents with: give {known}")
        return cls(tokenizer, int(token))

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, end_text: str = END_OF_TEXT) -> HuggingFaceTokenizer:
        """Train byte-level byte-pair encoding, for which no text has unknown parts.

        Args:
            texts: The training texts.
            vocab_size: Maximum number of tokens, at least 257. There are fewer if the texts have too few words.
            end_text: The text of the token that separates documents. Its index is 0.

        Returns:
            The tokenizer.

        Raises:
            ValueError: If `vocab_size` is too small or too large, `end_text` is invalid, or `tokenizers` is not
                installed.

        """
        library = _library()
        check_end_of_text(end_text)
        check_vocab_size(vocab_size, end_text)
        tokenizer = library.Tokenizer(library.models.BPE())
        tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=vocab_size,
            min_frequency=2,
            show_progress=False,
            special_tokens=[end_text],
            initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        )
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer, int(tokenizer.token_to_id(end_text)))

    def encode(self, text: str) -> list[int]:
        """Convert a text to tokens.

        Args:
            text: The text.

        Returns:
            The tokens.

        Raises:
            ValueError: If the text comes from bytes that are not UTF-8.

        """
        if (position := _first_surrogate(text)) is not None:
            raise ValueError(
                f"the text is not UTF-8 at character {position} ({text[position]!r}), but the tokenizer reads only "
                "UTF-8: correct the text"
            )
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Convert several texts to tokens, on all cores.

        Args:
            texts: The texts.

        Returns:
            The tokens of each text.

        """
        return [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts), add_special_tokens=False)]

    def decode(self, tokens: Sequence[int]) -> str:
        """Convert tokens to text.

        Args:
            tokens: The tokens.

        Returns:
            The text. Bytes that are not valid UTF-8 become U+FFFD.

        """
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def to_json(self) -> str:
        """Serialise the tokenizer.

        Returns:
            The contents of `tokenizer.json`.

        """
        return str(self._tokenizer.to_str(pretty=True))


def check_end_of_text(text: str) -> None:
    """Raise `ValueError` if no token can have this text."""
    if not text or _first_surrogate(text) is not None:
        raise ValueError(
            f"--end-of-text is {text!r}, which cannot be a token: give a text in UTF-8, such as {END_OF_TEXT}"
        )


def check_vocab_size(size: int, end_text: str) -> None:
    """Raise `ValueError` if no tokenizer can be trained with this size."""
    if size < MIN_VOCAB_SIZE:
        raise ValueError(f"--vocab-size is {size}: give {MIN_VOCAB_SIZE} or more, for all bytes and {end_text}")
    if size > MAX_VOCAB_SIZE:
        raise ValueError(f"--vocab-size is {size}, too large for a tokenizer: give {MAX_VOCAB_SIZE} or less")


def _first_surrogate(text: str) -> int | None:
    """The index of the first character that UTF-8 cannot represent, or None.

    In an argument of a program, it stands for a byte that was not valid UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ValueError(
            "byte-pair encoding needs a package that is not installed: pip install 'petra[text]'"
        ) from error
    return tokenizers
