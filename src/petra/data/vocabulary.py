"""A vocabulary of words and characters that is built from the training split, with nothing to download."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

START, PAD, UNKNOWN = range(3)
_SPECIAL = ("<s>", "<pad>", "<unk>")
_WORD = re.compile(r"\w+|[^\w\s]")
_MIN_SIZE = 16


def split_words(text: str) -> list[str]:
    """Split a text into lower-case words and single other characters, without white space."""
    return _WORD.findall(text.lower())


class Vocabulary:
    """Encodes texts as a fixed number of tokens.

    Token 0 is `<s>`, which begins every text, token 1 is `<pad>`, which fills up short texts, and token 2 is `<unk>`,
    which replaces unknown characters. A word that is not an entry is spelled: its first character, then each further
    character `c` as `##c`.

    Args:
        entries: The text of each token. The first three are `<s>`, `<pad>` and `<unk>`.

    Raises:
        ValueError: If the first three entries are others.

    """

    def __init__(self, entries: Sequence[str]) -> None:
        if tuple(entries[: len(_SPECIAL)]) != _SPECIAL:
            raise ValueError(f"entries begin with {list(entries[:3])}: begin with {list(_SPECIAL)}")
        self.entries = tuple(entries)
        self._ids = {entry: i for i, entry in enumerate(self.entries)}

    @classmethod
    def from_texts(cls, texts: Iterable[str], size: int) -> "Vocabulary":
        """Build the vocabulary of some texts.

        Characters take at most half of the entries, and words that occur at least twice take the others. Both are
        ordered by frequency, then by code points. Words that occur once are spelled, so that the network learns from
        spelled words too.

        Args:
            texts: The training texts.
            size: Maximum number of entries, at least 16.

        Returns:
            The vocabulary.

        Raises:
            ValueError: If `size` is too small or the texts contain no words.

        """
        if size < _MIN_SIZE:
            raise ValueError(f"--vocab-size is {size}: give {_MIN_SIZE} or more")
        words = Counter(word for text in texts for word in split_words(text))
        if not words:
            raise ValueError("the training texts contain no words: give texts with words")
        characters: Counter[str] = Counter()
        for word, count in words.items():
            for character in word:
                characters[character] += count
        alphabet = _by_frequency(characters)[: (size - len(_SPECIAL)) // 4]
        entries = [*_SPECIAL, *alphabet, *(f"##{character}" for character in alphabet)]
        known = set(alphabet)
        frequent = [word for word in _by_frequency(words) if words[word] > 1 and word not in known]
        return cls([*entries, *frequent[: size - len(entries)]])

    def __len__(self) -> int:
        return len(self.entries)

    def encode(self, text: str, seq_len: int) -> list[int]:
        """Encode a text.

        Args:
            text: The text.
            seq_len: Number of tokens. Longer texts are cut, shorter ones are padded.

        Returns:
            `seq_len` tokens.

        """
        tokens = [START]
        for word in split_words(text):
            if len(tokens) >= seq_len:
                break
            known = self._ids.get(word)
            tokens += self._spell(word) if known is None else [known]
        return tokens[:seq_len] + [PAD] * (seq_len - len(tokens))

    def _spell(self, word: str) -> list[int]:
        pieces = [word[0], *(f"##{character}" for character in word[1:])]
        return [self._ids.get(piece, UNKNOWN) for piece in pieces]


def _by_frequency(counts: Counter[str]) -> list[str]:
    return sorted(counts, key=lambda entry: (-counts[entry], entry))
