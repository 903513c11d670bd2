"""A text of sentences from a small grammar, so that trials need no files."""

from __future__ import annotations

from random import Random

WORDS = """
the captain,a sailor,the old woman,his brother,the doctor,a stranger,our neighbour,the king
saw,followed,remembered,praised,lost,found,painted,feared
the river,a white house,the long road,an empty boat,the burning lamp,a letter,the harbour,the storm
in the morning,after dinner,at night,before the war,that winter,after supper,once more,in silence
"""
WHO, DOES, WHAT, WHEN = (line.split(",") for line in WORDS.split("\n")[1:-1])


def made_text(characters: int, seed: int = 0) -> str:
    """Return a text of at least so many characters, in documents that are separated by two blank lines."""
    random = Random(seed)  # noqa: S311 (not for cryptography)
    text, length = list[str](), 0
    while length < characters:
        subject, verb, thing, when = (random.choice(words) for words in (WHO, DOES, WHAT, WHEN))
        sentence = f"{when.capitalize()} {subject} {verb} {thing}." if random.random() < 0.3 else ""
        sentence = sentence or f"{subject.capitalize()} {verb} {thing} {when}."
        text.append(sentence + ("\n\n\n" if random.random() < 0.01 else "\n" if random.random() < 0.1 else " "))
        length += len(text[-1])
    return "".join(text)
