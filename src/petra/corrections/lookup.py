"""Finds corrections by name, and checks which of them can be combined."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from petra.corrections.correction import Correction
from petra.corrections.damp import Damp
from petra.corrections.inertia import Inertia
from petra.corrections.pipemare import Discrepancy, Reschedule
from petra.corrections.predict import Coast, Predict
from petra.corrections.shrink import Shrink
from petra.corrections.spike import Spike
from petra.formatting import unknown

CORRECTIONS: dict[str, type[Correction]] = {
    kind.name: kind for kind in (Predict, Coast, Inertia, Spike, Shrink, Damp, Reschedule, Discrepancy)
}
"""All corrections by name."""


def find(text: str) -> Correction:
    """Create a correction from its name and parameter.

    Args:
        text: A key of `CORRECTIONS`, followed by a colon and a number if it takes a parameter, like `shrink:0.9`.

    Returns:
        The correction.

    Raises:
        ValueError: There is no such correction, or its parameter is missing or invalid.
    """
    name, colon, value = text.partition(":")
    if name not in CORRECTIONS:
        raise unknown("correction", name, CORRECTIONS)
    kind = CORRECTIONS[name]
    parameters = fields(kind)  # type: ignore[arg-type]
    if colon and not parameters:
        raise ValueError(f"{text!r} has a parameter, but {name} takes none: leave it out")
    if not colon:
        try:
            return kind()
        except TypeError:
            raise ValueError(f"{name} needs a parameter: write it like {kind.example}") from None
    try:
        number = int(value) if parameters[0].type == "int" else float(value)
    except ValueError:
        raise ValueError(f"{text!r} is not a correction with a number: write it like {kind.example}") from None
    return kind(number)  # type: ignore[call-arg]


def choose(asked: Iterable[str | Correction]) -> list[Correction]:
    """Create corrections and check that they can be combined.

    Args:
        asked: Corrections, or texts for `find`.

    Returns:
        The corrections, sorted by name.

    Raises:
        ValueError: A correction is invalid or given twice, or two of them contradict each other.
    """
    found = [find(c) if isinstance(c, str) else c for c in asked]
    for correction in found:
        if not isinstance(correction, Correction):
            raise ValueError(
                f"{correction!r} is not a correction: give a name like predict, or an object of petra.corrections"
            )
    chosen = sorted(found, key=lambda c: c.name)
    names = [c.name for c in chosen]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{twice[0]} is given more than once: give it once")
    if {"predict", "coast"} <= set(names):
        raise ValueError("predict and coast both set the weights of the forward: choose one of them")
    for name in ("predict", "coast"):
        if {name, "discrepancy"} <= set(names):
            raise ValueError(
                f"{name} moves the forward to the weights of the backward, and discrepancy moves the backward to those "
                "of the forward: choose one of them"
            )
    return chosen
