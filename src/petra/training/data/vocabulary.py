"""Words and characters as numbers: a vocabulary that is counted from the training split, with nothing to download."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

START, PAD, UNKNOWN = range(3)
_SPECIAL = ("<s>", "<pad>", "<unk>")
_WORD = re.compile(r"\w+|[^\w\s]")
_SMALLEST = 16


def split_words(text: str) -> list[str]:
    """Lower-case words, and every other character that is not space by itself."""
    return _WORD.findall(text.lower())


class Vocabulary:
    """Turns a text into a fixed number of tokens.

    0 is ``<s>``, which stands in front of every text, 1 ``<pad>``, which fills up behind it, and 2 ``<unk>`` for
    characters that are unknown. A word that is not an entry is spelled: its first character, then each further one as
    ``##c``.
    """

    def __init__(self, entries: Sequence[str]) -> None:
        if tuple(entries[: len(_SPECIAL)]) != _SPECIAL:
            raise ValueError(f"entries begin with {list(entries[:3])}: a vocabulary begins with {list(_SPECIAL)}")
        self.entries = tuple(entries)
        self._ids = {entry: i for i, entry in enumerate(self.entries)}

    @classmethod
    def of(cls, texts: Iterable[str], size: int) -> "Vocabulary":
        """At most ``size`` entries: characters take at most half of them, words that come twice the rest.

        Both by frequency, and where that is equal in order of their code points. Words that come once are left to be
        spelled, so that spelling is learned.
        """
        if size < _SMALLEST:
            raise ValueError(f"--vocab-size is {size}: give {_SMALLEST} or more")
        words = Counter(word for text in texts for word in split_words(text))
        if not words:
            raise ValueError("the training texts hold no words: give some that do")
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

    def encode(self, text: str, length: int) -> list[int]:
        """``length`` tokens: what is longer is cut, what is shorter filled up."""
        tokens = [START]
        for word in split_words(text):
            if len(tokens) >= length:
                break
            known = self._ids.get(word)
            tokens += self._spelled(word) if known is None else [known]
        return tokens[:length] + [PAD] * (length - len(tokens))

    def _spelled(self, word: str) -> list[int]:
        pieces = [word[0], *(f"##{character}" for character in word[1:])]
        return [self._ids.get(piece, UNKNOWN) for piece in pieces]


def _by_frequency(counts: Counter[str]) -> list[str]:
    return sorted(counts, key=lambda entry: (-counts[entry], entry))
