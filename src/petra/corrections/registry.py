"""Corrections by name, and which of them go together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from petra.corrections.correction import Correction
from petra.corrections.inertia import Inertia
from petra.corrections.pipemare import Discrepancy, Reschedule
from petra.corrections.predict import Coast, Predict
from petra.corrections.shrink import Shrink
from petra.corrections.spike import Spike
from petra.names import unknown

CORRECTIONS: dict[str, type[Correction]] = {
    kind.name: kind for kind in (Predict, Coast, Inertia, Spike, Shrink, Reschedule, Discrepancy)
}
"""All corrections by name."""


def find(text: str) -> Correction:
    """The correction of a name, or of a name and its parameter like ``shrink:0.9``, or an error that helps."""
    name, colon, value = text.partition(":")
    if name not in CORRECTIONS:
        raise unknown("correction", name, CORRECTIONS)
    kind = CORRECTIONS[name]
    wanted = fields(kind)  # type: ignore[arg-type]
    if colon and not wanted:
        raise ValueError(f"{text!r} has a parameter, but {name} takes none: leave it out")
    if not colon:
        try:
            return kind()
        except TypeError:
            raise ValueError(f"{name} needs a parameter: write it like {kind.example}") from None
    try:
        number = int(value) if wanted[0].type == "int" else float(value)
    except ValueError:
        raise ValueError(f"{text!r} is not a correction with a number: write it like {kind.example}") from None
    return kind(number)  # type: ignore[call-arg]


def choose(asked: Iterable[str | Correction]) -> list[Correction]:
    """Corrections in the order of their names; raises ValueError if they do not go together."""
    found = [find(c) if isinstance(c, str) else c for c in asked]
    for correction in found:
        if not isinstance(correction, Correction):
            raise ValueError(
                f"{correction!r} is no correction: give a name like predict, or an object of petra.corrections"
            )
    chosen = sorted(found, key=lambda c: c.name)
    names = [c.name for c in chosen]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{twice[0]} is given more than once: give it once")
    if {"predict", "coast"} <= set(names):
        raise ValueError("predict and coast are two guesses at the same weights: choose one of them")
    for name in ("predict", "coast"):
        if {name, "discrepancy"} <= set(names):
            raise ValueError(
                f"{name} brings the forward to the weights of the backward, and discrepancy the backward to those of "
                "the forward: choose one of them"
            )
    return chosen
